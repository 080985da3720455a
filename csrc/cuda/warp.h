// What the .cu files need of a GPU beyond C++: the lanes of a warp, and instructions that C++ has no operator for.
// tests/support/emulated_warp.h has the same functions for a CPU and defines the guard below; add a function to both.
#ifndef GACT_WARP_H
#define GACT_WARP_H

#include "common/group_codec.h"

// Threads of a block, and optionally the number of blocks that should fit on a multiprocessor.
#define GACT_KERNEL(...) extern "C" __global__ void __launch_bounds__(__VA_ARGS__)
#define GACT_SHARED __shared__

namespace gact {

constexpr u32 kAllLanes = 0xFFFFFFFFu;

GACT_FN u32 thread_of_block() { return threadIdx.x; }

GACT_FN u32 block_of_grid() { return blockIdx.x; }

GACT_FN u32 blocks_of_grid() { return gridDim.x; }

GACT_FN void sync_block() { __syncthreads(); }

GACT_FN bool any_lane(bool value) { return __any_sync(kAllLanes, value); }

// Bit i: whether it is true in lane i.
GACT_FN u32 lanes_with(bool value) { return __ballot_sync(kAllLanes, value); }

GACT_FN u32 shuffle(u32 value, u32 source_lane) { return __shfl_sync(kAllLanes, value, source_lane); }

GACT_FN u32 shuffle_xor(u32 value, u32 mask) { return __shfl_xor_sync(kAllLanes, value, mask); }

GACT_FN double shuffle_xor(double value, u32 mask) { return __shfl_xor_sync(kAllLanes, value, mask); }

// `pointer`, in global memory, plus `rows` times `columns` elements; in one instruction, where a compiler uses four.
template <class T>
GACT_FN T* rows_after(T* pointer, u32 rows, u32 columns) {
  T* result;
  const u32 row_bytes = columns * static_cast<u32>(sizeof(T));
  asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(result) : "r"(rows), "r"(row_bytes), "l"(pointer));
  __builtin_assume(__isGlobal(result));
  return result;
}

// Byte i of the result is the byte of (low, high) that hexadecimal digit i of the selector names.
GACT_FN u32 select_bytes(u32 low, u32 high, u32 selector) { return __byte_perm(low, high, selector); }

// `sum` and the absolute differences of four bytes.
GACT_FN u32 add_byte_distances(u32 a, u32 b, u32 sum) {
  u32 result;
  asm("vabsdiff4.u32.u32.u32.add %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(sum));
  return result;
}

// The smaller and the larger value, NaN if one is NaN.
GACT_FN float smaller(float a, float b) {
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

GACT_FN float larger(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// Operations on two 16-bit elements in one word; the unnamed argument gives their type.
GACT_FN u32 smaller_pair(u32 a, u32 b, Bfloat) {
  u32 result;
  asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

GACT_FN u32 larger_pair(u32 a, u32 b, Bfloat) {
  u32 result;
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

GACT_FN u32 smaller_pair(u32 a, u32 b, Half) {
  u32 result;
  asm("min.NaN.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

GACT_FN u32 larger_pair(u32 a, u32 b, Half) {
  u32 result;
  asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

// Rounded to nearest even, for values that are not NaN.
GACT_FN u32 narrow_pair(float low, float high, Bfloat) {
  u32 result;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}

GACT_FN u32 narrow_pair(float low, float high, Half) {
  u32 result;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}

}  // namespace gact

#endif  // GACT_WARP_H
