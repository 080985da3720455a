// The loops of rounding_variance, which dispatch.h includes in each kernels_*.cpp; compilers vectorise them.
#pragma once

#include "cpu/groups.h"

namespace gact {
namespace {

constexpr int kLargestGroup = 512;

// A pairwise sum: accurate, and compilers vectorise it. What it adds beyond the least power of two is zero.
inline float sum_of(float terms[kLargestGroup], int count) {
  int size = 1;
  while (size < count) size *= 2;
  for (int i = count; i < size; ++i) terms[i] = 0.0f;
  for (int half = size / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) terms[i] += terms[i + half];
  }
  return terms[0];
}

// sum of weight * f * (1 - f) in units of 2^-16, with f the fraction that pack rounds; or of weight / 12 where it
// subtracts the noise again.
inline double weighted_variance(const float* values, const float* weight, int count, const Group& group) {
  const float offset = group.grid.offset, inverse = group.grid.inverse;
  const i32 limit = group.limit;
  float terms[kLargestGroup];
  u32 edges = 0;
  for (int i = 0; i < count; ++i) {
    const i32 scaled = scaled_value(values[i], offset, inverse, limit);
    const i32 fraction = scaled & 0xFF;
    terms[i] = weight[i] * static_cast<float>(fraction * (256 - fraction));
    edges += edge_of(scaled);
  }
  if (!group.may_dither || !dither_pays(edges, count)) return static_cast<double>(sum_of(terms, count));
  for (int i = 0; i < count; ++i) terms[i] = weight[i];
  return static_cast<double>(sum_of(terms, count)) * (65536.0 / 12.0);
}

template <class Isa, class T>
Extent extent_of_group(const T* x, int count) {
  if (count % 64 == 0) {
    const Range range = Isa::range(x, count);
    if (is_finite(range.high - range.low)) return Extent{range.low, range.high, false, false, false};
  }
  return extent_of(x, count);
}

template <class Isa, class T>
void variance_of_group(const T* x, const float* weight, int count, double totals[8]) {
  float values[kLargestGroup];
  for (int i = 0; i < count; ++i) values[i] = to_float(x[i]);
  const Extent extent = extent_of_group<Isa>(x, count);
  bool weighted = false;
  for (int i = 0; i < count; ++i) weighted |= weight[i] != 0.0f;
  if (!weighted) return;
  for (int bits = 1; bits <= 8; ++bits) {
    const Group group = describe(extent, bits, T{});
    // scale^2 * f * (1 - f) with f = q / 256
    const double scale = static_cast<double>(group.grid.scale);
    const double infinity = static_cast<double>(float_of(kInfinityBits));
    const double unit = scale * scale / 65536.0;
    totals[bits - 1] += group.special ? infinity : unit * weighted_variance(values, weight, count, group);
  }
}

template <class Isa, class T>
void variance_units(const VarianceJob& job, i64 first, i64 last, double totals[8]) {
  const StandardFloatMode standard;
  const i64 end = last * kUnitElements < job.numel ? last * kUnitElements : job.numel;
  for (i64 start = first * kUnitElements; start < end; start += job.group_size) {
    const i64 left = end - start;
    const int count = static_cast<int>(left < job.group_size ? left : job.group_size);
    variance_of_group<Isa>(static_cast<const T*>(job.x) + start, job.weight + start, count, totals);
  }
}

// Columns are gathered in tiles, so that reads within a row are contiguous.
constexpr int kTileColumns = 16;

template <class Isa, class T>
void variance_blocks(const VarianceJob& job, i64 first, i64 last, double totals[8]) {
  const StandardFloatMode standard;
  T values[kTileColumns][kLargestGroup];
  float weights[kTileColumns][kLargestGroup];
  for (i64 index = first; index < last; ++index) {
    const i64 first_row = index * job.group_size, left = job.numel / job.columns - first_row;
    const int rows = static_cast<int>(left < job.group_size ? left : job.group_size);
    for (i64 start = 0; start < job.columns; start += kTileColumns) {
      const int count = static_cast<int>(job.columns - start < kTileColumns ? job.columns - start : kTileColumns);
      for (int row = 0; row < rows; ++row) {
        const i64 element = (first_row + row) * job.columns + start;
        for (int c = 0; c < count; ++c) {
          values[c][row] = static_cast<const T*>(job.x)[element + c];
          weights[c][row] = job.weight[element + c];
        }
      }
      for (int c = 0; c < count; ++c) variance_of_group<Isa>(values[c], weights[c], rows, totals);
    }
  }
}

template <class Isa>
void variance_any(const VarianceJob& job, i64 first, i64 last, double totals[8]) {
  if (job.element == Element::kFloat) return variance_units<Isa, float>(job, first, last, totals);
  if (job.element == Element::kHalf) return variance_units<Isa, Half>(job, first, last, totals);
  return variance_units<Isa, Bfloat>(job, first, last, totals);
}

template <class Isa>
void variance_columns_any(const VarianceJob& job, i64 first, i64 last, double totals[8]) {
  if (job.element == Element::kFloat) return variance_blocks<Isa, float>(job, first, last, totals);
  if (job.element == Element::kHalf) return variance_blocks<Isa, Half>(job, first, last, totals);
  return variance_blocks<Isa, Bfloat>(job, first, last, totals);
}

}  // namespace
}  // namespace gact
