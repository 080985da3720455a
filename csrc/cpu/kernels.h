// What the operators call: one table of functions for each instruction set, all with the same results.
#pragma once

#include "common/group_codec.h"

namespace gact {

enum class Element : int { kFloat, kHalf, kBfloat };

// Work is cut into units of 512 elements, a multiple of every group size, so that results do not depend on threads.
constexpr i64 kUnitElements = 512;

// Smallest and largest element; one of them is NaN if any element is.
struct Range {
  float low, high;
};

struct PackJob {
  const void* x;
  Element element;
  i64 numel;
  int bits;
  int group_size;
  i64 columns;  // of a row, whose groups are columns; 1 for groups in memory order
  u64 seed;
  u8* planes;    // [ceil(numel / group_size), bits, group_size / 8]
  u16* scales;   // [groups] bfloat16
  u16* offsets;  // [groups]
};

struct UnpackJob {
  const u8* planes;
  const u16* scales;
  const u16* offsets;
  Element element;
  i64 numel;
  int bits;
  int group_size;
  i64 columns;
  u64 seed;
  void* out;
  bool stream;  // bypass the cache, which is smaller than the output
};

struct MaskJob {
  void* elements;  // read by pack_mask, written by unpack_mask
  u8* packed;
  i64 numel;
  int width_bytes;  // 1, 2, 4 or 8
  u64 pattern;      // pack: the bits that make an element non-zero; unpack: the element 1
};

struct VarianceJob {
  const void* x;
  Element element;
  const float* weight;
  i64 numel;
  int group_size;
  i64 columns;
};

// Floats of scratch memory that the functions for columns need, for each thread.
inline i64 column_scratch(i64 columns) { return 8 * (columns + 64); }

// Each function works on units first .. last - 1; the last unit may be short. Those for columns count blocks of
// group_size rows instead.
struct Kernels {
  void (*pack)(const PackJob& job, i64 first, i64 last);
  void (*unpack)(const UnpackJob& job, i64 first, i64 last);
  void (*pack_columns)(const PackJob& job, i64 first, i64 last, float* scratch);
  void (*unpack_columns)(const UnpackJob& job, i64 first, i64 last, float* scratch);
  void (*pack_mask)(const MaskJob& job, i64 first, i64 last);
  void (*unpack_mask)(const MaskJob& job, i64 first, i64 last);
  void (*variance)(const VarianceJob& job, i64 first, i64 last, double totals[8]);
  void (*variance_columns)(const VarianceJob& job, i64 first, i64 last, double totals[8]);
};

const Kernels* scalar_kernels();
// Null where the processor or the build lacks the instructions.
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();

}  // namespace gact
