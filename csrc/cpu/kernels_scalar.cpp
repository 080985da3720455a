// Portable kernels: vectors of eight lanes, one lane at a time.
#include "cpu/dispatch.h"

namespace gact {
namespace {

typedef u32 EightWords __attribute__((vector_size(32)));
typedef u64 FourProducts __attribute__((vector_size(32)));
typedef float EightFloats __attribute__((vector_size(32)));

// What goes lane by lane is not inlined, as compilers take minutes over it.
#define GACT_LANES __attribute__((noinline)) static

// Vectors that the compiler takes apart for the processor at hand; what is no operator of theirs goes lane by lane.
struct ScalarIsa {
  using Words = EightWords;
  using Floats = EightFloats;
  static constexpr int kLanes = 8;
  static constexpr u32 kPairs[kLanes] = {0, 0, 1, 0, 2, 0, 3, 0};
  static constexpr bool kFlushesSubnormals = false;

  static Words set(u32 value) { return Words{} + value; }
  static Floats set(float value) { return Floats{} + value; }

  static Words load(const u32* x) {
    Words words;
    std::memcpy(&words, x, sizeof(words));
    return words;
  }
  template <class T>
  GACT_LANES Floats load(const T* x) {
    Floats values;
    for (int i = 0; i < kLanes; ++i) values[i] = to_float(x[i]);
    return values;
  }
  static void store(u32* out, Words words, bool) { std::memcpy(out, &words, sizeof(words)); }
  template <bool, class T>
  GACT_LANES void store_values(T* first, T* second, Floats x, Floats y, bool) {
    for (int i = 0; i < kLanes; ++i) from_float(x[i], first + i);
    for (int i = 0; i < kLanes; ++i) from_float(y[i], second + i);
  }

  static Words add(Words x, Words y) { return x + y; }
  static Words both(Words x, Words y) { return x & y; }
  static Words without(Words x, Words y) { return x & ~y; }
  static Words xored(Words x, Words y, Words z) { return x ^ y ^ z; }
  static Words joined(Words x, Words y, Words mask) { return x | (y & mask); }
  static Words chosen(Words mask, Words x, Words y) { return (x & mask) | (y & ~mask); }
  static Words lower_halves(Words x, Words y) { return (x & 0xFFFFu) | (y << 16); }
  static Words lower_bytes(Words x, Words y) { return (x & kEvenBytes) | ((y & kEvenBytes) << 8); }
  static Words upper_bytes(Words x, Words y) { return odd_bytes(x) | (y & ~kEvenBytes); }
  static Words odd_bytes(Words x) { return (x >> 8) & kEvenBytes; }
  static Words shifted_right_by(Words x, int count) { return x >> static_cast<u32>(count); }
  template <int N>
  static Words shifted_left(Words x) {
    return x << N;
  }
  template <int N>
  static Words shifted_right(Words x) {
    return x >> N;
  }
  static Words multiply(Words x, u32 factor) {
    const FourProducts lower = reinterpret_cast<FourProducts>(x) & 0xFFFFFFFFu;
    return reinterpret_cast<Words>(lower * factor);
  }
  static Words upper(Words x) { return reinterpret_cast<Words>(reinterpret_cast<FourProducts>(x) >> 32); }
  static Words last_words(Words product, Words x, Words key) {
    const Words lower = upper(product) ^ x ^ key;
    return Words{lower[0], product[0], lower[2], product[2], lower[4], product[4], lower[6], product[6]};
  }

  GACT_LANES Words rounded(Floats x, Floats offset, Floats inverse) {
    Words words;
    for (int i = 0; i < kLanes; ++i) words[i] = bits_of(fused(x[i] - offset[i], inverse[i], kMagic));
    return words;
  }
  GACT_LANES Floats value(Words units, Floats unit, Floats base) {
    Floats values;
    for (int i = 0; i < kLanes; ++i) values[i] = static_cast<float>(static_cast<i32>(units[i]));
    return values * unit + base;
  }

  GACT_LANES Words edges(Words fractions) {
    Words sums = {};
    for (int byte = 0; byte < 4; ++byte) {
      const Words from_half = ((fractions >> (8 * byte)) & 0xFFu) - 128u;
      const Words negative = 0u - (from_half >> 31);
      sums += (from_half ^ negative) - negative;
    }
    return sums;
  }
  static Words add_edges(Words x, Words y) { return x + y; }
  static Words edge_sums(Words x) { return x; }
  static u32 sum(Words x) {
    u32 total = 0;
    for (int i = 0; i < kLanes; ++i) total += x[i];
    return total;
  }

  template <class T>
  static Range range(const T* x, int count) {
    Range range{to_float(x[0]), to_float(x[0])};
    bool has_nan = false;
    for (int i = 0; i < count; ++i) {
      const float value = to_float(x[i]);
      range.low = value < range.low ? value : range.low;
      range.high = value > range.high ? value : range.high;
      has_nan |= is_nan(value);
    }
    if (has_nan) range.low = float_of(kNanBits);
    return range;
  }

  // Bit i: whether the running sum of 32 shares and a start passes a multiple of 2^24 at share i.
  static u32 passes(const i32 shares[32], u32 start) {
    u32 bits = 0, sum = start, before = 0;
    for (int i = 0; i < 32; ++i) {
      sum += static_cast<u32>(shares[i]);
      bits |= static_cast<u32>(sum >> 24 != before) << i;
      before = sum >> 24;
    }
    return bits;
  }

  static u64 byte_bits(const u8 bytes[64]) {
    u64 bits = 0;
    for (int i = 0; i < 64; ++i) bits |= static_cast<u64>(bytes[i]) << i;
    return bits;
  }

  static void bit_bytes(u64 bits, u8 bytes[64]) {
    for (int i = 0; i < 64; ++i) bytes[i] = static_cast<u8>((bits >> i) & 1u);
  }
};

}  // namespace

const Kernels* scalar_kernels() {
  static constexpr Kernels kernels = make_kernels<ScalarIsa>();
  return &kernels;
}

}  // namespace gact
