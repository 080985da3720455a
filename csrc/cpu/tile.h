// Tiles of a matrix of codes (docs/codec.md): 32 rows of two vectors of columns, quantised and decoded. The vectors of
// a row are beside each other by column, and belong to two sets of 512 elements in memory order where a vector has the
// 16 columns of a set; nothing else here depends on it. Each kernels_*.cpp includes this in a translation unit with its
// own flags; all is in an unnamed namespace, so that the linker never mixes code of two instruction sets.
//
// An Isa has vectors of kLanes 32-bit integers (Words) and floats (Floats), and
//   kPairs                             0, 0, 1, 0, 2, 0 ..: pairs of columns in the lower halves of 64 bits
//   multiply(x, factor), upper(x)      the 64-bit products of those halves; the upper halves as lower ones
//   last_words(product, x, key)        lower halves of 64 bits: upper(product) ^ x ^ key beneath the product's own
//   load(x), store(out, words, stream) a vector of elements of any type, of words
//   store_values<ADJACENT>(first, second, x, y, stream)    two vectors as elements; the second may follow the first
//   set(x)                             on each lane
//   add, both, xored, shifted_left<N>, shifted_right<N>, shifted_right_by     on each lane; both is &, xored has three
//                                      operands
//   without(x, y)                      x & ~y
//   joined(x, y, mask)                 x | (y & mask)
//   chosen(mask, x, y)                 bits of x where the mask has ones, of y elsewhere
//   lower_halves(x, y)                 the lower half of x beneath the lower half of y
//   lower_bytes(x, y)                  of the halves of x beneath those of the halves of y
//   upper_bytes(x, y)                  the same of their upper bytes
//   odd_bytes(x)                       the upper bytes of the halves, as integers
//   rounded(x, offset, inverse)        the bits of fused(x - offset, inverse, kMagic)
//   value(units, unit, base)           fused(float(units), unit, base)
//   edges(fractions), add_edges(x, y), edge_sums(x)    sums of the edge_of of four bytes, in a form that add_edges adds
//                                      and may saturate, and as integers
//   sum(x)                             of all lanes
//   kFlushesSubnormals                 whether store_values makes bfloat16 below the smallest normal number zero
//   range(x, count)                    of elements in a row, a multiple of 64; one of them is NaN if any element is
//   byte_bits, bit_bytes               see masks.h
#pragma once

#include "cpu/groups.h"

namespace gact {
namespace {

#define GACT_INLINE __attribute__((always_inline)) inline

constexpr int kCacheLine = 64;
constexpr int kBlocks = kTileRows / kPhiloxRows;  // of rows with one counter for a pair of columns
constexpr int kQuads = kTileRows / 4;             // of rows whose codes are the bytes of a word of 8-bit fields
constexpr u32 kEvenBytes = 0x00FF00FFu;

// The 16-bit float of an integer of the same order, which for negative ones has the magnitude inverted.
template <class T>
float float_of_key(u16 key) {
  return to_float(T{static_cast<u16>(key & 0x8000u ? key ^ 0x7FFFu : key)});
}

// ---- noise

struct RoundKeys {
  u32 first[kPhiloxRounds], second[kPhiloxRounds];

  explicit RoundKeys(u64 seed) {
    for (int round = 0; round < kPhiloxRounds; ++round) {
      first[round] = first_key(seed, round);
      second[round] = second_key(seed, round);
    }
  }
};

// philox_pair of the pairs of columns of a vector, each in the lower half of 64 bits.
template <class Isa>
struct PairVectors {
  typename Isa::Words second_of_key, first_of_state, high, low;
};

template <class Isa>
PairVectors<Isa> philox_pairs(u32 first_pair, u32 blocks_high, const RoundKeys& keys) {
  using Words = typename Isa::Words;
  const auto with_key = [](Words x, u32 key) { return Isa::xored(x, Isa::set(key), Isa::set(0u)); };
  const Words first = Isa::multiply(Isa::add(Isa::load(Isa::kPairs), Isa::set(first_pair)), kPhiloxM0);
  const Words second = Isa::multiply(with_key(Isa::upper(first), blocks_high ^ keys.second[0]), kPhiloxM1);
  const Words third = Isa::multiply(with_key(Isa::upper(second), keys.first[1]), kPhiloxM0);
  return PairVectors<Isa>{with_key(first, keys.second[1]), with_key(second, keys.first[2]),
                          with_key(Isa::upper(third), keys.second[2]), third};
}

// The noise of a tile: the pairs of its two vectors, which may be in different rows, and the first block of each.
template <class Isa>
struct TileNoise {
  const PairVectors<Isa>* pairs[2];
  u32 first_blocks[2];
  const RoundKeys* keys;
  u64 seed;

