// CUDA kernels variance and variance_columns, one module for an element type and a group size.
// Each warp sums its groups; the caller sums the rows of `partial`, so the order of additions is fixed.
#include "cuda/blocks.h"

namespace gact {

constexpr int kWidths = 8;

// Lane l computes for l % 8 + 1 bits wherever the work is not per element.

// Joins the values of all lanes, width by width; lane l gets the result of width l % 8 + 1.
template <class Join>
GACT_FN u32 reduce_widths(u32 values[kWidths], Join join) {
#pragma unroll
  for (int mask = 1; mask < kWarpLanes; mask *= 2) {
    if (mask >= kWidths) {
      values[0] = join(values[0], shuffle_xor(values[0], static_cast<u32>(mask)));
      continue;
    }
    const bool odd = (lane_id() & static_cast<u32>(mask)) != 0;
#pragma unroll
    for (int i = 0; i < kWidths / (2 * mask); ++i) {
      const u32 kept = odd ? values[2 * i + 1] : values[2 * i];
      const u32 sent = odd ? values[2 * i] : values[2 * i + 1];
      values[i] = join(kept, shuffle_xor(sent, static_cast<u32>(mask)));
    }
  }
  return values[0];
}

// The range of a group, known to all lanes of the warp.
template <class T>
GACT_FN Extent extent_of_group(const T* x, int count) {
  Extent extent = no_extent();
  for (int i = static_cast<int>(lane_id()); i < count; i += kWarpLanes) extend(extent, to_float(x[i]));
#pragma unroll
  for (u32 mask = 1; mask < kWarpLanes; mask *= 2) {
    extent.low = smaller(extent.low, float_of(shuffle_xor(bits_of(extent.low), mask)));
    extent.high = larger(extent.high, float_of(shuffle_xor(bits_of(extent.high), mask)));
  }
  extent.has_nan = any_lane(extent.has_nan);
  extent.has_minus = any_lane(extent.has_minus);
  extent.has_plus = any_lane(extent.has_plus);
  return finished(extent);
}

GACT_FN u32 add_floats(u32 a, u32 b) { return bits_of(float_of(a) + float_of(b)); }

GACT_FN float sum_of_lane_values(float value) {
#pragma unroll
  for (u32 mask = 1; mask < kWarpLanes; mask *= 2) value += float_of(shuffle_xor(bits_of(value), mask));
  return value;
}

// scale^2 times the sum of weight * f * (1 - f) with f = fraction / 256, `plain` in units of 2^-16, or of weight / 12.
GACT_FN double scaled_variance(float scale, bool dithered, float plain, float weights) {
  const double square = static_cast<double>(scale) * static_cast<double>(scale);
  return dithered ? square * static_cast<double>(weights) / 12.0 : square * static_cast<double>(plain) / 65536.0;
}

// What rounding one group adds at this lane's number of bits.
template <class T, int GROUP>
GACT_FN double variance_of_group(const T* x, const float* weight, int count) {
  constexpr int kPerLane = GROUP / kWarpLanes;
  const int lane = static_cast<int>(lane_id());
  const Extent extent = extent_of_group(x, count);
  const Group owned = describe(extent, lane % kWidths + 1, T{});
  float values[kPerLane], weights[kPerLane];
  float weight_sum = 0.0f;
  bool weighted = false;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int element = lane + i * kWarpLanes;
    values[i] = element < count ? to_float(x[element]) : owned.grid.offset;
    weights[i] = element < count ? weight[element] : 0.0f;
    weight_sum += weights[i];
    weighted |= weights[i] != 0.0f;
  }
  u32 sums[kWidths], edges[kWidths];
#pragma unroll
  for (int width = 0; width < kWidths; ++width) {
    const float offset = float_of(shuffle(bits_of(owned.grid.offset), static_cast<u32>(width)));
    const float inverse = float_of(shuffle(bits_of(owned.grid.inverse), static_cast<u32>(width)));
    const i32 limit = static_cast<i32>(shuffle(static_cast<u32>(owned.limit), static_cast<u32>(width)));
    float sum = 0.0f;
    edges[width] = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const i32 scaled = scaled_value(values[i], offset, inverse, limit);
      const i32 fraction = scaled & 0xFF;
      sum += weights[i] * static_cast<float>(fraction * (256 - fraction));
      edges[width] += lane + i * kWarpLanes < count ? edge_of(scaled) : 0u;
    }
    sums[width] = bits_of(sum);
  }
  const float plain = float_of(reduce_widths(sums, add_floats));
  const bool pays = dither_pays(reduce_widths(edges, [](u32 a, u32 b) { return a + b; }), count);
  const float all_weights = sum_of_lane_values(weight_sum);
  if (!any_lane(weighted)) return 0.0;
  if (owned.special) return static_cast<double>(float_of(kInfinityBits));
  return scaled_variance(owned.grid.scale, owned.may_dither && pays, plain, all_weights);
}

