// AVX2, FMA and F16C kernels. The same bits as kernels_scalar.cpp.
#include "cpu/dispatch.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

namespace gact {
namespace {

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

inline void store32(void* out, __m256i value, bool stream) {
  if (stream) {
    _mm256_stream_si256(static_cast<__m256i*>(out), value);
  } else {
    _mm256_storeu_si256(static_cast<__m256i*>(out), value);
  }
}

struct Avx2Isa {
  using Words = __m256i;
  using Floats = __m256;
  static constexpr int kLanes = 8;
  alignas(32) static constexpr u32 kPairs[kLanes] = {0, 0, 1, 0, 2, 0, 3, 0};
  static constexpr bool kFlushesSubnormals = false;

  static Words set(u32 value) { return _mm256_set1_epi32(static_cast<i32>(value)); }
  static Floats set(float value) { return _mm256_set1_ps(value); }

  static Words load(const u32* x) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)); }
  static Floats load(const float* x) { return _mm256_loadu_ps(x); }
  static Floats load(const Half* x) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))); }
  static Floats load(const Bfloat* x) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
  }

  static void store(u32* out, Words words, bool stream) { store32(out, words, stream); }

  template <bool>
  static void store_values(float* first, float* second, Floats x, Floats y, bool stream) {
    store32(first, _mm256_castps_si256(x), stream);
    store32(second, _mm256_castps_si256(y), stream);
  }

  template <bool, class T>
  static void store_values(T* first, T*, Floats x, Floats y, bool stream) {
    store32(first, to_words(x, y, first), stream);
  }

  static Words add(Words x, Words y) { return _mm256_add_epi32(x, y); }
  static Words both(Words x, Words y) { return _mm256_and_si256(x, y); }
  static Words without(Words x, Words y) { return _mm256_andnot_si256(y, x); }
  static Words xored(Words x, Words y, Words z) { return _mm256_xor_si256(_mm256_xor_si256(x, y), z); }
  static Words joined(Words x, Words y, Words mask) { return _mm256_or_si256(x, _mm256_and_si256(y, mask)); }
  static Words chosen(Words mask, Words x, Words y) { return _mm256_blendv_epi8(y, x, mask); }
  static Words lower_halves(Words x, Words y) { return _mm256_blend_epi16(x, _mm256_slli_epi32(y, 16), 0xAA); }
  static Words lower_bytes(Words x, Words y) { return chosen(set(kEvenBytes), x, _mm256_slli_epi32(y, 8)); }
  static Words upper_bytes(Words x, Words y) { return chosen(set(kEvenBytes), _mm256_srli_epi32(x, 8), y); }
  static Words odd_bytes(Words x) { return _mm256_srli_epi16(x, 8); }
  static Words shifted_right_by(Words x, int count) { return _mm256_srl_epi32(x, _mm_cvtsi32_si128(count)); }
  template <int N>
  static Words shifted_left(Words x) {
    return _mm256_slli_epi32(x, N);
  }
  template <int N>
  static Words shifted_right(Words x) {
    return _mm256_srli_epi32(x, N);
  }

  static Words multiply(Words x, u32 factor) { return _mm256_mul_epu32(x, _mm256_set1_epi64x(factor)); }
  static Words upper(Words x) { return _mm256_srli_epi64(x, 32); }
  static Words last_words(Words product, Words x, Words key) {
    return _mm256_blend_epi32(xored(upper(product), x, key), _mm256_slli_epi64(product, 32), 0xAA);
  }

  // The difference the other way round, which reads x from memory by itself.
  static Words rounded(Floats x, Floats offset, Floats inverse) {
    return _mm256_castps_si256(_mm256_fnmadd_ps(_mm256_sub_ps(offset, x), inverse, _mm256_set1_ps(kMagic)));
  }

  static Floats value(Words units, Floats unit, Floats base) {
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(units), unit, base);
  }

  // Two sums in the halves of each lane.
  static Words edges(Words fractions) {
    const __m256i distances = _mm256_abs_epi8(_mm256_xor_si256(fractions, _mm256_set1_epi8(-128)));
    return _mm256_maddubs_epi16(distances, _mm256_set1_epi8(1));
  }
  static Words add_edges(Words x, Words y) { return _mm256_add_epi16(x, y); }
  static Words edge_sums(Words x) { return _mm256_add_epi32(both(x, set(0xFFFFu)), _mm256_srli_epi32(x, 16)); }
  static u32 sum(Words x) {
    const __m128i half = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    const __m128i quarter = _mm_add_epi32(half, _mm_unpackhi_epi64(half, half));
    return static_cast<u32>(_mm_cvtsi128_si32(quarter) + _mm_extract_epi32(quarter, 1));
  }

  static Range range(const float* x, int count) {
    __m256 lows = load(x), highs = lows, unordered = _mm256_setzero_ps();
    for (int i = 0; i < count; i += 16) {
      const __m256 a = load(x + i), b = load(x + i + 8);
      lows = _mm256_min_ps(lows, _mm256_min_ps(a, b));
      highs = _mm256_max_ps(highs, _mm256_max_ps(a, b));
      unordered = _mm256_or_ps(unordered, _mm256_cmp_ps(a, b, _CMP_UNORD_Q));
    }
    // The lowest beside the negated highest.
    const __m256 ends = _mm256_sub_ps(_mm256_setzero_ps(), highs);
    const __m256 four =
        _mm256_min_ps(_mm256_permute2f128_ps(lows, ends, 0x20), _mm256_permute2f128_ps(lows, ends, 0x31));
    const __m256 two = _mm256_min_ps(four, _mm256_permute_ps(four, _MM_SHUFFLE(1, 0, 3, 2)));
    const __m256 one = _mm256_min_ps(two, _mm256_permute_ps(two, _MM_SHUFFLE(2, 3, 0, 1)));
    const float low = _mm_cvtss_f32(_mm256_castps256_ps128(one));
    const float high = -_mm_cvtss_f32(_mm256_extractf128_ps(one, 1));
    return {_mm256_movemask_ps(unordered) ? float_of(kNanBits) : low, high};
  }

  // 16-bit floats as integers of the same order: negative ones with their magnitude inverted. NaNs are the extremes.
  template <class T>
  static Range range(const T* x, int count) {
    const __m256i magnitude = _mm256_set1_epi16(0x7FFF);
    __m256i low = magnitude, high = _mm256_set1_epi16(-0x8000);
    for (int i = 0; i < count; i += 16) {
      const __m256i value = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i));
      const __m256i key = _mm256_xor_si256(value, _mm256_srli_epi16(_mm256_srai_epi16(value, 15), 1));
      low = _mm256_min_epi16(low, key);
      high = _mm256_max_epi16(high, key);
    }
    const __m256i sign = _mm256_set1_epi16(-0x8000);
    const u16 low_key = smallest_word(_mm256_xor_si256(low, sign)) ^ 0x8000u;
    const u16 high_key = smallest_word(_mm256_xor_si256(high, magnitude)) ^ 0x7FFFu;
    return {float_of_key<T>(low_key), float_of_key<T>(high_key)};
  }

  static u16 smallest_word(__m256i words) {
    const __m128i half = _mm_min_epu16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    return static_cast<u16>(_mm_cvtsi128_si32(_mm_minpos_epu16(half)));
  }

  // Bit i: whether the running sum of 32 shares and a start passes a multiple of 2^24 at share i.
  static u32 passes(const i32 shares[32], u32 start) {
    u32 bits = 0;
    __m256i before = _mm256_setzero_si256(), carried = set(start);
    for (int i = 0; i < 4; ++i) {
      __m256i sum = _mm256_load_si256(reinterpret_cast<const __m256i*>(shares + 8 * i));
      sum = _mm256_add_epi32(sum, _mm256_slli_si256(sum, 4));
      sum = _mm256_add_epi32(sum, _mm256_slli_si256(sum, 8));
      const __m256i lower = _mm256_permute2x128_si256(sum, sum, 0x08);  // in the upper half
      sum = _mm256_add_epi32(_mm256_add_epi32(sum, _mm256_shuffle_epi32(lower, 0xFF)), carried);
      const __m256i passed = _mm256_srli_epi32(sum, 24);
      // Each with the one before it, the first with the last of `before`.
      const __m256i joined = _mm256_permute2x128_si256(before, passed, 0x21);
      const __m256i same = _mm256_cmpeq_epi32(passed, _mm256_alignr_epi8(passed, joined, 12));
      bits |= (static_cast<u32>(_mm256_movemask_ps(_mm256_castsi256_ps(same))) ^ 0xFFu) << (8 * i);
      before = passed;
      carried = _mm256_permutevar8x32_epi32(sum, _mm256_set1_epi32(7));
    }
    return bits;
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
    const __m256i spread = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3,
                                            3, 3, 3, 3, 3, 3, 3);
    const __m256i select = _mm256_set1_epi64x(static_cast<i64>(0x8040201008040201ull));
    for (int half = 0; half < 2; ++half) {
      const __m256i part = set(static_cast<u32>(bits >> (32 * half)));
      const __m256i chosen = _mm256_and_si256(_mm256_shuffle_epi8(part, spread), select);
      const __m256i ones = _mm256_and_si256(_mm256_cmpeq_epi8(chosen, select), _mm256_set1_epi8(1));
      _mm256_store_si256(reinterpret_cast<__m256i*>(bytes + 32 * half), ones);
    }
  }
};

bool supported() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

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
