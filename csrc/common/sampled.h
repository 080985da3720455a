// What sampling computes of one log-probability, and of the largest of a group of them, valid as C++17 and as CUDA.
// See [Note: sampled] in gact_dist/codec/sampled.py. float32, one IEEE operation at a time, and fused() where it says
// so.
#pragma once

#include "common/numbers.h"

namespace gact {

constexpr int kSampledGroup = 32;         // words
constexpr int kSampledOneBits = 24;       // a probability of the largest of a group is 2^24
constexpr float kLeastDistance = -20.0f;  // exp() of less is below 2^-25: no part of the largest

// exp(x) times 2^SCALE for -87 <= x <= 0, to 1e-7 of it: the Taylor series of what is left of x after a multiple of
// log 2.
template <int SCALE>
GACT_FN float exponential(float x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: what is added to it is rounded to an integer
  const float multiple = fused(x, 1.44269504088896341f, kRound), count = multiple - kRound;
  const float rest = fused(count, 2.12194440054690583e-4f, fused(count, -0.693359375f, x));  // log 2 in two parts
  float sum = 1.0f / 5040.0f;
  sum = fused(sum, rest, 1.0f / 720.0f);
  sum = fused(sum, rest, 1.0f / 120.0f);
  sum = fused(sum, rest, 1.0f / 24.0f);
  sum = fused(sum, rest, 1.0f / 6.0f);
  sum = fused(sum, rest, 0.5f);
  sum = fused(sum, rest, 1.0f);
  sum = fused(sum, rest, 1.0f);
  return float_of(bits_of(sum) + (bits_of(multiple) << 23) + (static_cast<u32>(SCALE) << 23));
}

// p / m in units of 2^-24. distance: log p - log m; NaN counts as nothing.
GACT_FN i32 share_of(float distance) {
  const float below = distance > kLeastDistance ? distance : kLeastDistance;
  return static_cast<i32>(exponential<kSampledOneBits>(below < 0.0f ? below : 0.0f) + 0.5f);
}

// The bits of a float16 that is not below a value and near it, finite unless that is NaN.
GACT_FN u16 half_not_below(float value) {
  if (is_nan(value)) return 0x7E00u;
  const u32 nearest = nearest_half(value);
  const float magnitude = value < 0.0f ? -value : value;
  const bool is_below = to_float(Half{static_cast<u16>(nearest)}) < value;
  const u32 found = is_below ? nearest_half(value + magnitude * 0.00048828125f + 2.98023223876953125e-8f) : nearest;
  return static_cast<u16>((found & 0x7FFFu) == 0x7C00u ? found - 1u : found);
}

// What is stored of the largest of a group as a float; NaN has the same bits everywhere.
GACT_FN float stored_largest(u16 stored) {
  const float value = to_float(Half{stored});
  return is_nan(value) ? float_of(kNanBits) : value;
}

// What a group adds to the squared error if it is sampled. shares, squares: the sums of p / m and of its square, in
// units of 2^-24. largest: log m.
GACT_FN float sampled_variance(i32 shares, i32 squares, float largest) {
  const float twice = largest + largest, above = twice > -87.0f ? twice : -87.0f;
  return static_cast<float>(shares - squares) * exponential<0>(above < 0.0f ? above : 0.0f);
}

// The square of a share, in the same unit, rounded down.
GACT_FN i32 square_of_share(i32 share) {
  const i32 root = share >> 9;
  return (root * root) >> 6;
}

// The random words of four groups, of which the first has this number times four. The upper 24 bits of each begin the
// running sum of a group.
GACT_FN void philox_of_groups(i64 quarter, u64 seed, u32 words[4]) {
  const u32 low = static_cast<u32>(quarter), high = static_cast<u32>(static_cast<u64>(quarter) >> 32);
  philox(philox_pair(low, 1u, seed), philox_block(high, seed), seed, words);
}

}  // namespace gact
