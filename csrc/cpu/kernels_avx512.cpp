// AVX-512 kernels (F, BW, DQ, VL, VBMI, GFNI: Ice Lake, Zen 4 and newer). The same bits as kernels_scalar.cpp.
#include "cpu/dispatch.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VBMI__) && \
    defined(__GFNI__)

#include "cpu/avx512_vectors.h"

namespace gact {
namespace {

// What quantising needs of the groups of 64 elements: the same for all, or by column.
struct OneGroup {
  __m512 offset, inverse;

  __m512 offset_of(int) const { return offset; }
  __m512 inverse_of(int) const { return inverse; }
};

struct ByColumn {
  const float* offsets;
  const float* inverses;

  __m512 offset_of(int vector) const { return _mm512_loadu_ps(offsets + 16 * vector); }
  __m512 inverse_of(int vector) const { return _mm512_loadu_ps(inverses + 16 * vector); }
};

struct Avx512Isa {
  static Range range(const float* x, int count) {
    __m512 low0 = load16(x), low1 = low0, high0 = low0, high1 = low0;
    __mmask16 unordered = 0;
    for (int i = 0; i < count; i += 32) {
      const __m512 a = load16(x + i), b = load16(x + i + 16);
      low0 = _mm512_min_ps(low0, a);
      low1 = _mm512_min_ps(low1, b);
      high0 = _mm512_max_ps(high0, a);
      high1 = _mm512_max_ps(high1, b);
      unordered |= _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q);
    }
    const float low = _mm512_reduce_min_ps(_mm512_min_ps(low0, low1));
    return {unordered ? float_of(kNanBits) : low, _mm512_reduce_max_ps(_mm512_max_ps(high0, high1))};
  }

  // 16-bit floats as integers of the same order: negative ones with their magnitude inverted. NaNs are the extremes.
  template <class T>
  static Range range(const T* x, int count) {
    const __m512i magnitude = _mm512_set1_epi16(0x7FFF);
    __m512i low = magnitude, high = _mm512_set1_epi16(-0x8000);
    for (int i = 0; i < count; i += 32) {
      const __m512i value = _mm512_loadu_si512(x + i);
      const __m512i key = _mm512_ternarylogic_epi32(value, _mm512_srai_epi16(value, 15), magnitude, 0x78);
      low = _mm512_min_epi16(low, key);
      high = _mm512_max_epi16(high, key);
    }
    const __m512i sign = _mm512_set1_epi16(-0x8000);
    const u16 low_key = smallest_word(_mm512_xor_si512(low, sign)) ^ 0x8000u;
    const u16 high_key = smallest_word(_mm512_xor_si512(high, magnitude)) ^ 0x7FFFu;
    return {float_of_key<T>(low_key), float_of_key<T>(high_key)};
  }

  static u16 smallest_word(__m512i words) {
    const __m256i half = _mm256_min_epu16(_mm512_castsi512_si256(words), _mm512_extracti64x4_epi64(words, 1));
    const __m128i quarter = _mm_min_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    return static_cast<u16>(_mm_cvtsi128_si32(_mm_minpos_epu16(quarter)));
  }

  template <class T>
  static float float_of_key(u16 key) {
    return to_float(T{static_cast<u16>(key & 0x8000u ? key ^ 0x7FFFu : key)});
  }

  static void philox(u64 block, const RoundKeys& keys, u32 words[16][16]) {
    // Four independent sets of counters, to fill the latency of the multiplications.
    __m512i state[4][4];
    const u64 counter = block * 16u;
    const __m512i lanes = counting();
#pragma GCC unroll 4
    for (int set = 0; set < 4; ++set) {
      state[set][0] = _mm512_add_epi32(_mm512_set1_epi32(static_cast<i32>(counter + 16 * set)), lanes);
      state[set][1] = _mm512_set1_epi32(static_cast<i32>((counter + 16 * set) >> 32));
      state[set][2] = state[set][3] = _mm512_setzero_si512();
    }
#pragma GCC unroll 10
    for (int round = 0; round < 10; ++round) {
      const __m512i key0 = _mm512_set1_epi32(static_cast<i32>(keys.first[round]));
      const __m512i key1 = _mm512_set1_epi32(static_cast<i32>(keys.second[round]));
#pragma GCC unroll 4
      for (int set = 0; set < 4; ++set) philox_round(state[set], key0, key1);
    }
#pragma GCC unroll 16
    for (int row = 0; row < 16; ++row) _mm512_store_si512(words[row], state[row / 4][row % 4]);
  }

