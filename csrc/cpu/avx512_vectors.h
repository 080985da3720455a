// AVX-512: loads and stores of the codec's types, Philox, and codes from their bit planes, 16 to 128 at a time.
#pragma once

#include "cpu/dispatch.h"

namespace gact {
namespace {

// Shuffle indices: the even and the odd 16-bit words of two vectors, the odd and the even bytes of two vectors.
alignas(64) constexpr u16 kEvenWords[32] = {0,  2,  4,  6,  8,  10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30,
                                            32, 34, 36, 38, 40, 42, 44, 46, 48, 50, 52, 54, 56, 58, 60, 62};
alignas(64) constexpr u16 kOddWords[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                           33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
alignas(64) constexpr u8 kOddBytes[64] = {1,  3,  5,   7,   9,   11,  13,  15,  17,  19,  21,  23,  25,  27,  29,  31,
                                          33, 35, 37,  39,  41,  43,  45,  47,  49,  51,  53,  55,  57,  59,  61,  63,
                                          65, 67, 69,  71,  73,  75,  77,  79,  81,  83,  85,  87,  89,  91,  93,  95,
                                          97, 99, 101, 103, 105, 107, 109, 111, 113, 115, 117, 119, 121, 123, 125, 127};
alignas(64) constexpr u8 kEvenBytes[64] = {
    0,  2,  4,  6,  8,  10, 12,  14,  16,  18,  20,  22,  24,  26,  28,  30,  32,  34,  36,  38, 40, 42,
    44, 46, 48, 50, 52, 54, 56,  58,  60,  62,  64,  66,  68,  70,  72,  74,  76,  78,  80,  82, 84, 86,
    88, 90, 92, 94, 96, 98, 100, 102, 104, 106, 108, 110, 112, 114, 116, 118, 120, 122, 124, 126};

// As kEvenBytes with each eight in reverse order.
alignas(64) constexpr u8 kReversedEights[64] = {
    14, 12, 10, 8,  6,   4,   2,   0,   30,  28,  26, 24, 22,  20,  18,  16,  46,  44,  42,  40, 38, 36,
    34, 32, 62, 60, 58,  56,  54,  52,  50,  48,  78, 76, 74,  72,  70,  68,  66,  64,  94,  92, 90, 88,
    86, 84, 82, 80, 110, 108, 106, 104, 102, 100, 98, 96, 126, 124, 122, 120, 118, 116, 114, 112};
// Byte p of each of the 16 eights in two vectors, for planes p = 0..3 in turn.
alignas(64) constexpr u8 kPlaneBytes[64] = {0, 8,  16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 104, 112, 120,
                                            1, 9,  17, 25, 33, 41, 49, 57, 65, 73, 81, 89, 97, 105, 113, 121,
                                            2, 10, 18, 26, 34, 42, 50, 58, 66, 74, 82, 90, 98, 106, 114, 122,
                                            3, 11, 19, 27, 35, 43, 51, 59, 67, 75, 83, 91, 99, 107, 115, 123};

// Byte q of planes 7..0, for q = 0..7 in turn, where two vectors hold 16 bytes of each plane.
alignas(64) constexpr u8 kMatrixBytes[64] = {112, 96,  80, 64, 48, 32, 16, 0, 113, 97,  81, 65, 49, 33, 17, 1,
                                             114, 98,  82, 66, 50, 34, 18, 2, 115, 99,  83, 67, 51, 35, 19, 3,
                                             116, 100, 84, 68, 52, 36, 20, 4, 117, 101, 85, 69, 53, 37, 21, 5,
                                             118, 102, 86, 70, 54, 38, 22, 6, 119, 103, 87, 71, 55, 39, 23, 7};

#define GACT_ALWAYS_INLINE __attribute__((always_inline)) inline

inline __m512 load16(const float* x) { return _mm512_loadu_ps(x); }

inline __m512 load16(const Half* x) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x))); }

// 64 elements; bfloat16 becomes float32 by one shuffle that moves each word above a zero word.
template <class T>
inline void load64(const T* x, __m512 values[4]) {
  for (int vector = 0; vector < 4; ++vector) values[vector] = load16(x + 16 * vector);
}

inline void load64(const Bfloat* x, __m512 values[4]) {
  alignas(64) static constexpr u16 kSpread[64] = {
      0, 0,  0, 1,  0, 2,  0, 3,  0, 4,  0, 5,  0, 6,  0, 7,  0, 8,  0, 9,  0, 10, 0, 11, 0, 12, 0, 13, 0, 14, 0, 15,
      0, 16, 0, 17, 0, 18, 0, 19, 0, 20, 0, 21, 0, 22, 0, 23, 0, 24, 0, 25, 0, 26, 0, 27, 0, 28, 0, 29, 0, 30, 0, 31};
  for (int vector = 0; vector < 4; ++vector) {
    const __m512i words = _mm512_loadu_si512(x + 32 * (vector / 2));
    const __m512i spread = _mm512_load_si512(kSpread + 32 * (vector % 2));
    values[vector] = _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xAAAAAAAA, spread, words));
  }
}

inline void store64(void* out, __m512i value, bool stream) {
  if (stream) {
    _mm512_stream_si512(static_cast<__m512i*>(out), value);
  } else {
    _mm512_storeu_si512(out, value);
  }
}