  // For the vectors, words whose bytes are the noise of four rows, and of the next four.
  GACT_INLINE void words_of(int block, typename Isa::Words noise[2][2]) const {
    using Words = typename Isa::Words;
    const Words zero = Isa::set(0u);
    Words state[2][4];
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
      const u64 product = philox_block(first_blocks[v] + static_cast<u32>(block), seed);
      const Words word = Isa::xored(Isa::set(high_half(product)), pairs[v]->second_of_key, zero);
      state[v][1] = Isa::multiply(word, kPhiloxM1);
      state[v][0] = Isa::xored(Isa::upper(state[v][1]), pairs[v]->first_of_state, zero);
      state[v][2] = Isa::xored(pairs[v]->high, Isa::set(low_half(product)), zero);
      state[v][3] = pairs[v]->low;
    }
#pragma GCC unroll 10
    for (int round = 3; round < kPhiloxRounds - 1; ++round) {
      const Words first_key = Isa::set(keys->first[round]), second_key = Isa::set(keys->second[round]);
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        const Words product0 = Isa::multiply(state[v][0], kPhiloxM0);
        const Words product1 = Isa::multiply(state[v][2], kPhiloxM1);
        state[v][0] = Isa::xored(Isa::upper(product1), state[v][1], first_key);
        state[v][1] = product1;
        state[v][2] = Isa::xored(Isa::upper(product0), state[v][3], second_key);
        state[v][3] = product0;
      }
    }
    const Words first_key = Isa::set(keys->first[kPhiloxRounds - 1]);
    const Words second_key = Isa::set(keys->second[kPhiloxRounds - 1]);
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
      noise[v][0] = Isa::last_words(Isa::multiply(state[v][2], kPhiloxM1), state[v][1], first_key);
      noise[v][1] = Isa::last_words(Isa::multiply(state[v][0], kPhiloxM0), state[v][3], second_key);
    }
  }
};

// ---- fields

template <class Isa, int SHIFT>
GACT_INLINE typename Isa::Words shifted(typename Isa::Words words) {
  if constexpr (SHIFT > 0) return Isa::template shifted_left<SHIFT>(words);
  if constexpr (SHIFT < 0) return Isa::template shifted_right<-SHIFT>(words);
  return words;
}

// So many bits of each byte, from this one on.
constexpr u32 bits_of_bytes(int count, int first) { return ((1u << count) - 1u) * 0x01010101u << first; }

template <int BITS, int FIELD>
constexpr bool kHasField = (BITS & FIELD) != 0;

// The words of the fields of a block, for each vector; those of 4 bits and less grow from their highest bits down.
template <class Isa>
struct FieldWords {
  typename Isa::Words of_two[2], of_one[2];
};

// Puts the fields of a block, whose codes are the bytes of two words, above those of the blocks before in a word.
template <class Isa, int BITS, int FIELD>
GACT_INLINE typename Isa::Words with_field(typename Isa::Words word, const typename Isa::Words codes[2]) {
  constexpr int kStart = field_start(BITS, FIELD), kFirst = 8 - 2 * FIELD, kSecond = 8 - FIELD;
  const typename Isa::Words first = shifted<Isa, kFirst - kStart>(codes[0]);
  const typename Isa::Words second = shifted<Isa, kSecond - kStart>(codes[1]);
  const u32 first_mask = BITS == FIELD ? ~0u : bits_of_bytes(FIELD, kFirst);
  const u32 second_mask = BITS == FIELD ? ~0u : bits_of_bytes(FIELD, kSecond);
  const typename Isa::Words both = Isa::joined(Isa::both(first, Isa::set(first_mask)), second, Isa::set(second_mask));
  if constexpr (FIELD == 4) return both;
  return Isa::joined(both, shifted<Isa, -2 * FIELD>(word), Isa::set(bits_of_bytes(kFirst, 0)));
}

