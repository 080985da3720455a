// The loops of pack and unpack around the primitives of an instruction set, for groups in memory order; columns.h has
// those for groups of one column, and dispatch.h calls both. Each kernels_*.cpp includes them in a translation unit
// with its own flags; all is in an unnamed namespace, so that the linker never mixes code of two instruction sets.
//
// An Isa provides, for T in {float, Half, Bfloat} and BITS in 1..8:
//   range<T>(x, count) -> Range               of count (a multiple of 64) elements; a NaN in x makes one end NaN
//   philox(block, keys, words)                [16][16] output words of 4 blocks of 256 elements: row 4 * block + word,
//                                             column lane; a row makes the noise of 64 elements
//   quantise<T, BITS>(x, group_size, offset, inverse, noise, planes) -> u32
//                                             a whole group, whose noise begins at row `noise`, to its planes; returns
//                                             the sum of edge_of its elements
//   decode<T, BITS>(planes, group_size, scale, offset, out, stream)   a whole group without flags
//   decode_dithered<T, BITS>(planes, group_size, unit, base, noise, out, stream)   a whole group with kDitherFlag
//   quantise_columns, decode_columns                  64 elements with parameters from arrays, see columns.h
//   byte_bits(bytes) -> u64, bit_bytes(bits, bytes)   masks.h: bit i = lowest bit of bytes[i], 64 bytes, and back
#pragma once

#include "cpu/float_mode.h"
#include "cpu/kernels.h"

namespace gact {
namespace {

// Most elements whose groups are described before they are quantised: they stay in the L1 cache.
constexpr i64 kBlockElements = 4096;
// How far ahead of quantising to prefetch: past the block that is described next.
constexpr i64 kPrefetchElements = 2 * kBlockElements;
constexpr int kCacheLine = 64;

// The noise of single elements, cheap for those of one lane in order.
class LaneNoise {
 public:
  explicit LaneNoise(u64 seed) : seed_(seed) {}

  u32 of(i64 element) {
    const u64 counter = static_cast<u64>(element) / kPhiloxBlock * 16u + (static_cast<u64>(element) & 15u);
    if (counter != counter_) {
      counter_ = counter;
      philox_of_lane(counter / 16u, static_cast<u32>(counter & 15u), seed_, words_);
    }
    return random16(words_, static_cast<u32>(element));
  }

 private:
  u64 seed_;
  u64 counter_ = ~u64{0};
  u32 words_[4];
};

template <class T>
void pack_group(const PackJob& job, i64 index) {
  const i64 start = index * job.group_size;
  const i64 left = job.numel - start;
  const int count = static_cast<int>(left < job.group_size ? left : job.group_size);
  const T* x = static_cast<const T*>(job.x) + start;
  const Group group = describe(extent_of(x, count), job.bits, T{});
  job.offsets[index] = static_cast<u16>(group.grid.stored_offset);

  const int stride = job.group_size / 8;
  u8* planes = job.planes + index * job.bits * stride;
  for (int byte = 0; byte < job.bits * stride; ++byte) planes[byte] = 0;
  u32 edges = 0;
  LaneNoise noise(job.seed);
  for (int lane = 0; lane < 16; ++lane) {
    for (int i = lane; i < count; i += 16) {
      i32 scaled;
      const u32 code = code_of(to_float(x[i]), group, job.bits, noise.of(start + i), &scaled);
      edges += edge_of(scaled);
      for (int plane = 0; plane < job.bits; ++plane) {
        planes[plane * stride + i / 8] |= static_cast<u8>(((code >> plane) & 1u) << (i % 8));
      }
    }
  }
  const bool dithered = group.may_dither && dither_pays(edges, count);
  job.scales[index] = group.stored_scale | (dithered ? kDitherFlag : 0);
}

template <class T>
void unpack_group(const UnpackJob& job, i64 index) {
  const i64 start = index * job.group_size;
  const i64 left = job.numel - start;
  const int count = static_cast<int>(left < job.group_size ? left : job.group_size);
  T* out = static_cast<T*>(job.out) + start;
  const int stride = job.group_size / 8;
  const u8* planes = job.planes + index * job.bits * stride;
  const u16 scale = job.scales[index];
  const float offset = offset_value(job.offsets[index], step_of(scale), T{});
  LaneNoise noise(job.seed);
  for (int lane = 0; lane < 16; ++lane) {
    for (int i = lane; i < count; i += 16) {
      u32 code = 0;
      for (int plane = 0; plane < job.bits; ++plane) {
        code |= static_cast<u32>((planes[plane * stride + i / 8] >> (i % 8)) & 1) << plane;
      }
      const u32 subtracted = scale & kDitherFlag ? noise.of(start + i) : 0u;
      from_float(decode(code, scale, offset, job.bits, subtracted), out + i);
    }
  }
}

// Philox keys of the ten rounds.
struct RoundKeys {
  u32 first[10], second[10];
};

inline RoundKeys round_keys(u64 seed) {
  RoundKeys keys;
  for (u32 round = 0; round < 10; ++round) {
    keys.first[round] = static_cast<u32>(seed) + round * kPhiloxW0;
    keys.second[round] = static_cast<u32>(seed >> 32) + round * kPhiloxW1;
  }
  return keys;
}

// The noise of 1024 elements at a time, made when a group needs it.
constexpr i64 kNoiseElements = 4 * kPhiloxBlock;

template <class Isa>
class UnitNoise {
 public:
  explicit UnitNoise(u64 seed) : keys_(round_keys(seed)) {}

