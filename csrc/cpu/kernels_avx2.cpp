// AVX2 and F16C kernels. The same bits as kernels_scalar.cpp.
#include "cpu/dispatch.h"

#if defined(__AVX2__) && defined(__F16C__)

namespace gact {
namespace {

inline __m256 load8(const float* x) { return _mm256_loadu_ps(x); }

inline __m256 load8(const Half* x) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))); }

inline __m256 load8(const Bfloat* x) {
  const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

inline void store32(void* out, __m256i value, bool stream) {
  if (stream) {
    _mm256_stream_si256(static_cast<__m256i*>(out), value);
  } else {
    _mm256_storeu_si256(static_cast<__m256i*>(out), value);
  }
}

// One Philox round on 4 counters, one in the low half of each 64-bit lane; the upper halves are undefined.
inline void philox_round(__m256i state[4], __m256i key0, __m256i key1) {
  const __m256i product0 = _mm256_mul_epu32(state[0], _mm256_set1_epi64x(kPhiloxM0));
  const __m256i product1 = _mm256_mul_epu32(state[2], _mm256_set1_epi64x(kPhiloxM1));
  state[0] = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(product1, 32), state[1]), key0);
  state[1] = product1;
  state[2] = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(product0, 32), state[3]), key1);
  state[3] = product0;
}

// Bytes of 32 codes from their bit planes, 4 bytes of each.
template <int BITS>
inline __m256i codes_of(const u8* planes, int stride) {
  const __m256i spread =
      _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
  const __m256i select = _mm256_set1_epi64x(static_cast<i64>(0x8040201008040201ull));
  __m256i codes = _mm256_setzero_si256();
  for (int plane = 0; plane < BITS; ++plane) {
    i32 bits;
    std::memcpy(&bits, planes + plane * stride, sizeof(bits));
    const __m256i chosen = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(bits), spread), select);
    const __m256i weight = _mm256_set1_epi8(static_cast<char>(1 << plane));
    codes = _mm256_or_si256(codes, _mm256_and_si256(_mm256_cmpeq_epi8(chosen, select), weight));
  }
  return codes;
}

// Codes 8 * part .. 8 * part + 7 of 32.
inline __m256i eight_codes(__m256i codes, int part) {
  __m128i bytes = part < 2 ? _mm256_castsi256_si128(codes) : _mm256_extracti128_si256(codes, 1);
  if (part & 1) bytes = _mm_srli_si128(bytes, 8);
  return _mm256_cvtepu8_epi32(bytes);
}

inline __m256i rounded_to_bfloat(__m256 values) {
  const __m256i bits = _mm256_castps_si256(values);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  return _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd), 16);
}

inline __m256i to_words(__m256 low, __m256 high, Bfloat*) {
  const __m256i packed = _mm256_packus_epi32(rounded_to_bfloat(low), rounded_to_bfloat(high));
  return _mm256_permute4x64_epi64(packed, _MM_SHUFFLE(3, 1, 2, 0));
}

inline __m256i to_words(__m256 low, __m256 high, Half*) {
  return _mm256_set_m128i(_mm256_cvtps_ph(high, _MM_FROUND_TO_NEAREST_INT),
                          _mm256_cvtps_ph(low, _MM_FROUND_TO_NEAREST_INT));
}

inline float smallest(__m256 values) {
  float lanes[8];
  _mm256_storeu_ps(lanes, values);
  float result = lanes[0];
  for (int i = 1; i < 8; ++i) result = lanes[i] < result ? lanes[i] : result;
  return result;
}

// What quantising needs of the groups of 32 elements: the same for all, or by column.
struct OneGroup {
  __m256 offset, inverse;

  __m256 offset_of(int) const { return offset; }
  __m256 inverse_of(int) const { return inverse; }
};

struct ByColumn {
  const float* offsets;
  const float* inverses;

