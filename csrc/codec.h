// The per-group arithmetic of the codec, valid as C++17 and as CUDA (also under NVRTC, without standard headers).
// gact_dist/ops_reference.py defines the same in PyTorch; both give the same bits. Everything here is float32, one
// IEEE operation at a time: compile with -ffp-contract=off (C++) or -fmad=false (CUDA), never with fast-math.
#pragma once

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define GACT_FN static __device__ __forceinline__
#else
#define GACT_FN static inline
#include <cmath>
#include <cstring>
#endif

namespace gact {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

// float16 and bfloat16 as stored, so that the header needs no library type.
struct Half {
  u16 bits;
};
struct Bfloat {
  u16 bits;
};

constexpr i32 kPhiloxBlock = 256;                    // elements that share 16 Philox counters
constexpr float kMinScale = 3.851859888774472e-34f;  // 2^-111: 65536 / scale stays finite
constexpr u32 kInfinityBits = 0x7F800000u;
constexpr u32 kNanBits = 0x7FC00000u;
constexpr u16 kSpecialFlag = 0x8000u;  // sign of a stored scale: the group holds values that are not finite
constexpr u16 kMinusOne = 0xBF80u;     // stored scale of a 1-bit group whose code 1 is +inf
constexpr u16 kDitherFlag = 1u;        // lowest bit of a stored scale: the noise is subtracted again when decoding
constexpr float kDitherUnit = 1.52587890625e-5f;  // 2^-16: the part of a step in which noise is counted
constexpr u32 kScaleStep = 0x20000u;              // between neighbouring scales, which leave that bit free

// ---- bits and conversions

GACT_FN u32 bits_of(float value) {
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
  return __float_as_uint(value);
#else
  u32 bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
#endif
}

GACT_FN float float_of(u32 bits) {
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
  return __uint_as_float(bits);
#else
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
#endif
}

GACT_FN i32 round_to_int(float value) {
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
  return __float2int_rn(value);
#elif defined(__SSE4_1__)
  return static_cast<i32>(rintf(value));  // two instructions, but ones that compilers vectorise
#else
  return static_cast<i32>(lrintf(value));
#endif
}

GACT_FN u64 wide_product(u32 a, u32 b) {
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
  u64 product;  // left to the compiler, the high half costs an addition of zero
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
  return product;
#else
  return static_cast<u64>(a) * b;
#endif
}

GACT_FN bool is_nan(float value) { return (bits_of(value) & 0x7FFFFFFFu) > kInfinityBits; }

GACT_FN bool is_finite(float value) { return (bits_of(value) & 0x7FFFFFFFu) < kInfinityBits; }

GACT_FN float to_float(float value) { return value; }

GACT_FN float to_float(Bfloat value) { return float_of(static_cast<u32>(value.bits) << 16); }

GACT_FN float to_float(Half value) {
  const u32 sign = static_cast<u32>(value.bits & 0x8000u) << 16;
  const u32 magnitude = value.bits & 0x7FFFu;
  if (magnitude >= 0x7C00u) return float_of(sign | kInfinityBits | ((magnitude & 0x3FFu) << 13));
  if (magnitude >= 0x0400u) return float_of(sign | ((magnitude << 13) + 0x38000000u));
  // Subnormal: a multiple of 2^-24, exact in float32.
  return float_of(sign | bits_of(static_cast<float>(magnitude) * 5.9604644775390625e-8f));
}

GACT_FN void from_float(float value, float* out) { *out = value; }

GACT_FN void from_float(float value, Bfloat* out) {
  const u32 bits = bits_of(value);
  const u32 rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  out->bits = is_nan(value) ? 0x7FC0u : static_cast<u16>(rounded);
}

GACT_FN void from_float(float value, Half* out) {
  const u32 bits = bits_of(value);
  const u32 sign = (bits >> 16) & 0x8000u;
  const u32 magnitude = bits & 0x7FFFFFFFu;
  u32 half;
  if (magnitude > kInfinityBits) {
    half = 0x7E00u;
  } else if (magnitude >= 0x477FF000u) {  // 65520 and above rounds to infinity
    half = 0x7C00u;
  } else if (magnitude >= 0x38800000u) {  // normal: drop 13 bits, ties to even
    half = (magnitude - 0x38000000u + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
  } else {  // subnormal: round to a multiple of 2^-24
    half = static_cast<u32>(round_to_int(float_of(magnitude) * 16777216.0f));
  }
  out->bits = static_cast<u16>(is_nan(value) ? half : (sign | half));
}

template <class T>
struct Largest;
template <>
struct Largest<float> {
  static constexpr u32 bits = 0x7F7FFFFFu;
};
template <>
struct Largest<Half> {
  static constexpr u32 bits = 0x477FE000u;  // 65504
};
template <>
struct Largest<Bfloat> {
  static constexpr u32 bits = 0x7F7F0000u;
};

// ---- random numbers: Philox4x32-10 (Salmon et al., SC 2011)

constexpr u32 kPhiloxM0 = 0xD2511F53u, kPhiloxM1 = 0xCD9E8D57u;
constexpr u32 kPhiloxW0 = 0x9E3779B9u, kPhiloxW1 = 0xBB67AE85u;

// words[0..3] holds the counter on entry and the output on return.
GACT_FN void philox(u32 words[4], u32 key0, u32 key1) {
  for (int round = 0; round < 10; ++round) {
    const u64 product0 = wide_product(kPhiloxM0, words[0]);
    const u64 product1 = wide_product(kPhiloxM1, words[2]);
    words[0] = static_cast<u32>(product1 >> 32) ^ words[1] ^ key0;
    words[1] = static_cast<u32>(product1);
    words[2] = static_cast<u32>(product0 >> 32) ^ words[3] ^ key1;
    words[3] = static_cast<u32>(product0);
    key0 += kPhiloxW0;
    key1 += kPhiloxW1;
  }
}

// The 16 random bits of one element, out of the words of its counter block * 16 + (element & 15): two neighbouring
// bytes of the word that it shares with three others, each of which begins at another byte.
GACT_FN u32 random16(const u32 words[4], u32 element) {
  const u32 vector = (element >> 4) & 15u;
  const u32 word = words[vector >> 2];
  const u32 shift = 8u * (vector & 3u);
  return ((word >> shift) | (word << ((32u - shift) & 31u))) & 0xFFFFu;
}

GACT_FN void philox_of_lane(u64 block, u32 lane, u64 seed, u32 words[4]) {
  const u64 counter = block * 16u + lane;
  words[0] = static_cast<u32>(counter);
  words[1] = static_cast<u32>(counter >> 32);
  words[2] = 0u;
  words[3] = 0u;
  philox(words, static_cast<u32>(seed), static_cast<u32>(seed >> 32));
}

// ---- one group

// Range of the finite elements of a group and what else was seen.
struct Extent {
  float low, high;
  bool has_nan, has_minus, has_plus;
};

struct Group {
  float low;         // offset, never -0.0
  float scale;       // step between codes, not negative
  float inverse;     // 65536 / scale, or 0
  i32 limit;         // highest finite code times 65536
  u16 stored_scale;  // bfloat16 bits; the sign marks a special group
  bool special;      // holds NaN or infinities, or its range overflows
  bool dead;         // decodes to NaN
  bool may_dither;   // half a step more on either side changes no sign and overflows nothing
};

template <class T>
GACT_FN Extent extent_of(const T* x, int count) {
  Extent extent{float_of(kInfinityBits), -float_of(kInfinityBits), false, false, false};
  bool any_finite = false;
  for (int i = 0; i < count; ++i) {
    const float value = to_float(x[i]);
    if (is_finite(value)) {
      extent.low = value < extent.low ? value : extent.low;
      extent.high = value > extent.high ? value : extent.high;
      any_finite = true;
    } else {
      extent.has_nan |= is_nan(value);
      extent.has_minus |= value < 0.0f;
      extent.has_plus |= value > 0.0f;
    }
  }
  if (!any_finite) extent.low = extent.high = 0.0f;
  return extent;
}

// range / levels rounded outward to a multiple of kScaleStep in bits; stepped down again while the top code would
// exceed `largest`.
GACT_FN float storable_scale(float range, float low, float levels, float largest) {
  if (!(range > 0.0f)) return 0.0f;
  float scale = float_of((bits_of(range / levels) + (kScaleStep - 1u)) & ~(kScaleStep - 1u));
  if (scale * levels < range) scale = float_of(bits_of(scale) + kScaleStep);
  if (scale < kMinScale) scale = kMinScale;
  for (int step = 0; step < 3; ++step) {
    const float span = scale * levels;
    if (!(low + span <= largest)) scale = float_of(bits_of(scale) - kScaleStep);
  }
  return scale;
}

GACT_FN bool dither_allowed(float low, float high, float scale, float levels, float largest) {
  const float half = 0.5f * scale;
  const float span = scale * levels;
  const float top = low + span;
  // Without branches, so that compilers vectorise it.
  const bool keeps_sign = ((low < 0.0f) & (high > 0.0f)) | (low > half) | (high < -half);
  return keeps_sign & (scale > 0.0f) & (top + scale <= largest) & (low - scale >= -largest);
}

GACT_FN Group dead_group() { return Group{float_of(kNanBits), 0.0f, 0.0f, 0, kSpecialFlag, true, true, false}; }

GACT_FN Group describe(const Extent& extent, int bits, float largest) {
  const bool infinite = extent.has_minus || extent.has_plus;
  const float low = extent.low + 0.0f;  // turns -0.0 into 0.0
  const float range = extent.high - low;
  if (extent.has_nan || !is_finite(range)) return dead_group();
  if (bits == 1 && infinite && (range != 0.0f || (extent.has_minus && extent.has_plus))) return dead_group();
  // Two codes are reserved for -inf and +inf where one occurs; with one bit, range is 0 and levels does not matter.
  const i32 levels = (1 << bits) - 1 - (infinite && bits > 1 ? 2 : 0);
  Group group;
  group.low = low;
  group.scale = storable_scale(range, low, static_cast<float>(levels), largest);
  group.inverse = group.scale > 0.0f ? 65536.0f / group.scale : 0.0f;
  group.limit = levels << 16;
  group.stored_scale = static_cast<u16>(bits_of(group.scale) >> 16);
  group.special = infinite;
  group.dead = false;
  group.may_dither = !infinite && dither_allowed(low, extent.high, group.scale, static_cast<float>(levels), largest);
  if (infinite) group.stored_scale |= (bits == 1 && extent.has_plus) ? kMinusOne : kSpecialFlag;
  return group;
}

// (value - low) / scale in units of 2^-16, to nearest even, clamped.
GACT_FN i32 scaled_value(float value, float low, float inverse, i32 limit) {
  const float distance = value - low;
  const i32 steps = round_to_int(distance * inverse);
  return steps < limit ? steps : limit;
}

// The code of one element; `scaled` receives what was rounded, in units of 2^-16 steps.
GACT_FN u32 code_of(float value, const Group& group, int bits, u32 noise, i32* scaled) {
  *scaled = 0;
  if (group.special) {
    if (group.dead) return 0u;
    if (!is_finite(value)) {
      const u32 plus_code = (1u << bits) - 1u;
      return value > 0.0f || bits == 1 ? plus_code : plus_code - 1u;
    }
  }
  *scaled = scaled_value(value, group.low, group.inverse, group.limit);
  return (static_cast<u32>(*scaled) + noise) >> 16;
}

// How far the fraction that is rounded lies from 1/2, in units of 2^-8: its eight highest bits are compared.
GACT_FN u32 edge_of(i32 scaled) {
  const i32 from_half = ((scaled >> 8) & 0xFF) - 128;
  return static_cast<u32>(from_half < 0 ? -from_half : from_half);
}

// Whether subtracting the noise beats plain rounding for `count` elements with this sum of edge_of. Fractions that are
// all spread evenly make 64 an element, and plain rounding has twice the variance then; fractions of zero make 128, and
// it is exact for them. With as many of the one as of the other both ways have the same variance.
GACT_FN bool dither_pays(u32 sum_of_edges, int count) { return sum_of_edges < 96u * static_cast<u32>(count); }

// The lowest value that a group with subtracted noise decodes to: (65536 - 1) / 2 units of 2^-16 steps below its
// offset.
GACT_FN float dithered_base(float offset, float unit) { return offset - 32767.5f * unit; }

GACT_FN float decode(u32 code, u16 stored_scale, float offset, int bits, u32 noise) {
  const float scale = float_of(static_cast<u32>(stored_scale & 0x7FFEu) << 16);
  if (stored_scale & kSpecialFlag) {
    const u32 plus_code = (1u << bits) - 1u;
    const float infinity = float_of(kInfinityBits);
    if (bits == 1 && code == 1u) return stored_scale == kMinusOne ? infinity : -infinity;
    if (bits > 1 && code == plus_code) return infinity;
    if (bits > 1 && code + 1u == plus_code) return -infinity;
  }
  if (stored_scale & kDitherFlag) {
    const float unit = scale * kDitherUnit;
    const float units = static_cast<float>((code << 16) | (65535u - noise));
    return dithered_base(offset, unit) + units * unit;
  }
  return offset + static_cast<float>(code) * scale;
}

}  // namespace gact
