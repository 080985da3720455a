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

GACT_FN i32 round_to_int(float value) {
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
  return __float2int_rn(value);
#elif defined(__SSE4_1__)
  return static_cast<i32>(rintf(value));  // two instructions, which compilers vectorise
#else
  return static_cast<i32>(lrintf(value));
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

constexpr i32 kPhiloxBlock = 256;  // elements that share 16 counters
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

GACT_FN void philox_at(u64 counter, u64 seed, u32 words[4]) {
  words[0] = static_cast<u32>(counter);
  words[1] = static_cast<u32>(counter >> 32);
  words[2] = 0u;
  words[3] = 0u;
  philox(words, static_cast<u32>(seed), static_cast<u32>(seed >> 32));
}

GACT_FN void philox_of_lane(u64 block, u32 lane, u64 seed, u32 words[4]) { philox_at(block * 16u + lane, seed, words); }

}  // namespace gact
