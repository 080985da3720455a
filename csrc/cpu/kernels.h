// What the operators call: one table of functions for each instruction set, all with the same results.
#pragma once

#include "common/group_codec.h"

namespace gact {

enum class Element : int { kFloat, kHalf, kBfloat };

// Work is cut into units of 1024 elements, a multiple of every group size, so that results do not depend on threads.
constexpr i64 kUnitElements = 1024;

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
  u32* words;    // codes, as docs/codec.md has them
  u16* scales;   // [groups] bfloat16
  u16* offsets;  // [groups]
  bool stream;   // words bypass the cache
};

struct UnpackJob {
  const u32* words;
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
  void* elements;  // written by unpack_mask, else read
  u8* packed;
  i64 numel;
  int width_bytes;  // 1, 2, 4 or 8; has_two_values: 2, 4 or 8
  u64 pattern;      // pack: the bits that make an element non-zero; else the element that is not zero
};

enum class Function : int { kGelu, kGeluTanh };

// A function of elements, or with a gradient the product with its derivative.
struct FunctionJob {
  Function function;
  Element element;  // kFloat or kBfloat
  const void* x;
  const void* grad;  // null: none
  void* out;
  i64 count;
};

struct MaskProductJob {
  const u8* packed;
  Element element;  // kFloat or kBfloat
  const void* grad;
  void* out;
  i64 numel;
  float value;   // of the mask, where it is not zero
  bool selects;  // whether what is elsewhere is zero, whatever the gradient is
};

// Rows of (x - mean) * rstd * weight + bias, in float32 and rounded once: as csrc/cuda/norms.cu has them.
struct NormaliseJob {
  const void* x;    // [rows, columns]
  Element element;  // kFloat or kBfloat
  i64 columns;
  const float* mean;   // [rows], null for 0
  const float* rstd;   // [rows]
  const void* weight;  // [columns] of elements, null for 1
  const void* bias;    // likewise, null for 0
  void* out;           // may be x
};

struct VarianceJob {
  const void* x;
  Element element;
  const float* weight;
  i64 numel;
  int group_size;
  i64 columns;
};

// Log-probabilities [rows, words] by the chances of their words: see gact_dist/codec/sampled.py.
struct SampleJob {
  const void* x;
  Element element;
  i64 words;        // of a row
  i64 first_group;  // the number of the first one, by which random numbers are drawn
  u64 seed;
  u32* bits;        // [groups]: one for each word
  u16* logarithms;  // [groups] float16, of the largest
  float* variance;  // [groups]: what each adds to the squared error
};

struct SampledWordsJob {
  const u32* bits;
  const u16* logarithms;
  Element element;
  i64 words;
  void* out;
};

// Columns of a panel: group_size rows of them are to stay in the L2 cache between two passes.
inline i64 panel_width(i64 columns, int group_size, int element_bytes) {
  constexpr i64 kMostBytes = 512 << 10, kMostColumns = 1024, kMultiple = 32;
  const i64 fitting = kMostBytes / (group_size * element_bytes) / kMultiple * kMultiple;
  const i64 most = fitting < kMostColumns ? fitting : kMostColumns;
  const i64 panels = (columns + most - 1) / most;
  return ((columns + panels - 1) / panels + kMultiple - 1) / kMultiple * kMultiple;
}

// Panels of all blocks of group_size rows.
inline i64 panel_count(i64 numel, int group_size, i64 columns, int element_bytes) {
  const i64 width = panel_width(columns, group_size, element_bytes);
  return (numel / columns + group_size - 1) / group_size * ((columns + width - 1) / width);
}

// Each function works on units first .. last - 1; the last unit may be short. pack_columns and unpack_columns count
// panels instead, variance_columns blocks of group_size rows, normalise, sample and sampled_words rows.
struct Kernels {
  void (*pack)(const PackJob& job, i64 first, i64 last);
  void (*unpack)(const UnpackJob& job, i64 first, i64 last);
  void (*pack_columns)(const PackJob& job, i64 first, i64 last);
  void (*unpack_columns)(const UnpackJob& job, i64 first, i64 last);
  void (*pack_mask)(const MaskJob& job, i64 first, i64 last);
  void (*unpack_mask)(const MaskJob& job, i64 first, i64 last);
  bool (*has_two_values)(const MaskJob& job, i64 first, i64 last);
  void (*function)(const FunctionJob& job);
  void (*mask_product)(const MaskProductJob& job, i64 first, i64 last);
  void (*normalise)(const NormaliseJob& job, i64 first, i64 last);
  void (*sample)(const SampleJob& job, i64 first, i64 last);
  void (*sampled_words)(const SampledWordsJob& job, i64 first, i64 last);
  void (*variance)(const VarianceJob& job, i64 first, i64 last, double totals[8]);
  void (*variance_columns)(const VarianceJob& job, i64 first, i64 last, double totals[8]);
};

const Kernels* scalar_kernels();
// Null where the processor or the build lacks the instructions.
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();

}  // namespace gact