// 32 finite floats to bfloat16, ties to even.
inline __m512i to_bfloat(__m512 low, __m512 high) {
  const __m512i bias = _mm512_set1_epi32(0x7FFF), one = _mm512_set1_epi32(1);
  __m512i a = _mm512_castps_si512(low), b = _mm512_castps_si512(high);
  a = _mm512_add_epi32(_mm512_add_epi32(a, bias), _mm512_and_si512(_mm512_srli_epi32(a, 16), one));
  b = _mm512_add_epi32(_mm512_add_epi32(b, bias), _mm512_and_si512(_mm512_srli_epi32(b, 16), one));
  return _mm512_permutex2var_epi16(a, _mm512_load_si512(kOddWords), b);
}

inline __m512i to_words(__m512 low, __m512 high, Bfloat*) { return to_bfloat(low, high); }

inline __m512i to_words(__m512 low, __m512 high, Half*) {
  const __m256i first = _mm512_cvtps_ph(low, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m256i second = _mm512_cvtps_ph(high, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
}

// The 32-bit halves of the 16 products value * multiplier. Products are made for even
// and odd lanes apart; what is wanted of them is joined with shuffles, because shifts have fewer ports.
inline void multiply(__m512i value, u32 multiplier, __m512i* low, __m512i* high) {
  const __m512i factor = _mm512_set1_epi64(multiplier);
  const __m512i even = _mm512_mul_epu32(value, factor);
  const __m512i odd = _mm512_mul_epu32(_mm512_shuffle_epi32(value, static_cast<_MM_PERM_ENUM>(0xF5)), factor);
  *low = _mm512_mask_shuffle_epi32(even, 0xAAAA, odd, static_cast<_MM_PERM_ENUM>(0xA0));
  *high = _mm512_mask_shuffle_epi32(odd, 0x5555, even, static_cast<_MM_PERM_ENUM>(0xF5));
}

// One Philox round on the four counter words of 16 lanes.
inline void philox_round(__m512i state[4], __m512i key0, __m512i key1) {
  __m512i low0, high0, low1, high1;
  multiply(state[0], kPhiloxM0, &low0, &high0);
  multiply(state[2], kPhiloxM1, &low1, &high1);
  state[0] = _mm512_ternarylogic_epi32(high1, state[1], key0, 0x96);
  state[1] = low1;
  state[2] = _mm512_ternarylogic_epi32(high0, state[3], key1, 0x96);
  state[3] = low0;
}

// Bytes of 64 codes from their bit planes, 8 bytes of each.
template <int BITS>
inline __m512i codes_of(const u8* planes, int stride) {
  __m512i codes = _mm512_setzero_si512();
  for (int plane = 0; plane < BITS; ++plane) {
    u64 mask;
    std::memcpy(&mask, planes + plane * stride, sizeof(mask));
    const __m512i weight = _mm512_set1_epi8(static_cast<char>(1 << plane));
    codes = plane == 0 ? _mm512_maskz_mov_epi8(mask, weight) : _mm512_mask_add_epi8(codes, mask, codes, weight);
  }
  return codes;
}

// Bytes of 128 codes from their bit planes, 16 bytes of each: bytes 0..7 of all planes are eight 8 by 8 bit matrices,
// which the affine instruction transposes as in store_planes.
template <int BITS>
inline void codes_of_128(const u8* planes, int stride, __m512i codes[2]) {
  __m512i quads[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
  for (int plane = 0; plane < BITS; ++plane) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(planes + plane * stride));
    __m512i& quad = quads[plane / 4];
    quad = plane % 4 == 0   ? _mm512_zextsi128_si512(bytes)
           : plane % 4 == 1 ? _mm512_inserti32x4(quad, bytes, 1)
           : plane % 4 == 2 ? _mm512_inserti32x4(quad, bytes, 2)
                            : _mm512_inserti32x4(quad, bytes, 3);
  }
  const __m512i units = _mm512_set1_epi64(static_cast<i64>(0x8040201008040201ull));
  const __m512i order = _mm512_load_si512(kMatrixBytes);
  for (int half = 0; half < 2; ++half) {
    const __m512i picked = _mm512_add_epi8(order, _mm512_set1_epi8(static_cast<char>(8 * half)));
    codes[half] = _mm512_gf2p8affine_epi64_epi8(units, _mm512_permutex2var_epi8(quads[0], picked, quads[1]), 0);
  }
}

inline __m512i sixteen_codes(__m512i codes, int quarter) {
  const __m128i bytes = quarter == 0   ? _mm512_castsi512_si128(codes)
                        : quarter == 1 ? _mm512_extracti32x4_epi32(codes, 1)
                        : quarter == 2 ? _mm512_extracti32x4_epi32(codes, 2)
                                       : _mm512_extracti32x4_epi32(codes, 3);
  return _mm512_cvtepu8_epi32(bytes);
}

// offset + code * scale of 16 codes; the two operations are as in group_codec.h.
inline __m512 values_of(__m512i codes, __m512 scale, __m512 offset) {
  return _mm512_add_ps(offset, _mm512_mul_ps(_mm512_cvtepi32_ps(codes), scale));
}

}  // namespace
}  // namespace gact
