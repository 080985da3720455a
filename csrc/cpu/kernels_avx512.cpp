// AVX-512 kernels (F, BW, DQ, VL: Skylake-X, Zen 4 and newer). The same bits as kernels_scalar.cpp.
#include "cpu/dispatch.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)

namespace gact {
namespace {

// 16 finite floats, with what is cut off rounded to even.
inline __m512i rounded_to_bfloat(__m512 values) {
  const __m512i bits = _mm512_castps_si512(values), one = _mm512_set1_epi32(1);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), one);
  return _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
}

inline __m512i to_words(__m512 low, __m512 high, Bfloat*) {
  alignas(64) static constexpr u16 kOddWords[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                                    33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
  return _mm512_permutex2var_epi16(rounded_to_bfloat(low), _mm512_load_si512(kOddWords), rounded_to_bfloat(high));
}

inline __m512i to_words(__m512 low, __m512 high, Half*) {
  const __m256i first = _mm512_cvtps_ph(low, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m256i second = _mm512_cvtps_ph(high, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
}

inline void store64(void* out, __m512i value, bool stream) {
  if (stream) {
    _mm512_stream_si512(static_cast<__m512i*>(out), value);
  } else {
    _mm512_storeu_si512(out, value);
  }
}

inline void store32(void* out, __m256i value, bool stream) {
  if (stream) {
    _mm256_stream_si256(static_cast<__m256i*>(out), value);
  } else {
    _mm256_storeu_si256(static_cast<__m256i*>(out), value);
  }
}

struct Avx512Isa {
  using Words = __m512i;
  using Floats = __m512;
  static constexpr int kLanes = 16;
  alignas(64) static constexpr u32 kPairs[kLanes] = {0, 0, 1, 0, 2, 0, 3, 0, 4, 0, 5, 0, 6, 0, 7, 0};
  static constexpr bool kFlushesSubnormals = false;

  static Words set(u32 value) { return _mm512_set1_epi32(static_cast<i32>(value)); }
  static Floats set(float value) { return _mm512_set1_ps(value); }

  static Words load(const u32* x) { return _mm512_loadu_si512(x); }
  static Floats load(const float* x) { return _mm512_loadu_ps(x); }
  static Floats load(const Half* x) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x))); }
  // To the upper halves in one shuffle.
  static Floats load(const Bfloat* x) {
    alignas(64) static constexpr u32 kUpper[kLanes] = {0x00000, 0x10000, 0x20000, 0x30000, 0x40000, 0x50000,
                                                       0x60000, 0x70000, 0x80000, 0x90000, 0xA0000, 0xB0000,
                                                       0xC0000, 0xD0000, 0xE0000, 0xF0000};
    const __m512i twice = _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
    return _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xAAAAAAAA, _mm512_load_si512(kUpper), twice));
  }

  static void store(u32* out, Words words, bool stream) { store64(out, words, stream); }

  template <bool ADJACENT>
  static void store_values(float* first, float* second, Floats x, Floats y, bool stream) {
    store64(first, _mm512_castps_si512(x), stream);
    store64(second, _mm512_castps_si512(y), stream);
  }

  template <bool ADJACENT, class T>
  static void store_values(T* first, T* second, Floats x, Floats y, bool stream) {
    const __m512i words = to_words(x, y, first);
    if constexpr (ADJACENT) return store64(first, words, stream);
    store32(first, _mm512_castsi512_si256(words), stream);
    store32(second, _mm512_extracti64x4_epi64(words, 1), stream);
  }

  static Words add(Words x, Words y) { return _mm512_add_epi32(x, y); }
  static Words both(Words x, Words y) { return _mm512_and_si512(x, y); }
  static Words without(Words x, Words y) { return _mm512_andnot_si512(y, x); }
  static Words xored(Words x, Words y, Words z) { return _mm512_ternarylogic_epi32(x, y, z, 0x96); }
  static Words joined(Words x, Words y, Words mask) { return _mm512_ternarylogic_epi32(x, y, mask, 0xF8); }
  static Words chosen(Words mask, Words x, Words y) { return _mm512_ternarylogic_epi32(mask, x, y, 0xCA); }
  // One shuffle puts bytes where they belong and merges them: a shift and a blend are two instructions, and Intel's
  // processors shift 512 bits on one port only.
  static Words lower_halves(Words x, Words y) {
    const Words raised = _mm512_set4_epi32(0x0D0C0000, 0x09080000, 0x05040000, 0x01000000);
    return _mm512_mask_shuffle_epi8(x, 0xCCCCCCCCCCCCCCCC, y, raised);
  }
  static Words swapped_bytes() { return _mm512_set4_epi32(0x0E0F0C0D, 0x0A0B0809, 0x06070405, 0x02030001); }
  static Words lower_bytes(Words x, Words y) {
    return _mm512_mask_shuffle_epi8(x, 0xAAAAAAAAAAAAAAAA, y, swapped_bytes());
  }
  static Words upper_bytes(Words x, Words y) {
    return _mm512_mask_shuffle_epi8(y, 0x5555555555555555, x, swapped_bytes());
  }
  static Words odd_bytes(Words x) { return _mm512_maskz_shuffle_epi8(0x5555555555555555, x, swapped_bytes()); }
  static Words shifted_right_by(Words x, int count) { return _mm512_srl_epi32(x, _mm_cvtsi32_si128(count)); }
  template <int N>
  static Words shifted_left(Words x) {
    return _mm512_slli_epi32(x, N);
  }
  template <int N>
  static Words shifted_right(Words x) {
    return _mm512_srli_epi32(x, N);
  }

  static Words multiply(Words x, u32 factor) { return _mm512_mul_epu32(x, _mm512_set1_epi64(factor)); }
  static Words upper(Words x) { return _mm512_srli_epi64(x, 32); }
  static Words last_words(Words product, Words x, Words key) {
    return _mm512_mask_ternarylogic_epi32(_mm512_shuffle_epi32(product, _MM_PERM_CDAB), 0x5555, x, key, 0x96);
  }

  // The difference the other way round, which reads x from memory by itself.
  static Words rounded(Floats x, Floats offset, Floats inverse) {
    return _mm512_castps_si512(_mm512_fnmadd_ps(_mm512_sub_ps(offset, x), inverse, _mm512_set1_ps(kMagic)));
  }

  static Floats value(Words units, Floats unit, Floats base) {
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(units), unit, base);
  }

  // In both halves of each lane, saturating.
  static Words edges(Words fractions) { return _mm512_dbsad_epu8(fractions, _mm512_set1_epi8(-128), 0); }
  static Words add_edges(Words x, Words y) { return _mm512_adds_epu16(x, y); }
  static Words edge_sums(Words x) { return _mm512_srli_epi32(x, 16); }
  static u32 sum(Words x) { return static_cast<u32>(_mm512_reduce_add_epi32(x)); }

  static Range range(const float* x, int count) {
    __m512 low0 = load(x), low1 = low0, high0 = low0, high1 = low0;
    __mmask16 unordered = 0;
    for (int i = 0; i < count; i += 32) {
      const __m512 a = load(x + i), b = load(x + i + 16);
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

  // Bit i: whether the running sum of 32 shares and a start passes a multiple of 2^24 at share i.
  static u32 passes(const i32 shares[32], u32 start) {
    const __m512i first = _mm512_add_epi32(running_sum(_mm512_load_si512(shares)), set(start));
    const __m512i last = _mm512_set1_epi32(15), sum = running_sum(_mm512_load_si512(shares + 16));
    const __m512i second = _mm512_add_epi32(sum, _mm512_permutexvar_epi32(last, first));
    const __m512i low = _mm512_srli_epi32(first, 24), high = _mm512_srli_epi32(second, 24);
    const u32 low_bits = _mm512_cmpneq_epi32_mask(low, _mm512_alignr_epi32(low, _mm512_setzero_si512(), 15));
    const u32 high_bits = _mm512_cmpneq_epi32_mask(high, _mm512_alignr_epi32(high, low, 15));
    return low_bits | high_bits << 16;
  }

  static __m512i running_sum(__m512i x) {
    const __m512i zero = _mm512_setzero_si512();
    x = _mm512_add_epi32(x, _mm512_alignr_epi32(x, zero, 15));
    x = _mm512_add_epi32(x, _mm512_alignr_epi32(x, zero, 14));
    x = _mm512_add_epi32(x, _mm512_alignr_epi32(x, zero, 12));
    return _mm512_add_epi32(x, _mm512_alignr_epi32(x, zero, 8));
  }

  static u64 byte_bits(const u8 bytes[64]) {
    const __m512i value = _mm512_load_si512(bytes);
    return _mm512_test_epi8_mask(value, value);
  }

  static void bit_bytes(u64 bits, u8 bytes[64]) { _mm512_store_si512(bytes, _mm512_maskz_set1_epi8(bits, 1)); }
};

bool supported() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

#if defined(__AVX512BF16__)

// With the conversion to bfloat16 of Zen 4, Sapphire Rapids and newer.
struct ConvertingIsa : Avx512Isa {
  static constexpr bool kFlushesSubnormals = true;

  template <bool ADJACENT>
  static void store_values(Bfloat* first, Bfloat* second, Floats x, Floats y, bool stream) {
    if constexpr (ADJACENT) return store64(first, (__m512i)_mm512_cvtne2ps_pbh(y, x), stream);
    store32(first, (__m256i)_mm512_cvtneps_pbh(x), stream);
    store32(second, (__m256i)_mm512_cvtneps_pbh(y), stream);
  }
};

void unpack_converting(const UnpackJob& job, i64 first, i64 last) {
  if (job.element != Element::kBfloat) return unpack_any<Avx512Isa>(job, first, last);
  with_bits(job.bits, [&](auto bits) { unpack_units<ConvertingIsa, Bfloat, decltype(bits)::value>(job, first, last); });
}

void unpack_columns_converting(const UnpackJob& job, i64 first, i64 last) {
  if (job.element != Element::kBfloat) return unpack_columns_any<Avx512Isa>(job, first, last);
  with_bits(job.bits,
            [&](auto bits) { unpack_panels<ConvertingIsa, Bfloat, decltype(bits)::value>(job, first, last); });
}

constexpr Kernels converting_kernels() {
  Kernels kernels = make_kernels<Avx512Isa>();
  kernels.unpack = unpack_converting;
  kernels.unpack_columns = unpack_columns_converting;
  return kernels;
}

const Kernels* best_of_avx512() {
  static constexpr Kernels kernels = make_kernels<Avx512Isa>(), converting = converting_kernels();
  return __builtin_cpu_supports("avx512bf16") ? &converting : &kernels;
}

#else

const Kernels* best_of_avx512() {
  static constexpr Kernels kernels = make_kernels<Avx512Isa>();
  return &kernels;
}

#endif

}  // namespace

const Kernels* avx512_kernels() { return supported() ? best_of_avx512() : nullptr; }

}  // namespace gact

#else

namespace gact {
const Kernels* avx512_kernels() { return nullptr; }
}  // namespace gact

#endif