  template <class T, int BITS>
  static u32 quantise(const T* x, int group_size, float low, float inverse, const u32 (*noise)[16], u8* planes) {
    const int stride = group_size / 8;
    const OneGroup group{_mm512_set1_ps(low), _mm512_set1_ps(inverse)};
    const __m512i half = _mm512_set1_epi8(-128);
    __m512i edges = _mm512_setzero_si512();
    __m512i fractions[2];
    if (group_size == 64) {
      store_masks<BITS>(codes_of_values<BITS>(x, group, noise[0], kEvenBytes, fractions), planes, stride);
      edges = _mm512_sad_epu8(fractions[0], half);
    } else {
      for (int i = 0; i < group_size; i += 128) {
        const u32(*rows)[16] = noise + i / 64;
        const __m512i first = codes_of_values<BITS>(x + i, group, rows[0], kReversedEights, fractions);
        const __m512i second = codes_of_values<BITS>(x + i + 64, group, rows[1], kReversedEights, fractions + 1);
        store_planes<BITS>(first, second, planes + i / 8, stride);
        edges = _mm512_add_epi64(edges, _mm512_sad_epu8(fractions[0], half));
        edges = _mm512_add_epi64(edges, _mm512_sad_epu8(fractions[1], half));
      }
    }
    return static_cast<u32>(_mm512_reduce_add_epi64(edges));
  }

  template <class T, int BITS>
  static void quantise_columns(const T* x, const float* offset, const float* inverse, const u32 words[16], u16* edges,
                               u8* planes, int stride) {
    __m512i fractions;
    store_masks<BITS>(codes_of_values<BITS>(x, ByColumn{offset, inverse}, words, kEvenBytes, &fractions), planes,
                      stride);
    const __m512i distances = _mm512_abs_epi8(_mm512_xor_si512(fractions, _mm512_set1_epi8(-128)));
    for (int half = 0; half < 2; ++half) {
      const __m256i bytes = half ? _mm512_extracti64x4_epi64(distances, 1) : _mm512_castsi512_si256(distances);
      const __m512i sums = _mm512_adds_epu16(_mm512_loadu_si512(edges + 32 * half), _mm512_cvtepu8_epi16(bytes));
      _mm512_storeu_si512(edges + 32 * half, sums);
    }
  }

  // 64 codes in order to 8 bytes in each plane.
  template <int BITS>
  GACT_ALWAYS_INLINE static void store_masks(__m512i codes, u8* planes, int stride) {
    for (int plane = 0; plane < BITS; ++plane) {
      const u64 mask = _mm512_test_epi8_mask(codes, _mm512_set1_epi8(static_cast<char>(1 << plane)));
      std::memcpy(planes + plane * stride, &mask, sizeof(mask));
    }
  }

  // Codes of 64 elements as bytes; `order` picks the even bytes of two vectors. `fractions` receives, in order, the
  // eight highest bits of what is rounded.
  template <int BITS, class T, class Groups>
  GACT_ALWAYS_INLINE static __m512i codes_of_values(const T* x, const Groups& groups, const u32 words[16],
                                                    const u8* order, __m512i* fractions) {
    const __m512i limit = _mm512_set1_epi32(((1 << BITS) - 1) << 16), mask16 = _mm512_set1_epi32(0xFFFF);
    const __m512i word = _mm512_load_si512(words);
    const __m512i noise[4] = {_mm512_and_si512(word, mask16), _mm512_and_si512(_mm512_srli_epi32(word, 8), mask16),
                              _mm512_srli_epi32(word, 16), _mm512_and_si512(_mm512_ror_epi32(word, 24), mask16)};
    __m512 values[4];
    load64(x, values);
    __m512i steps[4], sums[4];
    for (int vector = 0; vector < 4; ++vector) {
      const __m512 distance = _mm512_sub_ps(values[vector], groups.offset_of(vector));
      steps[vector] = _mm512_cvtps_epi32(_mm512_mul_ps(distance, groups.inverse_of(vector)));
      if (needs_clamp(BITS)) steps[vector] = _mm512_min_epi32(steps[vector], limit);
      sums[vector] = _mm512_add_epi32(steps[vector], noise[vector]);
    }
    const __m512i even_words = _mm512_load_si512(kEvenWords);
    *fractions = _mm512_permutex2var_epi8(_mm512_permutex2var_epi16(steps[0], even_words, steps[1]),
                                          _mm512_load_si512(kOddBytes),
                                          _mm512_permutex2var_epi16(steps[2], even_words, steps[3]));
    const __m512i odd_words = _mm512_load_si512(kOddWords);
    const __m512i lower = _mm512_permutex2var_epi16(sums[0], odd_words, sums[1]);
    const __m512i upper = _mm512_permutex2var_epi16(sums[2], odd_words, sums[3]);
    return _mm512_permutex2var_epi8(lower, _mm512_load_si512(order), upper);
  }

