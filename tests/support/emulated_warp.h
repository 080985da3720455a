// csrc/cuda/warp.h for a CPU: the threads of a block take turns, each on a stack of its own. The lanes of a warp change
// at every function in which they meet, the warps of a block where all of it meets; warps go in the opposite order in
// every other block, so that a missing sync_block() that goes unnoticed in one order is seen in the other. Lanes, or
// warps, that do not meet at the same function end the program with a message.
#ifndef GACT_WARP_H
#define GACT_WARP_H

#include <setjmp.h>
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>

#include "common/group_codec.h"

#define GACT_KERNEL(...) extern "C" void
#define GACT_SHARED static

namespace gact {

// ---- threads in turns

constexpr int kLanes = 32;
constexpr int kThreads = 1024;
constexpr int kStackBytes = 1 << 16;
constexpr int kArguments = 8;
constexpr const char* kSyncBlock = "sync_block";

struct Machine {
  u32 thread, block, blocks;
  const char* functions[kThreads];  // at which a thread waits; null when it has returned from the kernel
  u32 values[2][kThreads];          // what threads brought to the last meeting and to the one before it
  int meetings[kThreads];
  void (*kernel)(i64, i64, i64, i64, i64, i64, i64, i64);
  i64 arguments[kArguments];
  jmp_buf threads[kThreads], turns;
  ucontext_t starts[kThreads];
  alignas(64) char stacks[kThreads][kStackBytes];
};

inline Machine machine;

// Gives `value` to the other lanes of the warp and waits for theirs, which the result has.
inline const u32* meet(const char* function, u32 value) {
  const u32 thread = machine.thread;
  u32* values = machine.values[machine.meetings[thread]++ % 2];
  values[thread] = value;
  machine.functions[thread] = function;
  if (_setjmp(machine.threads[thread]) == 0) _longjmp(machine.turns, 1);
  return values + thread / kLanes * kLanes;
}

inline void run_thread() {
  const i64* a = machine.arguments;
  machine.kernel(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7]);
  machine.functions[machine.thread] = nullptr;
  _longjmp(machine.turns, 1);
}

inline void take_turn(u32 thread, bool first) {
  machine.thread = thread;
  if (_setjmp(machine.turns) != 0) return;
  if (!first) _longjmp(machine.threads[thread], 1);
  ucontext_t& start = machine.starts[thread];
  getcontext(&start);
  start.uc_stack.ss_sp = machine.stacks[thread];
  start.uc_stack.ss_size = kStackBytes;
  makecontext(&start, run_thread, 0);
  setcontext(&start);
}

inline void check_together(const char* kind, int number, u32 thread, u32 other) {
  const char* here = machine.functions[thread];
  const char* there = machine.functions[other];
  if (here == there) return;
  std::fprintf(stderr, "%s %d is at %s while %s 0 is at %s\n", kind, number, here != nullptr ? here : "the end", kind,
               there != nullptr ? there : "the end");
  std::abort();
}

// Until the warp waits for the others of its block or is at its end.
inline void run_warp(u32 first_thread, bool first) {
  do {
    for (int lane = 0; lane < kLanes; ++lane) {
      take_turn(first_thread + lane, first);
      check_together("lane", lane, first_thread + lane, first_thread);
    }
    first = false;
  } while (machine.functions[first_thread] != nullptr && machine.functions[first_thread] != kSyncBlock);
}

inline void run_block(int warps) {
  for (int& meetings : machine.meetings) meetings = 0;
  bool first = true;
  do {
    for (int i = 0; i < warps; ++i) run_warp((machine.block % 2 == 0 ? i : warps - 1 - i) * kLanes, first);
    for (int warp = 0; warp < warps; ++warp) check_together("warp", warp, warp * kLanes, 0);
    first = false;
  } while (machine.functions[0] != nullptr);
}

// ---- the functions of csrc/cuda/warp.h

inline u32 thread_of_block() { return machine.thread; }

inline u32 block_of_grid() { return machine.block; }

inline u32 blocks_of_grid() { return machine.blocks; }

inline void sync_block() { meet(kSyncBlock, 0); }