template <class Isa, int BITS, class Out>
GACT_INLINE void put_codes(const typename Isa::Words codes[2], int block, int vector, FieldWords<Isa>& fields,
                           const Out& out, bool stream) {
  if constexpr (kHasField<BITS, 8>) {
    Isa::store(out.at(vector, 2 * block), codes[0], stream);
    Isa::store(out.at(vector, 2 * block + 1), codes[1], stream);
  }
  if constexpr (kHasField<BITS, 4>) {
    Isa::store(out.at(vector, block), with_field<Isa, BITS, 4>(codes[0], codes), stream);
  }
  if constexpr (kHasField<BITS, 2>) {
    fields.of_two[vector] = with_field<Isa, BITS, 2>(fields.of_two[vector], codes);
    if (block % 2 == 1) Isa::store(out.at(vector, field_start(BITS, 2) + block / 2), fields.of_two[vector], stream);
  }
  if constexpr (kHasField<BITS, 1>) {
    fields.of_one[vector] = with_field<Isa, BITS, 1>(fields.of_one[vector], codes);
    if (block == kBlocks - 1) Isa::store(out.at(vector, field_start(BITS, 1)), fields.of_one[vector], stream);
  }
}

// Adds the lowest fields of a word to the codes of a block.
template <class Isa, int BITS, int FIELD>
GACT_INLINE void add_field(typename Isa::Words word, typename Isa::Words codes[2]) {
  constexpr int kStart = field_start(BITS, FIELD);
  const typename Isa::Words mask = Isa::set(bits_of_bytes(FIELD, kStart));
  codes[0] = Isa::joined(codes[0], shifted<Isa, kStart>(word), mask);
  codes[1] = Isa::joined(codes[1], shifted<Isa, kStart - FIELD>(word), mask);
}

template <class Isa, int BITS, class In>
GACT_INLINE void get_codes(const In& words, int block, int vector, typename Isa::Words codes[2]) {
  codes[0] = codes[1] = Isa::set(0u);
  if constexpr (kHasField<BITS, 8>) {
    codes[0] = Isa::load(words.at(vector, 2 * block));
    codes[1] = Isa::load(words.at(vector, 2 * block + 1));
  }
  if constexpr (kHasField<BITS, 4>) add_field<Isa, BITS, 4>(Isa::load(words.at(vector, block)), codes);
  if constexpr (kHasField<BITS, 2>) {
    const typename Isa::Words word = Isa::load(words.at(vector, field_start(BITS, 2) + block / 2));
    add_field<Isa, BITS, 2>(Isa::shifted_right_by(word, 4 * (block % 2)), codes);
  }
  if constexpr (kHasField<BITS, 1>) {
    const typename Isa::Words word = Isa::load(words.at(vector, field_start(BITS, 1)));
    add_field<Isa, BITS, 1>(Isa::shifted_right_by(word, 2 * block), codes);
  }
}

// ---- quantising

// The codes of four rows of a vector as bytes. Groups has offset(vector, quad) and inverse(vector, quad), and takes
// add_edges(vector, quad, edges). Ahead prefetches kElements that are quantised later, a line or two: more at once fill
// the buffers of what is on its way to the cache, and all else waits.
template <class Isa, class T, class Groups, class In, class Ahead>
GACT_INLINE typename Isa::Words quantise_quad(const In& x, int vector, int quad, Groups& groups,
                                              typename Isa::Words noise, Ahead& ahead) {
  using Words = typename Isa::Words;
  Words sums[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    sums[i] =
        Isa::rounded(Isa::load(x.at(vector, 4 * quad + i)), groups.offset(vector, quad), groups.inverse(vector, quad));
    if ((4 * vector + i + 1) * Isa::kLanes % Ahead::kElements == 0) ahead.advance();
  }
  // Two rows in the halves of a lane: their sums with the noise have 16 bits.
  const Words even = Isa::lower_halves(sums[0], sums[2]), odd = Isa::lower_halves(sums[1], sums[3]);
  groups.add_edges(vector, quad, Isa::edges(Isa::lower_bytes(even, odd)));
  const Words even_sums = Isa::add(even, Isa::both(noise, Isa::set(kEvenBytes)));
  const Words odd_sums = Isa::add(odd, Isa::odd_bytes(noise));
  return Isa::upper_bytes(even_sums, odd_sums);
}

