// The per-group arithmetic of the codec, valid as C++17 and as CUDA (also under NVRTC, without standard headers).
// gact_dist/codec/reference.py defines the same in PyTorch; both give the same bits. Everything here is float32, one
// IEEE operation at a time, and fused() where it says so: compile with -ffp-contract=off (C++) or -fmad=false (CUDA),
// never with fast-math.
#pragma once

#include "common/numbers.h"

namespace gact {

constexpr float kMinScale = 3.851859888774472e-34f;  // 2^-111: its parts and their reciprocals are normal numbers
constexpr u16 kSpecialFlag = 0x8000u;  // sign of a stored scale: the group holds values that are not finite
constexpr u16 kDeadScale = 0xFFC0u;    // stored scale, a NaN, of a group that decodes to NaN
constexpr u16 kDitherFlag = 1u;        // lowest bit of a stored scale: the noise is subtracted again when decoding
constexpr u16 kPlusFlag = 1u;          // the same bit of a special group with 1 bit: code 1 is +inf, otherwise -inf
constexpr float kUnit = 0.00390625f;   // 2^-8: the part of a step to which values are rounded, and noise is counted in
constexpr float kMagic = 8388608.0f;   // 2^23, to which an integer below 2^23 can be added exactly: its lowest bits
constexpr u32 kScaleStep = 0x20000u;   // between neighbouring scales, as the lowest bit is a flag

// ---- one group

// Range of the finite elements of a group, and which other values it holds.
struct Extent {
  float low, high;
  bool has_nan, has_minus, has_plus;
};

// Scale and offset of a group, as the decoder will read them.
struct Grid {
  float offset;       // at most the smallest element; never -0.0
  float scale;        // step between codes, not negative
  float inverse;      // 256 / scale, or 0
  u32 stored_offset;  // the 16 bits of what is stored for the offset
};

struct Group {
  Grid grid;
  i32 limit;         // highest finite code times 256
  u16 stored_scale;  // bfloat16 bits; the sign marks a special group
  bool special;      // holds NaN or infinities, or its range overflows
  bool dead;         // decodes to NaN
  bool may_dither;   // half a step more on either side changes no sign and overflows nothing
};

GACT_FN Extent no_extent() { return Extent{float_of(kInfinityBits), -float_of(kInfinityBits), false, false, false}; }

GACT_FN void extend(Extent& extent, float value) {
  if (is_finite(value)) {
    extent.low = value < extent.low ? value : extent.low;
    extent.high = value > extent.high ? value : extent.high;
  } else {
    extent.has_nan |= is_nan(value);
    extent.has_minus |= value < 0.0f;
    extent.has_plus |= value > 0.0f;
  }
}

// With a range of 0 where nothing was finite.
GACT_FN Extent finished(Extent extent) {
  if (extent.low > extent.high) extent.low = extent.high = 0.0f;
  return extent;
}

template <class T>
GACT_FN Extent extent_of(const T* x, int count) {
  Extent extent = no_extent();
  for (int i = 0; i < count; ++i) extend(extent, to_float(x[i]));
  return finished(extent);
}

// ---- offsets: the two bytes that are stored, and their value

// A 16-bit type holds the smallest element itself.
template <class T>
GACT_FN float offset_value(u32 stored, float, T) {
  return to_float(T{static_cast<u16>(stored)});
}

// float: a float16 that counts in units of four steps. The product is exact: 11 bits times 7 bits.
GACT_FN float offset_value(u32 stored, float scale, float) {
  return to_float(Half{static_cast<u16>(stored)}) * 4.0f * scale;
}

GACT_FN u32 half_below(u32 half) {
  const u32 negative = half == 0u ? 0x8001u : half + 1u;
  return half - 1u < 0x7FFFu ? half - 1u : negative;
}

template <class T>
GACT_FN Grid grid_at(float scale, float low, T) {
  T offset;
  from_float(low, &offset);
  return Grid{low, scale, scale > 0.0f ? 256.0f / scale : 0.0f, offset.bits};
}

// The largest offset that can be stored and is not above `low`.
GACT_FN Grid grid_at(float scale, float low, float type) {
  const float inverse = scale > 0.0f ? 256.0f / scale : 0.0f;
  const u32 nearest = nearest_half(low * inverse * 0.0009765625f);  // 2^-10
  const u32 stored = offset_value(nearest, scale, type) > low ? half_below(nearest) : nearest;
  return Grid{offset_value(stored, scale, type), scale, inverse, stored};
}

// ---- scales

// range / levels rounded outward to a multiple of kScaleStep in bits, so that levels * scale covers the range.
GACT_FN float covering_scale(float range, float levels) {
  const u32 rounded = (bits_of(range / levels) + (kScaleStep - 1u)) & ~(kScaleStep - 1u);
  const u32 covering = rounded + (float_of(rounded) * levels < range ? kScaleStep : 0u);
  return float_of(covering) < kMinScale ? kMinScale : float_of(covering);
}

// The scale of a group of equal elements.
template <class T>
GACT_FN float constant_scale(float, T) {
  return 0.0f;
}

// A power of two, so that values of 11 significant bits are offsets; the remainder is less than a step.
GACT_FN float constant_scale(float value, float) {
  const i32 exponent = static_cast<i32>(bits_of(value) & kInfinityBits) - (10 << 23);
  const i32 least = 0x08000000;  // kMinScale
  const float scale = float_of(static_cast<u32>(exponent < least ? least : exponent));
  return value == 0.0f ? 0.0f : scale;
}

template <class T>
GACT_FN float tight_scale(float low, float high, float levels, T type) {
  const float covering = covering_scale(high - low, levels);
  const float constant = constant_scale(low, type);
  return high > low ? covering : constant;
}

// Covers the range from any offset, which is at most 2^-10 of its size below `low`; 2^-16 allows for the roundings in
// between.
GACT_FN float wide_scale(float low, float high, float levels) {
  const float range = high - low;
  const float size = low < 0.0f ? -low : low;
  return covering_scale((range + size * 0.0009765625f) * 1.0000152587890625f, levels);
}

// Whether the rounding of the scale leaves room for the rounding of the offset. Equal elements need none.
template <class T>
GACT_FN bool covers(const Grid&, float, float, float, T) {
  return true;
}

GACT_FN bool covers(const Grid& grid, float low, float high, float levels, float) {
  return (high - grid.offset <= grid.scale * levels) | !(high > low);
}

// The finest grid of `levels` steps from an offset that can be stored over `low` to `high`.
template <class T>
GACT_FN Grid finest_grid(float low, float high, float levels, T type) {
  const Grid grid = grid_at(tight_scale(low, high, levels, type), low, type);
  if (covers(grid, low, high, levels, type)) return grid;
  return grid_at(wide_scale(low, high, levels), low, type);
}

GACT_FN bool dither_allowed(float low, float high, const Grid& grid, float levels, float largest) {
  const float half = 0.5f * grid.scale;
  const float span = grid.scale * levels;
  const float top = grid.offset + span;
  // Without branches, so that compilers vectorise it.
  const bool keeps_sign = ((low < 0.0f) & (high > 0.0f)) | (low > half) | (high < -half);
  // The decoder adds up to levels + 1 steps to an offset below zero: their product must be finite by itself.
  const bool finite = span + grid.scale <= float_of(Largest<float>::bits);
  return keeps_sign & finite & (high > low) & (top + grid.scale <= largest) & (grid.offset - grid.scale >= -largest);
}

// Whether every value that a group can decode to is finite. False where anything is NaN.
GACT_FN bool is_storable(const Grid& grid, float levels, float largest) {
  const float span = grid.scale * levels;
  return (grid.offset + span <= largest) & (grid.offset >= -largest);
}

// What quantising a group without rare values needs.
struct PlainGroup {
  Grid grid;
  bool slow;  // rare values, which only describe() handles
  bool may_dither;
};

// describe() for a grid that covers the range, without the rare cases and without branches.
template <class T>
GACT_FN PlainGroup plain_group(const Grid& grid, float low, float high, float levels, T) {
  const float largest = float_of(Largest<T>::bits);
  // Compares floats only: mixing in integer comparisons would keep compilers from vectorising it.
  const bool finite = high - low <= float_of(Largest<float>::bits);
  return PlainGroup{grid, !(finite & is_storable(grid, levels, largest)),
                    dither_allowed(low, high, grid, levels, largest)};
}

GACT_FN Group dead_group() { return Group{Grid{float_of(kNanBits), 0.0f, 0.0f, 0}, 0, kDeadScale, true, true, false}; }

// A grid near the limits of the type: its scale steps down and its offset up until all decoded values are finite, or no
// step is left.
template <class T>
GACT_FN Grid storable_grid(Grid grid, float low, float* levels, T type) {
  const float largest = float_of(Largest<T>::bits);
  for (int step = 0; step < 3 && grid.scale > 0.0f; ++step) {
    const float span = grid.scale * *levels;
    if (!(grid.offset + span <= largest)) grid = grid_at(float_of(bits_of(grid.scale) - kScaleStep), low, type);
  }
  if (!(grid.offset >= -largest)) {
    grid.stored_offset -= 1;  // towards zero
    grid.offset = offset_value(grid.stored_offset, grid.scale, type);
  }
  if (!is_storable(grid, *levels, largest)) *levels = 0.0f;
  return grid;
}

template <class T>
GACT_FN Group describe(const Extent& extent, int bits, T type) {
  const bool infinite = extent.has_minus || extent.has_plus;
  const float low = extent.low + 0.0f;  // turns -0.0 into 0.0
  const float range = extent.high - low;
  if (extent.has_nan || !is_finite(range)) return dead_group();
  if (bits == 1 && infinite && (range != 0.0f || (extent.has_minus && extent.has_plus))) return dead_group();
  // Two codes are reserved for -inf and +inf where either occurs; with 1 bit only one code is, and the range is 0.
  float levels = static_cast<float>((1 << bits) - 1 - (infinite ? (bits > 1 ? 2 : 1) : 0));
  Group group;
  group.grid = storable_grid(finest_grid(low, extent.high, levels, type), low, &levels, type);
  group.limit = static_cast<i32>(levels) << 8;
  group.stored_scale = static_cast<u16>(bits_of(group.grid.scale) >> 16);
  group.special = infinite;
  group.dead = false;
  group.may_dither = !infinite && dither_allowed(low, extent.high, group.grid, levels, float_of(Largest<T>::bits));
  if (infinite) group.stored_scale |= kSpecialFlag;
  if (bits == 1 && extent.has_plus) group.stored_scale |= kPlusFlag;
  return group;
}

// (value - offset) / scale in units of 1/256, to nearest even, clamped; 0 for NaN. Only rare groups need the clamps.
GACT_FN i32 scaled_value(float value, float offset, float inverse, i32 limit) {
  const float sum = fused(value - offset, inverse, kMagic);
  const float raised = sum > kMagic ? sum : kMagic;
  const float most = kMagic + static_cast<float>(limit);
  return static_cast<i32>(bits_of(raised < most ? raised : most) & 0xFFFFu);
}

// The code of one element; `scaled` receives what was rounded, in units of 1/256 step.
GACT_FN u32 code_of(float value, const Group& group, int bits, u32 noise, i32* scaled) {
  *scaled = 0;
  if (group.special) {
    if (group.dead) return 0u;
    if (!is_finite(value)) {
      const u32 plus_code = (1u << bits) - 1u;
      return value > 0.0f || bits == 1 ? plus_code : plus_code - 1u;
    }
  }
  *scaled = scaled_value(value, group.grid.offset, group.grid.inverse, group.limit);
  return (static_cast<u32>(*scaled) + noise) >> 8;
}

// The distance of the fraction to be rounded from 1/2, in units of 1/256.
GACT_FN u32 edge_of(i32 scaled) {
  const i32 from_half = (scaled & 0xFF) - 128;
  return static_cast<u32>(from_half < 0 ? -from_half : from_half);
}

// Whether subtracting the noise beats plain rounding for `count` elements with this sum of edge_of. Evenly spread
// fractions average 64, and plain rounding then has twice the variance; zero fractions give 128, and plain rounding is
// exact for them. Half and half, the two have the same variance.
GACT_FN bool dither_pays(u32 sum_of_edges, int count) { return sum_of_edges < 96u * static_cast<u32>(count); }

// The lowest value that a group with subtracted noise decodes to: (256 - 1) / 2 units below its offset.
GACT_FN float dithered_base(float offset, float unit) { return offset - 127.5f * unit; }

// The step of a stored scale without its flags.
GACT_FN float step_of(u16 stored_scale) { return float_of(static_cast<u32>(stored_scale & 0x7FFEu) << 16); }

GACT_FN float decode(u32 code, u16 stored_scale, float offset, int bits, u32 noise) {
  const float scale = step_of(stored_scale);
  if (stored_scale & kSpecialFlag) {
    const u32 plus_code = (1u << bits) - 1u;
    const float infinity = float_of(kInfinityBits);
    if (is_nan(scale)) return float_of(kNanBits);
    if (bits == 1 && code == 1u) return stored_scale & kPlusFlag ? infinity : -infinity;
    if (bits > 1 && code == plus_code) return infinity;
    if (bits > 1 && code + 1u == plus_code) return -infinity;
  } else if (stored_scale & kDitherFlag) {
    const float unit = scale * kUnit;
    return fused(static_cast<float>((code << 8) | (255u - noise)), unit, dithered_base(offset, unit));
  }
  return fused(static_cast<float>(code), scale, offset);
}

// ---- codes as words: see docs/codec.md

constexpr int kTileRows = 32;
constexpr int kRowElements = 16;  // of a row in memory order

// A code of `bits` bits has a field of 8, 4, 2 or 1 bits where `bits` has that bit set. It holds the bits of the code
// from this one on, and begins with so many rows of words in a whole tile.
GACT_FN constexpr int field_start(int bits, int field) { return bits & ~(2 * field - 1); }

// Rows of words that hold a field of `rows` rows.
GACT_FN constexpr int word_rows(int rows, int field) { return (rows * field + 31) / 32; }

// The row of words in which the field begins in a tile of `rows` rows.
GACT_FN constexpr int first_word_row(int bits, int field, int rows) {
  int first = 0;
  for (int wider = 8; wider > field; wider /= 2) first += bits & wider ? word_rows(rows, wider) : 0;
  return first;
}

// Where in a word the field of a row of its tile begins.
GACT_FN constexpr int field_shift(int row, int field) { return 8 * (row % 4) + field * (row / 4 % (8 / field)); }

}  // namespace gact