  // Rows for the group that begins at `element`.
  const u32 (*of(i64 element))[16] {
    const i64 unit = element / kNoiseElements;
    if (unit != unit_) {
      unit_ = unit;
      Isa::philox(static_cast<u64>(unit) * 4, keys_, words_);
    }
    return words_ + element % kNoiseElements / 64;
  }

 private:
  RoundKeys keys_;
  i64 unit_ = -1;
  alignas(kCacheLine) u32 words_[16][16];
};

// No element of a group exceeds the top code before clamping if the width is small enough: its value in steps is at
// most levels * 65536 * (1 + 2^-23), as `range <= levels * scale` holds exactly and two roundings follow.
constexpr bool needs_clamp(int bits) { return ((1 << bits) - 1) * 65536.0 >= 0.5 * 8388608.0; }

// What quantise needs of the groups of a block; plain_group says what `slow` means.
struct BlockGroups {
  float low[kBlockElements / 64], high[kBlockElements / 64], offset[kBlockElements / 64], scale[kBlockElements / 64];
  float inverse[kBlockElements / 64];
  u32 stored_offset[kBlockElements / 64];
  i32 slow[kBlockElements / 64], may_dither[kBlockElements / 64];
};

template <class T>
void set_group(BlockGroups& groups, int g, const Grid& grid, float low, float high, float levels) {
  const PlainGroup group = plain_group(grid, low, high, levels, T{});
  groups.offset[g] = grid.offset;
  groups.scale[g] = grid.scale;
  groups.inverse[g] = grid.inverse;
  groups.stored_offset[g] = grid.stored_offset;
  groups.slow[g] = group.slow;
  groups.may_dither[g] = group.may_dither;
}

// Not inlined: few groups need it, and it would be computed for all of them if it became part of a vectorised loop.
template <class T>
__attribute__((noinline)) void widen_group(BlockGroups& groups, int g, float levels) {
  const float low = groups.low[g], high = groups.high[g];
  set_group<T>(groups, g, grid_at(wide_scale(low, high, levels), low, T{}), low, high, levels);
}

template <class T>
void describe_groups(BlockGroups& groups, int count, float levels) {
  i32 covered[kBlockElements / 64];
  for (int g = 0; g < count; ++g) {
    const float low = groups.low[g] + 0.0f, high = groups.high[g];  // + 0.0 turns -0.0 into 0.0
    groups.low[g] = low;
    const Grid grid = grid_at(tight_scale(low, high, levels, T{}), low, T{});
    covered[g] = covers(grid, low, high, levels, T{});
    set_group<T>(groups, g, grid, low, high, levels);
  }
  for (int g = 0; g < count; ++g) {
    if (!covered[g]) widen_group<T>(groups, g, levels);
  }
}

// Ranges, scales and offsets of the groups of elements start .. start + count - 1. True if one of them is slow.
template <class Isa, class T, int BITS>
bool describe_block(const PackJob& job, i64 start, int count, BlockGroups& groups) {
  const T* x = static_cast<const T*>(job.x) + start;
  const int group_count = count / job.group_size;
  for (int g = 0; g < group_count; ++g) {
    const Range range = Isa::range(x + g * job.group_size, job.group_size);
    groups.low[g] = range.low;
    groups.high[g] = range.high;
  }
  describe_groups<T>(groups, group_count, static_cast<float>((1 << BITS) - 1));
  const i64 first_group = start / job.group_size;
  i32 any_slow = 0;
  for (int g = 0; g < group_count; ++g) {
    job.offsets[first_group + g] = static_cast<u16>(groups.stored_offset[g]);
    any_slow |= groups.slow[g];
  }
  return any_slow != 0;
}

inline void prefetch(const void* start, int size_bytes) {
#if defined(__x86_64__)
  for (int line = 0; line < size_bytes; line += kCacheLine) {
    _mm_prefetch(static_cast<const char*>(start) + line, _MM_HINT_T0);
  }
#endif
}

template <class Isa, class T, int BITS>
void quantise_block(const PackJob& job, UnitNoise<Isa>& noise, i64 start, int count, const BlockGroups& groups) {
  const T* x = static_cast<const T*>(job.x) + start;
  const int size = job.group_size;
  const i64 first_group = start / size;
  u8* planes = job.planes + first_group * BITS * (size / 8);
  for (int g = 0; g < count / size; ++g) {
    const T* group = x + g * size;
    prefetch(group + kPrefetchElements, size * static_cast<int>(sizeof(T)));
    const u32 edges = Isa::template quantise<T, BITS>(group, size, groups.offset[g], groups.inverse[g],
                                                      noise.of(start + g * size), planes + g * BITS * (size / 8));
    const bool dithered = groups.may_dither[g] && dither_pays(edges, size);
    job.scales[first_group + g] = static_cast<u16>((bits_of(groups.scale[g]) >> 16) | (dithered ? kDitherFlag : 0));
  }
}

// Full groups: elements start .. start + count - 1, count a multiple of 512 and at most kBlockElements.
template <class Isa, class T, int BITS>
void pack_block(const PackJob& job, UnitNoise<Isa>& noise, i64 start, int count) {
  BlockGroups groups;
  const bool any_slow = describe_block<Isa, T, BITS>(job, start, count, groups);
  quantise_block<Isa, T, BITS>(job, noise, start, count, groups);
  if (!any_slow) return;
  for (int g = 0; g < count / job.group_size; ++g) {
    if (groups.slow[g]) pack_group<T>(job, start / job.group_size + g);
  }
}

template <class Isa, class T, int BITS>
void pack_units(const PackJob& job, i64 first, i64 last) {
  const StandardFloatMode standard;
  UnitNoise<Isa> noise(job.seed);
  const i64 end = last * kUnitElements < job.numel ? last * kUnitElements : job.numel;
  const i64 full_end = end / kUnitElements * kUnitElements;
  for (i64 start = first * kUnitElements; start < full_end; start += kBlockElements) {
    const i64 left = full_end - start;
    pack_block<Isa, T, BITS>(job, noise, start, static_cast<int>(left < kBlockElements ? left : kBlockElements));
  }
  for (i64 tail = full_end; tail < end; tail += job.group_size) {
    pack_group<T>(job, tail / job.group_size);
  }
}

template <class Isa, class T, int BITS>
void unpack_units(const UnpackJob& job, i64 first, i64 last) {
  const StandardFloatMode standard;
  const i64 end = last * kUnitElements < job.numel ? last * kUnitElements : job.numel;
  const i64 last_full = end / job.group_size;
  const int stride = job.group_size / 8;
  const bool stream = job.stream && reinterpret_cast<u64>(job.out) % kCacheLine == 0;
  UnitNoise<Isa> noise(job.seed);
  for (i64 g = first * kUnitElements / job.group_size; g < last_full; ++g) {
    const u16 scale = job.scales[g];
    if (scale & kSpecialFlag) {
      unpack_group<T>(job, g);
      continue;
    }
    const u8* planes = job.planes + g * BITS * stride;
    T* out = static_cast<T*>(job.out) + g * job.group_size;
    const float step = step_of(scale), offset = offset_value(job.offsets[g], step, T{});
    if (scale & kDitherFlag) {
      const float unit = step * kDitherUnit;
      Isa::template decode_dithered<T, BITS>(planes, job.group_size, unit, dithered_base(offset, unit),
                                             noise.of(g * job.group_size), out, stream);
    } else {
      Isa::template decode<T, BITS>(planes, job.group_size, step, offset, out, stream);
    }
  }
  if (last_full * job.group_size < end) unpack_group<T>(job, last_full);
#if defined(__x86_64__)
  if (stream) _mm_sfence();
#endif
}

}  // namespace
}  // namespace gact
