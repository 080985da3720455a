// Bit-level conversions and random numbers: valid as C++17 and as CUDA (also under NVRTC, without standard headers).
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
using i16 = short;
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

constexpr u32 kInfinityBits = 0x7F800000u;
constexpr u32 kNanBits = 0x7FC00000u;

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

// a * b + c, rounded once.
GACT_FN float fused(float a, float b, float c) {
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
  return __fmaf_rn(a, b, c);
#else
  return std::fma(a, b, c);
#endif
}

GACT_FN u64 wide_product(u32 a, u32 b) {
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
  u64 product;  // in PTX, as compilers add a zero to the high half
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

// Without branches, so that compilers vectorise it.
GACT_FN float to_float(Half value) {
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
  return result;
#else
  const u32 magnitude = value.bits & 0x7FFFu;
  const u32 normal = (magnitude << 13) + 0x38000000u;
  const u32 subnormal = bits_of(static_cast<float>(static_cast<i32>(magnitude)) * 5.9604644775390625e-8f);  // 2^-24
  const u32 infinite = kInfinityBits | ((magnitude & 0x3FFu) << 13);
  const u32 finite = magnitude >= 0x0400u ? normal : subnormal;
  return float_of(static_cast<u32>(value.bits & 0x8000u) << 16 | (magnitude >= 0x7C00u ? infinite : finite));
#endif
}

// The bits of the float16 nearest to a value that is not NaN, ties to even; from 65520 on infinity. Without branches.
GACT_FN u32 nearest_half(float value) {
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
  u16 result;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result) : "f"(value));
  return result;
#else
  const u32 bits = bits_of(value);
  const u32 magnitude = bits & 0x7FFFFFFFu;
  const u32 normal = (magnitude - 0x38000000u + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
  const u32 subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3F000000u;  // a multiple of 2^-24
  const u32 finite = magnitude >= 0x38800000u ? normal : subnormal;
  return ((bits >> 16) & 0x8000u) | (magnitude >= 0x477FF000u ? 0x7C00u : finite);
#endif
}

GACT_FN void from_float(float value, float* out) { *out = value; }

GACT_FN void from_float(float value, Bfloat* out) {
  const u32 bits = bits_of(value);
  const u32 rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  out->bits = is_nan(value) ? 0x7FC0u : static_cast<u16>(rounded);
}

GACT_FN void from_float(float value, Half* out) {
  out->bits = static_cast<u16>(is_nan(value) ? 0x7E00u : nearest_half(value));
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

constexpr int kPhiloxRounds = 10;
constexpr u32 kPhiloxM0 = 0xD2511F53u, kPhiloxM1 = 0xCD9E8D57u;
constexpr u32 kPhiloxW0 = 0x9E3779B9u, kPhiloxW1 = 0xBB67AE85u;
constexpr int kPhiloxRows = 8;  // of two adjacent columns, whose 16 bytes of noise are one output

// The key words of a round.
GACT_FN u32 first_key(u64 seed, int round) { return static_cast<u32>(seed) + static_cast<u32>(round) * kPhiloxW0; }

GACT_FN u32 second_key(u64 seed, int round) {
  return static_cast<u32>(seed >> 32) + static_cast<u32>(round) * kPhiloxW1;
}

GACT_FN u32 low_half(u64 product) { return static_cast<u32>(product); }

GACT_FN u32 high_half(u64 product) { return static_cast<u32>(product >> 32); }

// What the first rounds make of a pair of columns, whatever the rows: see docs/codec.md. The counter of rows 8 B ..
// 8 B + 7 of columns 2 pair and 2 pair + 1 is (pair, B modulo 2^32, 0, B / 2^32).
struct PhiloxPair {
  u32 second_of_key, first_of_state, high, low;  // a, b, e and d in docs/codec.md
};

// `blocks_high` is B / 2^32.
GACT_FN PhiloxPair philox_pair(u32 pair, u32 blocks_high, u64 seed) {
  const u64 first = wide_product(kPhiloxM0, pair);
  const u64 second = wide_product(kPhiloxM1, high_half(first) ^ blocks_high ^ second_key(seed, 0));
  const u64 third = wide_product(kPhiloxM0, high_half(second) ^ first_key(seed, 1));
  return PhiloxPair{low_half(first) ^ second_key(seed, 1), low_half(second) ^ first_key(seed, 2),
                    high_half(third) ^ second_key(seed, 2), low_half(third)};
}

// What the first rounds make of the rows, whatever the columns; `block` is B modulo 2^32.
GACT_FN u64 philox_block(u32 block, u64 seed) { return wide_product(kPhiloxM0, block ^ first_key(seed, 0)); }

// The four output words.
GACT_FN void philox(const PhiloxPair& pair, u64 block_product, u64 seed, u32 words[4]) {
  const u64 product = wide_product(kPhiloxM1, high_half(block_product) ^ pair.second_of_key);
  words[0] = high_half(product) ^ pair.first_of_state;
  words[1] = low_half(product);
  words[2] = pair.high ^ low_half(block_product);
  words[3] = pair.low;
  for (int round = 3; round < kPhiloxRounds; ++round) {
    const u64 product0 = wide_product(kPhiloxM0, words[0]);
    const u64 product1 = wide_product(kPhiloxM1, words[2]);
    words[0] = high_half(product1) ^ words[1] ^ first_key(seed, round);
    words[1] = low_half(product1);
    words[2] = high_half(product0) ^ words[3] ^ second_key(seed, round);
    words[3] = low_half(product0);
  }
}

// The eight random bits of the element in this row and column, out of the words of its counter.
GACT_FN u32 noise_of(const u32 words[4], u32 row, u32 column) {
  return (words[2u * (row / 4u % 2u) + column % 2u] >> (8u * (row % 4u))) & 0xFFu;
}

}  // namespace gact