template <class Isa, class T, int BITS, class Groups, class In, class Out, class Ahead>
__attribute__((noinline)) void quantise_tile(const In x, Groups& stored_groups, const TileNoise<Isa>& noise,
                                             const Out out, bool stream, Ahead ahead) {
  Groups groups = stored_groups;  // in registers
  FieldWords<Isa> fields = {};
  for (int block = 0; block < kBlocks; ++block) {
    typename Isa::Words random[2][2];
    noise.words_of(block, random);
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
      const typename Isa::Words codes[2] = {quantise_quad<Isa, T>(x, v, 2 * block, groups, random[v][0], ahead),
                                            quantise_quad<Isa, T>(x, v, 2 * block + 1, groups, random[v][1], ahead)};
      put_codes<Isa, BITS>(codes, block, v, fields, out, stream);
    }
  }
  stored_groups = groups;
}

// ---- decoding

// Four rows of both vectors. Groups has unit(vector, quad), base(vector, quad) and mask(vector, quad), the noise that
// is subtracted.
template <class Isa, class Groups, class Out>
GACT_INLINE void decode_quad(const typename Isa::Words codes[2], int quad, const Groups& groups,
                             const typename Isa::Words noise[2], const Out& out, bool stream) {
  using Words = typename Isa::Words;
  const Words even_bytes = Isa::set(kEvenBytes), lower_half = Isa::set(0xFFFFu);
  typename Isa::Floats values[2][4];
#pragma GCC unroll 2
  for (int v = 0; v < 2; ++v) {
    const Words subtracted = Isa::without(groups.mask(v, quad), noise[v]);
    const Words even = Isa::chosen(even_bytes, subtracted, Isa::template shifted_left<8>(codes[v]));
    const Words odd = Isa::chosen(even_bytes, Isa::template shifted_right<8>(subtracted), codes[v]);
    const Words units[4] = {Isa::both(even, lower_half), Isa::both(odd, lower_half),
                            Isa::template shifted_right<16>(even), Isa::template shifted_right<16>(odd)};
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) values[v][i] = Isa::value(units[i], groups.unit(v, quad), groups.base(v, quad));
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    Isa::template store_values<Groups::kAdjacent>(out.at(0, 4 * quad + i), out.at(1, 4 * quad + i), values[0][i],
                                                  values[1][i], stream);
  }
}

// A block of a tile, without noise where none of the groups subtracts it.
template <class Isa, int BITS, class Groups, class In, class Out>
GACT_INLINE void decode_block(const In& words, const Groups& groups, const TileNoise<Isa>* noise, const Out& out,
                              bool stream, int block) {
  typename Isa::Words random[2][2] = {}, codes[2][2];
  if (noise != nullptr) noise->words_of(block, random);
  get_codes<Isa, BITS>(words, block, 0, codes[0]);
  get_codes<Isa, BITS>(words, block, 1, codes[1]);
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    const typename Isa::Words of_half[2] = {codes[0][half], codes[1][half]};
    const typename Isa::Words of_quad[2] = {random[0][half], random[1][half]};
    decode_quad<Isa>(of_half, 2 * block + half, groups, of_quad, out, stream);
  }
}

template <class Isa, int BITS, class Groups, class In, class Out>
__attribute__((noinline)) void decode_tile(const In words, const Groups& stored_groups, const TileNoise<Isa>* noise,
                                           const Out out, bool stream) {
  const Groups groups = stored_groups;  // in registers
  for (int block = 0; block < kBlocks; ++block) decode_block<Isa, BITS>(words, groups, noise, out, stream, block);
}

}  // namespace
}  // namespace gact
