// Quantising and decoding by one thread, for groups without rare values.
#pragma once

#include "cuda/tile.h"

namespace gact {

constexpr float kMagic =
    8388608.0f;  // 2^23: adding it to a smaller number leaves that number, rounded, in the lowest bits
constexpr u32 kMagicBits = 0x4B000000u;

struct Ends {
  float low, high;  // NaN if an element is
};

// Byte `byte` of four words.
GACT_FN u32 gather_bytes(const u32 words[4], u32 byte) {
  const u32 selector = byte | (byte + 4u) << 4;
  return select_bytes(select_bytes(words[0], words[1], selector), select_bytes(words[2], words[3], selector), 0x5410u);
}

// Codes of 8 elements, a byte each; returns `edges` and their edge_of. The selectors are those of the words of noise of
// elements with an even and an odd number.
template <int BITS>
GACT_FN u32 quantise(const float values[kLaneElements], float offset, float inverse, const u32 noise[kLaneElements],
                     const u32 selectors[2], u32 edges, u32 codes[2]) {
  // Rounding by the magic number leaves its exponent above the 24 bits of interest.
  constexpr bool kByMagic = BITS < 8;
  constexpr u32 kLimit = (((1u << BITS) - 1u) << 16) + (kByMagic ? kMagicBits : 0u);
  constexpr bool kClamped = BITS > 6;  // with fewer bits no rounding error reaches the next code
  u32 scaled[kLaneElements], sums[kLaneElements];
#pragma unroll
  for (int i = 0; i < kLaneElements; ++i) {
    const float distance = values[i] - offset;
    const float steps = distance * inverse;
    scaled[i] = kByMagic ? bits_of(steps + kMagic) : static_cast<u32>(round_to_int(steps));
    if (kClamped) scaled[i] = scaled[i] < kLimit ? scaled[i] : kLimit;
    sums[i] = scaled[i] + select_bytes(noise[i], 0u, selectors[i % 2] | 0x4400u);
  }
  codes[0] = gather_bytes(sums, 2);
  codes[1] = gather_bytes(sums + 4, 2);
  edges = add_byte_distances(gather_bytes(scaled, 1), 0x80808080u, edges);
  return add_byte_distances(gather_bytes(scaled + 4, 1), 0x80808080u, edges);
}

// decode() of group_codec.h for groups that are not special, with or without subtracted noise by the same instructions:
// a value is base + units * unit, and what is not subtracted is masked out of the units.
template <int BITS>
GACT_FN float decode_plain(u32 code_and_noise, u32 mask, float base, float unit) {
  const u32 units = code_and_noise & mask;
  const float counted = BITS < 8 ? float_of(units | kMagicBits) - kMagic : static_cast<float>(units);
  return base + counted * unit;
}

}  // namespace gact
