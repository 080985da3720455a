// One group by a warp: of any length and with any values, by the definitions of group_codec.h.
#pragma once

#include "cuda/tile.h"

namespace gact {

// A packed buffer, see docs/codec.md.
struct Buffer {
  u8* planes;
  u16* scales;
  u16* offsets;
};

GACT_FN Buffer sections_of(u8* buffer, i64 scale_start, i64 offset_start) {
  return Buffer{buffer, reinterpret_cast<u16*>(buffer + scale_start), reinterpret_cast<u16*>(buffer + offset_start)};
}

GACT_FN u32 noise_of(u64 element, u64 seed) {
  u32 words[4];
  philox_of_lane(element / kPhiloxBlock, static_cast<u32>(element) & 15u, seed, words);
  const u32 number = (static_cast<u32>(element) >> 6) & 3u;
  const u32 word = number < 2u ? words[number == 0u ? 0 : 1] : words[number == 2u ? 2 : 3];
  const u32 same[4] = {word, word, word, word};
  return random16(same, static_cast<u32>(element));
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

GACT_FN u32 sum_of_lanes(u32 value) {
#pragma unroll
  for (u32 mask = 1; mask < kWarpLanes; mask *= 2) value += shuffle_xor(value, mask);
  return value;
}

template <class T, int BITS, int GROUP>
GACT_FN void pack_group(const T* x, i64 numel, u64 seed, const Buffer& buffer, i64 index) {
  const i64 start = index * GROUP;
  const int count = static_cast<int>(numel - start < GROUP ? numel - start : GROUP);
  const Group group = describe(extent_of_group(x + start, count), BITS, T{});
  u8* planes = buffer.planes + index * (BITS * GROUP / 8);
  u32 edges = 0;
#pragma unroll 1
  for (int byte = static_cast<int>(lane_id()); byte < GROUP / 8; byte += kWarpLanes) {
    u64 bits = 0;
#pragma unroll 1
    for (int i = 8 * byte; i < 8 * byte + 8 && i < count; ++i) {
      i32 scaled;
      const u32 code = code_of(to_float(x[start + i]), group, BITS, noise_of(start + i, seed), &scaled);
      edges += edge_of(scaled);
#pragma unroll
      for (int plane = 0; plane < BITS; ++plane) bits |= static_cast<u64>((code >> plane) & 1u) << (8 * plane + i % 8);
    }
#pragma unroll
    for (int plane = 0; plane < BITS; ++plane)
      planes[plane * (GROUP / 8) + byte] = static_cast<u8>(bits >> (8 * plane));
  }
  const bool dithered = group.may_dither && dither_pays(sum_of_lanes(edges), count);
  if (lane_id() != 0) return;
  buffer.scales[index] = static_cast<u16>(group.stored_scale | (dithered ? kDitherFlag : 0));
  buffer.offsets[index] = static_cast<u16>(group.grid.stored_offset);
}

template <class T, int BITS, int GROUP>
GACT_FN void unpack_group(const Buffer& buffer, i64 numel, u64 seed, T* out, i64 index) {
  const i64 start = index * GROUP;
  const int count = static_cast<int>(numel - start < GROUP ? numel - start : GROUP);
  const u8* planes = buffer.planes + index * (BITS * GROUP / 8);
  const u16 scale = buffer.scales[index];
  const float offset = offset_value(buffer.offsets[index], step_of(scale), T{});
#pragma unroll 1
  for (int byte = static_cast<int>(lane_id()); byte < GROUP / 8; byte += kWarpLanes) {
    u64 bits = 0;
#pragma unroll
    for (int plane = 0; plane < BITS; ++plane)
      bits |= static_cast<u64>(planes[plane * (GROUP / 8) + byte]) << (8 * plane);
#pragma unroll 1
    for (int i = 8 * byte; i < 8 * byte + 8 && i < count; ++i) {
      u32 code = 0;
#pragma unroll
      for (int plane = 0; plane < BITS; ++plane) code |= static_cast<u32>(bits >> (8 * plane + i % 8) & 1u) << plane;
      const u32 subtracted = (scale & kDitherFlag) != 0 ? noise_of(start + i, seed) : 0u;
      from_float(decode(code, scale, offset, BITS, subtracted), out + start + i);
    }
  }
}

}  // namespace gact
