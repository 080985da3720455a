// CUDA kernel variance, one module for an element type and a group size as in codec.cu. Each warp adds the groups that
// it takes; the caller adds the rows of `partial`, so the order of additions is fixed.
#include "group.h"

namespace gact {

constexpr int kWidths = 8;

// Lane l works for l % 8 + 1 bits where what is done does not concern single elements.
struct Widths {
  static constexpr int kSlots = kWidths;
  static constexpr int kSegment = kWarpLanes;
};

GACT_FN u32 add_floats(u32 a, u32 b) { return bits_of(float_of(a) + float_of(b)); }

GACT_FN float sum_of_lane_values(float value) {
#pragma unroll
  for (u32 mask = 1; mask < kWarpLanes; mask *= 2) value += float_of(shuffle_xor(bits_of(value), mask));
  return value;
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
      const i32 fraction = scaled & 0xFFFF;
      sum += weights[i] * static_cast<float>(fraction * (65536 - fraction));
      edges[width] += lane + i * kWarpLanes < count ? edge_of(scaled) : 0u;
    }
    sums[width] = bits_of(sum);
  }
  const float plain = float_of(reduce_slots<Widths>(sums, add_floats));
  const bool pays = dither_pays(reduce_slots<Widths>(edges, [](u32 a, u32 b) { return a + b; }), count);
  const float all_weights = sum_of_lane_values(weight_sum);
  if (!any_lane(weighted)) return 0.0;
  if (owned.special) return static_cast<double>(float_of(kInfinityBits));
  // scale^2 * f * (1 - f) with f = fraction / 65536, or scale^2 / 12.
  const double square = static_cast<double>(owned.grid.scale) * static_cast<double>(owned.grid.scale);
  if (owned.may_dither && pays) return square * static_cast<double>(all_weights) / 12.0;
  return square * static_cast<double>(plain) / 4294967296.0;
}

using Stored = GACT_ELEMENT;

}  // namespace gact

// partial: [warps, 8], a row for each warp of the grid.
GACT_KERNEL(gact::kBlockThreads)
variance(const gact::Stored* x, const float* weight, gact::i64 numel, double* partial) {
  using namespace gact;
  const i64 groups = (numel + GACT_GROUP - 1) / GACT_GROUP;
  const i64 warps = static_cast<i64>(blocks_of_grid()) * kBlockWarps;
  double total = 0.0;
  for (i64 group = warp_of_grid(); group < groups; group += warps) {
    const i64 start = group * GACT_GROUP;
    const i64 left = numel - start;
    const int count = static_cast<int>(left < GACT_GROUP ? left : GACT_GROUP);
    total += variance_of_group<Stored, GACT_GROUP>(x + start, weight + start, count);
  }
  if (lane_id() < kWidths) partial[warp_of_grid() * kWidths + lane_id()] = total;
}