  __m256 offset_of(int vector) const { return _mm256_loadu_ps(offsets + 8 * vector); }
  __m256 inverse_of(int vector) const { return _mm256_loadu_ps(inverses + 8 * vector); }
};

struct Avx2Isa {
  template <class T>
  static Range range(const T* x, int count) {
    __m256 lows = load8(x), highs = lows, unordered = _mm256_setzero_ps();
    for (int i = 0; i < count; i += 16) {
      const __m256 a = load8(x + i), b = load8(x + i + 8);
      lows = _mm256_min_ps(lows, _mm256_min_ps(a, b));
      highs = _mm256_max_ps(highs, _mm256_max_ps(a, b));
      unordered = _mm256_or_ps(unordered, _mm256_cmp_ps(a, b, _CMP_UNORD_Q));
    }
    const float high = -smallest(_mm256_sub_ps(_mm256_setzero_ps(), highs));
    return {_mm256_movemask_ps(unordered) ? float_of(kNanBits) : smallest(lows), high};
  }

  static void philox(u64 block, const RoundKeys& keys, u32 words[16][16]) {
    const u64 counter = block * 16u;
    for (int part = 0; part < 8; ++part) {
      const __m256i first = _mm256_set1_epi64x(static_cast<i64>((counter & 0xFFFFFFFFu) + 8 * part));
      const __m256i high = _mm256_set1_epi64x(static_cast<i64>(counter >> 32)), zero = _mm256_setzero_si256();
      __m256i even[4] = {_mm256_add_epi64(first, _mm256_set_epi64x(6, 4, 2, 0)), high, zero, zero};
      __m256i odd[4] = {_mm256_add_epi64(first, _mm256_set_epi64x(7, 5, 3, 1)), high, zero, zero};
      for (int round = 0; round < 10; ++round) {
        const __m256i key0 = _mm256_set1_epi32(static_cast<i32>(keys.first[round]));
        const __m256i key1 = _mm256_set1_epi32(static_cast<i32>(keys.second[round]));
        philox_round(even, key0, key1);
        philox_round(odd, key0, key1);
      }
      for (int word = 0; word < 4; ++word) {
        const __m256i mixed = _mm256_blend_epi32(even[word], _mm256_slli_epi64(odd[word], 32), 0xAA);
        _mm256_store_si256(reinterpret_cast<__m256i*>(words[part / 2 * 4 + word] + 8 * (part % 2)), mixed);
      }
    }
  }