// What rounding one column of `rows` rows adds at each number of bits; by one thread.
template <class T>
GACT_FN void add_variance_of_column(const T* x, const float* weight, int rows, i64 columns, double totals[kWidths]) {
  Extent extent = no_extent();
  bool weighted = false;
  float all_weights = 0.0f;
#pragma unroll 4
  for (int row = 0; row < rows; ++row) {
    extend(extent, to_float(x[row * columns]));
    const float row_weight = weight[row * columns];
    weighted |= row_weight != 0.0f;
    all_weights += row_weight;
  }
  if (!weighted) return;
  extent = finished(extent);
  Group groups[kWidths];
  float sums[kWidths];
  u32 edges[kWidths];
#pragma unroll
  for (int width = 0; width < kWidths; ++width) {
    groups[width] = describe(extent, width + 1, T{});
    sums[width] = 0.0f;
    edges[width] = 0;
  }
#pragma unroll 1
  for (int row = 0; row < rows; ++row) {
    const float value = to_float(x[row * columns]), row_weight = weight[row * columns];
#pragma unroll
    for (int width = 0; width < kWidths; ++width) {
      const Group& group = groups[width];
      const i32 scaled = scaled_value(value, group.grid.offset, group.grid.inverse, group.limit);
      const i32 fraction = scaled & 0xFF;
      sums[width] += row_weight * static_cast<float>(fraction * (256 - fraction));
      edges[width] += edge_of(scaled);
    }
  }
#pragma unroll
  for (int width = 0; width < kWidths; ++width) {
    const Group& group = groups[width];
    const bool dithered = group.may_dither && dither_pays(edges[width], rows);
    totals[width] += group.special ? static_cast<double>(float_of(kInfinityBits))
                                   : scaled_variance(group.grid.scale, dithered, sums[width], all_weights);
  }
}

GACT_FN double sum_of_lane_values(double value) {
#pragma unroll
  for (u32 mask = 1; mask < kWarpLanes; mask *= 2) value += shuffle_xor(value, mask);
  return value;
}

using Stored = GACT_ELEMENT;

}  // namespace gact

// partial: [warps, 8], a row for each warp of the grid.
GACT_KERNEL(gact::kBlockThreads)
variance(const gact::Stored* x, const float* weight, gact::i64 numel, double* partial) {
  using namespace gact;
  const i64 groups = (numel + GACT_GROUP - 1) / GACT_GROUP;
  const i64 warp = warp_of_grid(), warps = static_cast<i64>(blocks_of_grid()) * kBlockWarps;
  double total = 0.0;
  for (i64 group = warp; group < groups; group += warps) {
    const i64 start = group * GACT_GROUP;
    const i64 left = numel - start;
    const int count = static_cast<int>(left < GACT_GROUP ? left : GACT_GROUP);
    total += variance_of_group<Stored, GACT_GROUP>(x + start, weight + start, count);
  }
  if (lane_id() < kWidths) partial[warp * kWidths + lane_id()] = total;
}

// A thread takes a column of a row block, neighbouring threads neighbouring columns. partial: as above.
GACT_KERNEL(gact::kBlockThreads)
variance_columns(const gact::Stored* x, const float* weight, gact::i64 rows, gact::i64 columns, double* partial) {
  using namespace gact;
  const i64 groups = (rows + GACT_GROUP - 1) / GACT_GROUP * columns;
  const i64 threads = static_cast<i64>(blocks_of_grid()) * kBlockThreads;
  double totals[kWidths] = {};
  for (i64 group = warp_of_grid() * kWarpLanes + lane_id(); group < groups; group += threads) {
    const i64 first_row = group / columns * GACT_GROUP;
    const i64 left = rows - first_row, start = first_row * columns + group % columns;
    const int count = static_cast<int>(left < GACT_GROUP ? left : GACT_GROUP);
    add_variance_of_column(x + start, weight + start, count, columns, totals);
  }
#pragma unroll
  for (u32 width = 0; width < kWidths; ++width) {
    const double total = sum_of_lane_values(totals[width]);
    if (lane_id() == width) partial[warp_of_grid() * kWidths + width] = total;
  }
}