  // 128 codes, each eight of them in reverse order, to 16 bytes in each plane. The affine instruction transposes
  // 8 by 8 bits when its matrix is the data and its vector the eight unit vectors.
  template <int BITS>
  GACT_ALWAYS_INLINE static void store_planes(__m512i first, __m512i second, u8* planes, int stride) {
    const __m512i units = _mm512_set1_epi64(static_cast<i64>(0x8040201008040201ull));
    first = _mm512_gf2p8affine_epi64_epi8(units, first, 0);
    second = _mm512_gf2p8affine_epi64_epi8(units, second, 0);
    const __m512i low_planes = _mm512_load_si512(kPlaneBytes);
    store_lanes < BITS<4 ? BITS : 4>(_mm512_permutex2var_epi8(first, low_planes, second), planes, stride);
    if (BITS <= 4) return;
    const __m512i high_planes = _mm512_add_epi8(low_planes, _mm512_set1_epi8(4));
    const __m512i upper = _mm512_permutex2var_epi8(first, high_planes, second);
    store_lanes<BITS <= 4 ? 1 : BITS - 4>(upper, planes + 4 * stride, stride);
  }

  template <int COUNT>
  static void store_lanes(__m512i lanes, u8* out, int stride) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_castsi512_si128(lanes));
    if (COUNT > 1) _mm_storeu_si128(reinterpret_cast<__m128i*>(out + stride), _mm512_extracti32x4_epi32(lanes, 1));
    if (COUNT > 2) _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 2 * stride), _mm512_extracti32x4_epi32(lanes, 2));
    if (COUNT > 3) _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 3 * stride), _mm512_extracti32x4_epi32(lanes, 3));
  }

  template <class T, int BITS>
  static void decode(const u8* planes, int group_size, float scale, float offset, T* out, bool stream) {
    const __m512 scales = _mm512_set1_ps(scale), offsets = _mm512_set1_ps(offset);
    const auto table = table_of(scales, offsets, out);
    const int stride = group_size / 8;
    if (group_size == 64)
      return store_values<BITS>(codes_of<BITS>(planes, stride), table, scales, offsets, out, stream);
    for (int i = 0; i < group_size; i += 128) {
      __m512i codes[2];
      codes_of_128<BITS>(planes + i / 8, stride, codes);
      store_values<BITS>(codes[0], table, scales, offsets, out + i, stream);
      store_values<BITS>(codes[1], table, scales, offsets, out + i + 64, stream);
    }
  }

  template <class T, int BITS>
  static void decode_dithered(const u8* planes, int group_size, float unit, float base, const u32 (*noise)[16], T* out,
                              bool stream) {
    const __m512 units = _mm512_set1_ps(unit), bases = _mm512_set1_ps(base);
    const int stride = group_size / 8;
    if (group_size == 64) {
      store_dithered(codes_of<BITS>(planes, stride), noise[0], units, bases, out, stream);
      return;
    }
    for (int i = 0; i < group_size; i += 128) {
      __m512i codes[2];
      codes_of_128<BITS>(planes + i / 8, stride, codes);
      store_dithered(codes[0], noise[i / 64], units, bases, out + i, stream);
      store_dithered(codes[1], noise[i / 64 + 1], units, bases, out + i + 64, stream);
    }
  }

  template <class T, int BITS>
  static void decode_columns(const u8* planes, int stride, const float* unit, const float* base, const u32* mask,
                             const u32 words[16], T* out, bool stream) {
    const __m512i codes = codes_of<BITS>(planes, stride);
    const __m512i word = _mm512_load_si512(words);
    const __m512i turned[4] = {word, _mm512_srli_epi32(word, 8), _mm512_srli_epi32(word, 16),
                               _mm512_ror_epi32(word, 24)};
    __m512 values[4];
    for (int quarter = 0; quarter < 4; ++quarter) {
      values[quarter] = dithered_values(codes, quarter, turned[quarter], _mm512_loadu_si512(mask + 16 * quarter),
                                        _mm512_loadu_ps(unit + 16 * quarter), _mm512_loadu_ps(base + 16 * quarter));
    }
    store_four(values, out, stream);
  }

  static void store_four(const __m512 values[4], float* out, bool stream) {
    for (int i = 0; i < 4; ++i) store64(out + 16 * i, _mm512_castps_si512(values[i]), stream);
  }

  template <class T>
  static void store_four(const __m512 values[4], T* out, bool stream) {
    store64(out, to_words(values[0], values[1], out), stream);
    store64(out + 32, to_words(values[2], values[3], out), stream);
  }

  // base + (code * 65536 + 65535 - noise) * unit of 16 of 64 codes; `turned` has their noise in its lower halves,
  // `mask` selects them, or nothing of the 65535 - noise of elements that are not dithered.
  GACT_ALWAYS_INLINE static __m512 dithered_values(__m512i codes, int quarter, __m512i turned, __m512i mask,
                                                   __m512 unit, __m512 base) {
    const __m512i third_byte =
        _mm512_add_epi8(_mm512_set_epi32(15 << 16, 14 << 16, 13 << 16, 12 << 16, 11 << 16, 10 << 16, 9 << 16, 8 << 16,
                                         7 << 16, 6 << 16, 5 << 16, 4 << 16, 3 << 16, 2 << 16, 1 << 16, 0),
                        _mm512_set1_epi8(static_cast<char>(16 * quarter)));
    const __m512i shifted = _mm512_maskz_permutexvar_epi8(0x4444444444444444ull, third_byte, codes);
    // shifted | (~turned & mask)
    const __m512i scaled = _mm512_ternarylogic_epi32(shifted, turned, mask, 0xF2);
    return _mm512_add_ps(base, _mm512_mul_ps(_mm512_cvtepi32_ps(scaled), unit));
  }

  template <class T>
  GACT_ALWAYS_INLINE static void store_dithered(__m512i codes, const u32 words[16], __m512 unit, __m512 base, T* out,
                                                bool stream) {
    const __m512i word = _mm512_load_si512(words), mask = _mm512_set1_epi32(0xFFFF);
    const __m512i turned[4] = {word, _mm512_srli_epi32(word, 8), _mm512_srli_epi32(word, 16),
                               _mm512_ror_epi32(word, 24)};
    __m512 values[4];
    for (int quarter = 0; quarter < 4; ++quarter) {
      values[quarter] = dithered_values(codes, quarter, turned[quarter], mask, unit, base);
    }
    store_four(values, out, stream);
  }

  // The values of codes 0..15 as floats, or of 0..31 as 16-bit words: widths that they cover are looked up.
  static __m512 table_of(__m512 scale, __m512 offset, float*) { return values_of(counting(), scale, offset); }

  template <class T>
  static __m512i table_of(__m512 scale, __m512 offset, T* out) {
    const __m512i next = _mm512_add_epi32(counting(), _mm512_set1_epi32(16));
    return to_words(values_of(counting(), scale, offset), values_of(next, scale, offset), out);
  }

  static __m512i counting() { return _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0); }

  template <int BITS>
  static void store_values(__m512i codes, __m512 table, __m512 scale, __m512 offset, float* out, bool stream) {
    for (int quarter = 0; quarter < 4; ++quarter) {
      const __m512i sixteen = sixteen_codes(codes, quarter);
      const __m512 values = BITS <= 4 ? _mm512_permutexvar_ps(sixteen, table) : values_of(sixteen, scale, offset);
      store64(out + 16 * quarter, _mm512_castps_si512(values), stream);
    }
  }

  template <int BITS, class T>
  static void store_values(__m512i codes, __m512i table, __m512 scale, __m512 offset, T* out, bool stream) {
    for (int half = 0; half < 2; ++half) {
      __m512i words;
      if (BITS <= 5) {
        const __m256i bytes = half ? _mm512_extracti64x4_epi64(codes, 1) : _mm512_castsi512_si256(codes);
        words = _mm512_permutexvar_epi16(_mm512_cvtepu8_epi16(bytes), table);
      } else {
        words = to_words(values_of(sixteen_codes(codes, 2 * half), scale, offset),
                         values_of(sixteen_codes(codes, 2 * half + 1), scale, offset), out);
      }
      store64(out + 32 * half, words, stream);
    }
  }

  static u64 byte_bits(const u8 bytes[64]) {
    const __m512i value = _mm512_load_si512(bytes);
    return _mm512_test_epi8_mask(value, value);
  }

  static void bit_bytes(u64 bits, u8 bytes[64]) { _mm512_store_si512(bytes, _mm512_maskz_set1_epi8(bits, 1)); }
};

bool supported() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("gfni");
}

}  // namespace

const Kernels* avx512_kernels() {
  static constexpr Kernels kernels = make_kernels<Avx512Isa>();
  return supported() ? &kernels : nullptr;
}

}  // namespace gact

#else

namespace gact {
const Kernels* avx512_kernels() { return nullptr; }
}  // namespace gact

#endif
