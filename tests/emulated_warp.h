// csrc/warp.h for a CPU: the 32 lanes of a warp take turns, each on a stack of its own, and change at every function in
// which lanes meet. Lanes that do not meet at the same function end the program with a message.
#ifndef GACT_WARP_H
#define GACT_WARP_H

#include <setjmp.h>
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>

#include "codec.h"

#define GACT_KERNEL(threads) extern "C" void
#define GACT_SHARED static

namespace gact {

// ---- lanes in turns

constexpr int kLanes = 32;
constexpr int kStackBytes = 1 << 16;

struct Machine {
  u32 thread, block, blocks;
  const char* functions[kLanes];  // at which a lane waits; null when it has returned from the kernel
  u32 values[2][kLanes];          // what lanes brought to the last meeting and to the one before it
  int meetings[kLanes];
  void (*kernel)(i64, i64, i64, i64, i64, i64);
  i64 arguments[6];
  jmp_buf lanes[kLanes], turns;
  ucontext_t starts[kLanes];
  alignas(64) char stacks[kLanes][kStackBytes];
};

inline Machine machine;

// Gives `value` to the other lanes of the warp and waits for theirs, which `machine.values` then has.
inline const u32* meet(const char* function, u32 value) {
  const u32 lane = machine.thread % kLanes;
  u32* values = machine.values[machine.meetings[lane]++ % 2];
  values[lane] = value;
  machine.functions[lane] = function;
  if (_setjmp(machine.lanes[lane]) == 0) _longjmp(machine.turns, 1);
  return values;
}

inline void run_lane() {
  const i64* a = machine.arguments;
  machine.kernel(a[0], a[1], a[2], a[3], a[4], a[5]);
  machine.functions[machine.thread % kLanes] = nullptr;
  _longjmp(machine.turns, 1);
}

inline void take_turn(u32 thread, bool first) {
  const u32 lane = thread % kLanes;
  machine.thread = thread;
  if (_setjmp(machine.turns) != 0) return;
  if (!first) _longjmp(machine.lanes[lane], 1);
  ucontext_t& start = machine.starts[lane];
  getcontext(&start);
  start.uc_stack.ss_sp = machine.stacks[lane];
  start.uc_stack.ss_size = kStackBytes;
  makecontext(&start, run_lane, 0);
  setcontext(&start);
}

inline void run_warp(u32 first_thread) {
  for (int& meetings : machine.meetings) meetings = 0;
  for (bool first = true; first || machine.functions[0] != nullptr; first = false) {
    for (int lane = 0; lane < kLanes; ++lane) {
      take_turn(first_thread + lane, first);
      if (machine.functions[lane] == machine.functions[0]) continue;
      const char* here = machine.functions[lane] != nullptr ? machine.functions[lane] : "the end";
      const char* there = machine.functions[0] != nullptr ? machine.functions[0] : "the end";
      std::fprintf(stderr, "lane %d is at %s while lane 0 is at %s\n", lane, here, there);
      std::abort();
    }
  }
}

// ---- the functions of csrc/warp.h

inline u32 thread_of_block() { return machine.thread; }

inline u32 block_of_grid() { return machine.block; }

inline u32 blocks_of_grid() { return machine.blocks; }

inline u32 warp_of_block() { return machine.thread / kLanes; }

inline void sync_warp() { meet("sync_warp", 0); }

inline bool any_lane(bool value) {
  const u32* values = meet("any_lane", value);
  bool any = false;
  for (int lane = 0; lane < kLanes; ++lane) any |= values[lane] != 0;
  return any;
}

inline u32 shuffle(u32 value, u32 source_lane) { return meet("shuffle", value)[source_lane % kLanes]; }

inline u32 shuffle_xor(u32 value, u32 mask) {
  const u32 source_lane = machine.thread % kLanes ^ mask;
  return meet("shuffle_xor", value)[source_lane];
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
void widen_pair(u32 pair, T, float* low, float* high) {
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
  widen_pair(a, type, &of_a[0], &of_a[1]);
  widen_pair(b, type, &of_b[0], &of_b[1]);
  return narrow_pair(smaller(of_a[0], of_b[0]), smaller(of_a[1], of_b[1]), type);
}

template <class T>
u32 larger_pair(u32 a, u32 b, T type) {
  float of_a[2], of_b[2];
  widen_pair(a, type, &of_a[0], &of_a[1]);
  widen_pair(b, type, &of_b[0], &of_b[1]);
  return narrow_pair(larger(of_a[0], of_b[0]), larger(of_a[1], of_b[1]), type);
}

}  // namespace gact

// Runs a kernel of integer and pointer arguments; unused ones are ignored.
extern "C" void launch(void* kernel, gact::i64 blocks, gact::i64 threads, const gact::i64 arguments[6]) {
  using gact::machine;
  machine.kernel = reinterpret_cast<void (*)(gact::i64, gact::i64, gact::i64, gact::i64, gact::i64, gact::i64)>(kernel);
  for (int i = 0; i < 6; ++i) machine.arguments[i] = arguments[i];
  machine.blocks = static_cast<gact::u32>(blocks);
  for (machine.block = 0; machine.block < machine.blocks; ++machine.block) {
    for (gact::u32 thread = 0; thread < threads; thread += gact::kLanes) gact::run_warp(thread);
  }
}

#endif  // GACT_WARP_H