  template <class T, int BITS>
  static u32 quantise(const T* x, int group_size, float low, float inverse, const u32 (*noise)[16], u8* planes) {
    const int stride = group_size / 8;
    const OneGroup group{_mm256_set1_ps(low), _mm256_set1_ps(inverse)};
    __m256i edges = _mm256_setzero_si256();
    for (int part = 0; part < group_size / 32; ++part) {
      __m256i fractions;
      const __m256i codes = codes_of_values<BITS>(x + 32 * part, group, noise[part / 2], 16 * (part % 2), &fractions);
      edges = _mm256_add_epi64(edges, _mm256_sad_epu8(fractions, _mm256_set1_epi8(-128)));
      store_masks<BITS>(codes, planes + 4 * part, stride);
    }
    alignas(32) u64 lanes[4];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), edges);
    return static_cast<u32>(lanes[0] + lanes[1] + lanes[2] + lanes[3]);
  }

  template <class T, int BITS>
  static void quantise_columns(const T* x, const float* offset, const float* inverse, const u32 words[16], u16* edges,
                               u8* planes, int stride) {
    for (int part = 0; part < 2; ++part) {
      __m256i fractions;
      const ByColumn groups{offset + 32 * part, inverse + 32 * part};
      const __m256i codes = codes_of_values<BITS>(x + 32 * part, groups, words, 16 * part, &fractions);
      store_masks<BITS>(codes, planes + 4 * part, stride);
      const __m256i distances = _mm256_abs_epi8(_mm256_xor_si256(in_order(fractions), _mm256_set1_epi8(-128)));
      for (int half = 0; half < 2; ++half) {
        const __m128i bytes = half ? _mm256_extracti128_si256(distances, 1) : _mm256_castsi256_si128(distances);
        __m256i* sums = reinterpret_cast<__m256i*>(edges + 32 * part + 16 * half);
        _mm256_storeu_si256(sums, _mm256_adds_epu16(_mm256_loadu_si256(sums), _mm256_cvtepu8_epi16(bytes)));
      }
    }
  }

  // 32 codes in order to 4 bytes in each plane.
  template <int BITS>
  static void store_masks(__m256i codes, u8* planes, int stride) {
    for (int plane = 0; plane < BITS; ++plane) {
      const i32 mask = _mm256_movemask_epi8(_mm256_slli_epi16(codes, 7 - plane));
      std::memcpy(planes + plane * stride, &mask, sizeof(mask));
    }
  }

  // The bytes of four vectors of eight 32-bit numbers after they were packed in two halves.
  static __m256i in_order(__m256i bytes) {
    return _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  }

  // The 16 bits of noise of elements 8 * vector .. 8 * vector + 7 of 32, in the lower halves of the lanes: the words
  // begin at bit `shift` for the first 16 elements, a byte later for the others. The upper halves are undefined.
  static __m256i turned(const u32 words[16], int vector, int shift) {
    const __m256i word = _mm256_load_si256(reinterpret_cast<const __m256i*>(words + 8 * (vector & 1)));
    const int bits = shift + 8 * (vector / 2);
    return _mm256_or_si256(_mm256_srli_epi32(word, bits), _mm256_slli_epi32(word, 32 - bits));
  }

  // The codes of 32 elements as bytes in order; `fractions` receives, in another order, the eight highest bits of what
  // is rounded.
  template <int BITS, class T, class Groups>
  static __m256i codes_of_values(const T* x, const Groups& groups, const u32 words[16], int shift, __m256i* fractions) {
    const __m256i limit = _mm256_set1_epi32(((1 << BITS) - 1) << 16), mask = _mm256_set1_epi32(0xFFFF);
    __m256i codes[4], highest_bits[4];
    for (int vector = 0; vector < 4; ++vector) {
      const __m256 distance = _mm256_sub_ps(load8(x + 8 * vector), groups.offset_of(vector));
      __m256i steps = _mm256_cvtps_epi32(_mm256_mul_ps(distance, groups.inverse_of(vector)));
      if (needs_clamp(BITS)) steps = _mm256_min_epi32(steps, limit);
      const __m256i noise = _mm256_and_si256(turned(words, vector, shift), mask);
      codes[vector] = _mm256_srli_epi32(_mm256_add_epi32(steps, noise), 16);
      highest_bits[vector] = _mm256_and_si256(_mm256_srli_epi32(steps, 8), _mm256_set1_epi32(0xFF));
    }
    *fractions = _mm256_packus_epi16(_mm256_packus_epi32(highest_bits[0], highest_bits[1]),
                                     _mm256_packus_epi32(highest_bits[2], highest_bits[3]));
    const __m256i packed =
        _mm256_packus_epi16(_mm256_packus_epi32(codes[0], codes[1]), _mm256_packus_epi32(codes[2], codes[3]));
    return in_order(packed);
  }

  template <class T, int BITS>
  static void decode_dithered(const u8* planes, int group_size, float unit, float base, const u32 (*noise)[16], T* out,
                              bool stream) {
    const __m256 units = _mm256_set1_ps(unit), bases = _mm256_set1_ps(base);
    for (int part = 0; part < group_size / 32; ++part) {
      const __m256i codes = codes_of<BITS>(planes + 4 * part, group_size / 8);
      __m256 values[4];
      for (int vector = 0; vector < 4; ++vector) {
        const __m256i code = _mm256_slli_epi32(eight_codes(codes, vector), 16);
        const __m256i noise_of_eight = turned(noise[part / 2], vector, 16 * (part % 2));
        const __m256i scaled = _mm256_or_si256(code, _mm256_andnot_si256(noise_of_eight, _mm256_set1_epi32(0xFFFF)));
        values[vector] = _mm256_add_ps(bases, _mm256_mul_ps(_mm256_cvtepi32_ps(scaled), units));
      }
      store_four(values, out + 32 * part, stream);
    }
  }

  template <class T, int BITS>
  static void decode_columns(const u8* planes, int stride, const float* unit, const float* base, const u32* mask,
                             const u32 words[16], T* out, bool stream) {
    for (int part = 0; part < 2; ++part) {
      const __m256i codes = codes_of<BITS>(planes + 4 * part, stride);
      __m256 values[4];
      for (int vector = 0; vector < 4; ++vector) {
        const int i = 32 * part + 8 * vector;
        const __m256i code = _mm256_slli_epi32(eight_codes(codes, vector), 16);
        const __m256i masks = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(mask + i));
        const __m256i scaled = _mm256_or_si256(code, _mm256_andnot_si256(turned(words, vector, 16 * part), masks));
        const __m256 distance = _mm256_mul_ps(_mm256_cvtepi32_ps(scaled), _mm256_loadu_ps(unit + i));
        values[vector] = _mm256_add_ps(_mm256_loadu_ps(base + i), distance);
      }
      store_four(values, out + 32 * part, stream);
    }
  }

  static void store_four(const __m256 values[4], float* out, bool stream) {
    for (int vector = 0; vector < 4; ++vector) store32(out + 8 * vector, _mm256_castps_si256(values[vector]), stream);
  }

  template <class T>
  static void store_four(const __m256 values[4], T* out, bool stream) {
    store32(out, to_words(values[0], values[1], out), stream);
    store32(out + 16, to_words(values[2], values[3], out), stream);
  }

  template <class T, int BITS>
  static void decode(const u8* planes, int group_size, float scale, float offset, T* out, bool stream) {
    const __m256 scales = _mm256_set1_ps(scale), offsets = _mm256_set1_ps(offset);
    for (int i = 0; i < group_size; i += 32) {
      const __m256i codes = codes_of<BITS>(planes + i / 8, group_size / 8);
      __m256 values[4];
      for (int vector = 0; vector < 4; ++vector) {
        const __m256 numbers = _mm256_cvtepi32_ps(eight_codes(codes, vector));
        values[vector] = _mm256_add_ps(offsets, _mm256_mul_ps(numbers, scales));
      }
      store_four(values, out + i, stream);
    }
  }

  static u64 byte_bits(const u8 bytes[64]) {
    u64 bits = 0;
    for (int half = 0; half < 2; ++half) {
      const __m256i value = _mm256_load_si256(reinterpret_cast<const __m256i*>(bytes + 32 * half));
      bits |= static_cast<u64>(static_cast<u32>(_mm256_movemask_epi8(_mm256_slli_epi16(value, 7)))) << (32 * half);
    }
    return bits;
  }

  static void bit_bytes(u64 bits, u8 bytes[64]) {
    for (int half = 0; half < 2; ++half) {
      const u32 part = static_cast<u32>(bits >> (32 * half));
      u8 little_endian[4];
      std::memcpy(little_endian, &part, sizeof(part));
      _mm256_store_si256(reinterpret_cast<__m256i*>(bytes + 32 * half), codes_of<1>(little_endian, 0));
    }
  }
};

bool supported() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c"); }

}  // namespace

const Kernels* avx2_kernels() {
  static constexpr Kernels kernels = make_kernels<Avx2Isa>();
  return supported() ? &kernels : nullptr;
}

}  // namespace gact

#else

namespace gact {
const Kernels* avx2_kernels() { return nullptr; }
}  // namespace gact

#endif
