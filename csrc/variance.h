// The loops of rounding_variance, included by driver.h in each kernels_*.cpp; compilers vectorise them.
#pragma once

#include "kernels.h"
#include "plain_floats.h"

namespace gact {
namespace {

// sum of weight * q * (65536 - q), q the 16 fraction bits that pack rounds; 16 partial sums let it be vectorised.
inline double weighted_fractions(const float* values, const float* weight, int count, const Group& group) {
  float partial[16] = {};
  int i = 0;
  for (; i + 16 <= count; i += 16) {
    for (int lane = 0; lane < 16; ++lane) {
      const i32 fraction = scaled_value(values[i + lane], group.low, group.inverse, group.limit) & 0xFFFF;
      partial[lane] += weight[i + lane] * static_cast<float>(fraction * (65536 - fraction));
    }
  }
  double sum = 0.0;
  for (int lane = 0; lane < 16; ++lane) sum += partial[lane];
  for (; i < count; ++i) {
    const i32 fraction = scaled_value(values[i], group.low, group.inverse, group.limit) & 0xFFFF;
    sum += static_cast<double>(weight[i]) * (fraction * (65536 - fraction));
  }
  return sum;
}

template <class T>
void variance_of_group(const VarianceJob& job, i64 start, int count, double totals[8]) {
  const T* x = static_cast<const T*>(job.x) + start;
  const float* weight = job.weight + start;
  float values[512];
  for (int i = 0; i < count; ++i) values[i] = to_float(x[i]);
  const Extent extent = extent_of(values, count);
  bool weighted = false;
  for (int i = 0; i < count; ++i) weighted |= weight[i] != 0.0f;
  if (!weighted) return;
  for (int bits = 1; bits <= 8; ++bits) {
    const Group group = describe(extent, bits, float_of(Largest<T>::bits));
    // scale^2 * f * (1 - f) with f = q / 65536
    const double unit = static_cast<double>(group.scale) * group.scale / 4294967296.0;
    const double infinity = static_cast<double>(float_of(kInfinityBits));
    totals[bits - 1] += group.special ? infinity : unit * weighted_fractions(values, weight, count, group);
  }
}

template <class T>
void variance_units(const VarianceJob& job, i64 first, i64 last, double totals[8]) {
  const PlainFloats plain;
  const i64 end = last * kUnitElements < job.numel ? last * kUnitElements : job.numel;
  for (i64 start = first * kUnitElements; start < end; start += job.group_size) {
    const i64 left = end - start;
    variance_of_group<T>(job, start, static_cast<int>(left < job.group_size ? left : job.group_size), totals);
  }
}

inline void variance_any(const VarianceJob& job, i64 first, i64 last, double totals[8]) {
  if (job.element == Element::kFloat) return variance_units<float>(job, first, last, totals);
  if (job.element == Element::kHalf) return variance_units<Half>(job, first, last, totals);
  return variance_units<Bfloat>(job, first, last, totals);
}

}  // namespace
}  // namespace gact