inline bool any_lane(bool value) {
  const u32* values = meet("any_lane", value);
  u32 any = 0;
  for (int lane = 0; lane < kLanes; ++lane) any |= values[lane];
  return any != 0;
}

inline u32 lanes_with(bool value) {
  const u32* values = meet("lanes_with", value);
  u32 bits = 0;
  for (int lane = 0; lane < kLanes; ++lane) bits |= values[lane] << lane;
  return bits;
}

inline u32 shuffle(u32 value, u32 source_lane) { return meet("shuffle", value)[source_lane % kLanes]; }

inline u32 shuffle_xor(u32 value, u32 mask) {
  const u32 source_lane = machine.thread % kLanes ^ mask;
  return meet("shuffle_xor", value)[source_lane];
}

inline double shuffle_xor(double value, u32 mask) {
  u32 halves[2];
  std::memcpy(halves, &value, sizeof(value));
  for (u32& half : halves) half = shuffle_xor(half, mask);
  std::memcpy(&value, halves, sizeof(value));
  return value;
}

template <class T>
T* rows_after(T* pointer, u32 rows, u32 columns) {
  return pointer + static_cast<i64>(rows) * columns;
}

inline u32 select_bytes(u32 low, u32 high, u32 selector) {
  const u64 both = low | static_cast<u64>(high) << 32;
  u32 result = 0;
  for (int i = 0; i < 4; ++i) result |= static_cast<u32>(both >> (8 * (selector >> (4 * i) & 7u)) & 0xFFu) << (8 * i);
  return result;
}

inline u32 add_byte_distances(u32 a, u32 b, u32 sum) {
  for (int shift = 0; shift < 32; shift += 8) {
    sum += static_cast<u32>(std::abs(static_cast<int>(a >> shift & 0xFFu) - static_cast<int>(b >> shift & 0xFFu)));
  }
  return sum;
}

inline float smaller(float a, float b) {
  if (is_nan(a) || is_nan(b)) return float_of(0x7FFFFFFFu);
  return a == b ? float_of(bits_of(a) | bits_of(b)) : (a < b ? a : b);
}

inline float larger(float a, float b) {
  if (is_nan(a) || is_nan(b)) return float_of(0x7FFFFFFFu);
  return a == b ? float_of(bits_of(a) & bits_of(b)) : (a > b ? a : b);
}

template <class T>
void widen_halves(u32 pair, T, float* low, float* high) {
  *low = to_float(T{static_cast<u16>(pair)});
  *high = to_float(T{static_cast<u16>(pair >> 16)});
}

template <class T>
u32 narrow_pair(float low, float high, T) {
  T narrow[2];
  from_float(low, &narrow[0]);
  from_float(high, &narrow[1]);
  return narrow[0].bits | static_cast<u32>(narrow[1].bits) << 16;
}

template <class T>
u32 smaller_pair(u32 a, u32 b, T type) {
  float of_a[2], of_b[2];
  widen_halves(a, type, &of_a[0], &of_a[1]);
  widen_halves(b, type, &of_b[0], &of_b[1]);
  return narrow_pair(smaller(of_a[0], of_b[0]), smaller(of_a[1], of_b[1]), type);
}

template <class T>
u32 larger_pair(u32 a, u32 b, T type) {
  float of_a[2], of_b[2];
  widen_halves(a, type, &of_a[0], &of_a[1]);
  widen_halves(b, type, &of_b[0], &of_b[1]);
  return narrow_pair(larger(of_a[0], of_b[0]), larger(of_a[1], of_b[1]), type);
}

}  // namespace gact

// Runs a kernel of integer and pointer arguments; unused ones are ignored.
extern "C" void launch(void* kernel, gact::i64 blocks, gact::i64 threads, const gact::i64 arguments[gact::kArguments]) {
  using gact::machine;
  machine.kernel = reinterpret_cast<decltype(machine.kernel)>(kernel);
  for (int i = 0; i < gact::kArguments; ++i) machine.arguments[i] = arguments[i];
  machine.blocks = static_cast<gact::u32>(blocks);
  for (machine.block = 0; machine.block < machine.blocks; ++machine.block) {
    gact::run_block(static_cast<int>(threads) / gact::kLanes);
  }
}

#endif  // GACT_WARP_H
