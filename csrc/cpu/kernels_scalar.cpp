// Portable kernels: the primitives of memory_order.h written with the scalar functions of group_codec.h.
#include "cpu/dispatch.h"

namespace gact {
namespace {

struct ScalarIsa {
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

  static void philox(u64 block, const RoundKeys& keys, u32 words[16][16]) {
    const u64 seed = keys.first[0] | static_cast<u64>(keys.second[0]) << 32;
    for (u32 lane = 0; lane < 64; ++lane) {
      u32 lane_words[4];
      philox_of_lane(block, lane, seed, lane_words);
      for (int word = 0; word < 4; ++word) words[lane / 16 * 4 + word][lane % 16] = lane_words[word];
    }
  }

  static u32 noise_of(const u32 (*rows)[16], int i) { return noise_of_chunk(rows[i >> 6], i & 63); }

  static u32 noise_of_chunk(const u32 row[16], int i) {
    const u32 word = row[i & 15];
    const u32 words[4] = {word, word, word, word};
    return random16(words, static_cast<u32>(i));
  }

  template <class T, int BITS>
  static u32 quantise(const T* x, int group_size, float low, float inverse, const u32 (*noise)[16], u8* planes) {
    constexpr i32 limit = ((1 << BITS) - 1) << 16;
    const int stride = group_size / 8;
    u32 edges = 0;
    for (int byte = 0; byte < stride; ++byte) {
      u32 bits[BITS] = {};
      for (int i = 8 * byte; i < 8 * byte + 8; ++i) {
        const i32 scaled = scaled_value(to_float(x[i]), low, inverse, limit);
        edges += edge_of(scaled);
        const u32 code = (static_cast<u32>(scaled) + noise_of(noise, i)) >> 16;
        for (int plane = 0; plane < BITS; ++plane) bits[plane] |= ((code >> plane) & 1u) << (i & 7);
      }
      for (int plane = 0; plane < BITS; ++plane) planes[plane * stride + byte] = static_cast<u8>(bits[plane]);
    }
    return edges;
  }

  template <int BITS>
  static u32 code_at(const u8* planes, int stride, int i) {
    u32 code = 0;
    for (int plane = 0; plane < BITS; ++plane) {
      code |= static_cast<u32>((planes[plane * stride + i / 8] >> (i % 8)) & 1) << plane;
    }
    return code;
  }

  template <class T, int BITS>
  static void decode(const u8* planes, int group_size, float scale, float offset, T* out, bool) {
    for (int i = 0; i < group_size; ++i) {
      from_float(offset + static_cast<float>(code_at<BITS>(planes, group_size / 8, i)) * scale, out + i);
    }
  }

  template <class T, int BITS>
  static void decode_dithered(const u8* planes, int group_size, float unit, float base, const u32 (*noise)[16], T* out,
                              bool) {
    for (int i = 0; i < group_size; ++i) {
      const u32 units = (code_at<BITS>(planes, group_size / 8, i) << 16) | (65535u - noise_of(noise, i));
      from_float(base + static_cast<float>(units) * unit, out + i);
    }
  }

  template <class T, int BITS>
  static void quantise_columns(const T* x, const float* offset, const float* inverse, const u32 words[16], u16* edges,
                               u8* planes, int stride) {
    constexpr i32 limit = ((1 << BITS) - 1) << 16;
    for (int byte = 0; byte < kChunk / 8; ++byte) {
      u32 bits[BITS] = {};
      for (int i = 8 * byte; i < 8 * byte + 8; ++i) {
        const i32 scaled = scaled_value(to_float(x[i]), offset[i], inverse[i], limit);
        const u32 sum = edges[i] + edge_of(scaled);
        edges[i] = static_cast<u16>(sum < 0xFFFFu ? sum : 0xFFFFu);
        const u32 code = (static_cast<u32>(scaled) + noise_of_chunk(words, i)) >> 16;
        for (int plane = 0; plane < BITS; ++plane) bits[plane] |= ((code >> plane) & 1u) << (i & 7);
      }
      for (int plane = 0; plane < BITS; ++plane) planes[plane * stride + byte] = static_cast<u8>(bits[plane]);
    }
  }

  template <class T, int BITS>
  static void decode_columns(const u8* planes, int stride, const float* unit, const float* base, const u32* mask,
                             const u32 words[16], T* out, bool) {
    for (int i = 0; i < kChunk; ++i) {
      const u32 units = (code_at<BITS>(planes, stride, i) << 16) | ((65535u - noise_of_chunk(words, i)) & mask[i]);
      from_float(base[i] + static_cast<float>(units) * unit[i], out + i);
    }
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
