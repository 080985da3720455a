// Tiles of a matrix of codes (docs/codec.md): 32 rows of two vectors of columns, quantised and decoded. The vectors of a
// row are beside each other by column, and belong to two sets of 512 elements in memory order where a vector has the 16
// columns of a set; nothing else here depends on it. Each kernels_*.cpp includes this in a translation unit with its own
// flags; all is in an unnamed namespace, so that the linker never mixes code of two instruction sets.
//
// An Isa has vectors of kLanes 32-bit integers (Words) and floats (Floats), and
//   kPairs[lane]                       the pair of columns, of those of two vectors, whose counter a lane has
//   interleave_low, interleave_high    of lanes ordered like kPairs, for even and odd columns: the two vectors in order
//   load(x), store(out, words)         a vector of elements of any type, of words
//   store_values<ADJACENT>(first, second, x, y, stream)    two vectors as elements; the second may follow the first
//   set(x), set_halves(x, y)           on each lane; y on the lanes of the second eight of sixteen pairs, if any
//   add, both, xored, shifted_left<N>, shifted_right<N>      on each lane; both is &, xored has three operands
//   without(x, y)                      x & ~y
//   joined(x, y, mask)                 x | (y & mask)
//   chosen(mask, x, y)                 bits of x where the mask has ones, of y elsewhere
//   lower_halves(x, y)                 the lower half of x beneath the lower half of y
//   multiply(x, factor, low, high)     the halves of 64-bit products
//   rounded(x, offset, inverse)        the bits of fused(x - offset, inverse, kMagic)
//   value(units, unit, base)           fused(float(units), unit, base)
//   edges(fractions), add_edges(x, y), edge_sums(x)    sums of the edge_of of four bytes, in a form that add_edges adds
//                                      and may saturate, and as integers
//   sum(x)                             of all lanes
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

// Where the two vectors of the first row begin, and how far apart rows are.
template <class T>
struct Rows {
  T* vectors[2];
  i64 stride;

  T* at(int vector, i64 row) const { return vectors[vector] + row * stride; }
};

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

// philox_pair of a vector of pairs.
template <class Isa>
struct PairVectors {
  typename Isa::Words second_of_key, first_of_state, high, low;
};

template <class Isa>
PairVectors<Isa> philox_pairs(typename Isa::Words pairs, u32 blocks_high, const RoundKeys& keys) {
  typename Isa::Words high, low;
  PairVectors<Isa> found;
  Isa::multiply(pairs, kPhiloxM0, &low, &high);
  found.second_of_key = Isa::xored(low, Isa::set(keys.second[1]), Isa::set(0u));
  Isa::multiply(Isa::xored(high, Isa::set(blocks_high), Isa::set(keys.second[0])), kPhiloxM1, &low, &high);
  found.first_of_state = Isa::xored(low, Isa::set(keys.first[2]), Isa::set(0u));
  Isa::multiply(Isa::xored(high, Isa::set(keys.first[1]), Isa::set(0u)), kPhiloxM0, &low, &high);
  found.high = Isa::xored(high, Isa::set(keys.second[2]), Isa::set(0u));
  found.low = low;
  return found;
}

// The output words for 8 rows, given the halves of philox_block for each lane.
template <class Isa>
GACT_INLINE void philox_vectors(const PairVectors<Isa>& pairs, typename Isa::Words block_high,
                                typename Isa::Words block_low, const RoundKeys& keys, typename Isa::Words words[4]) {
  typename Isa::Words low0, high0, low1, high1;
  const typename Isa::Words zero = Isa::set(0u);
  Isa::multiply(Isa::xored(block_high, pairs.second_of_key, zero), kPhiloxM1, &low1, &high1);
  words[0] = Isa::xored(high1, pairs.first_of_state, zero);
  words[1] = low1;
  words[2] = Isa::xored(pairs.high, block_low, zero);
  words[3] = pairs.low;
#pragma GCC unroll 10
  for (int round = 3; round < kPhiloxRounds; ++round) {
    Isa::multiply(words[0], kPhiloxM0, &low0, &high0);
    Isa::multiply(words[2], kPhiloxM1, &low1, &high1);
    words[0] = Isa::xored(high1, words[1], Isa::set(keys.first[round]));
    words[1] = low1;
    words[2] = Isa::xored(high0, words[3], Isa::set(keys.second[round]));
    words[3] = low0;
  }
}

// The noise of a tile, 8 rows at a time. The two halves of the pairs may be in different rows.
template <class Isa>
struct TileNoise {
  const PairVectors<Isa>* pairs;
  const RoundKeys* keys;
  u64 seed;
  u32 first_blocks[2];

  GACT_INLINE void words_of(int block, typename Isa::Words words[4]) const {
    const u32 number = static_cast<u32>(block);
    const u64 first = philox_block(first_blocks[0] + number, seed);
    const u64 second = philox_block(first_blocks[1] + number, seed);
    philox_vectors<Isa>(*pairs, Isa::set_halves(high_half(first), high_half(second)),
                        Isa::set_halves(low_half(first), low_half(second)), *keys, words);
  }
};

// The bytes of noise of four rows, from the words of even and of odd columns.
template <class Isa>
GACT_INLINE void noise_of_quad(const typename Isa::Words words[4], int quad, typename Isa::Words noise[2]) {
  noise[0] = Isa::interleave_low(words[2 * quad], words[2 * quad + 1]);
  noise[1] = Isa::interleave_high(words[2 * quad], words[2 * quad + 1]);
}

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

template <class Isa, int BITS>
GACT_INLINE void put_codes(const typename Isa::Words codes[2], int block, int vector, FieldWords<Isa>& fields,
                           const Rows<u32>& out) {
  if constexpr (kHasField<BITS, 8>) {
    Isa::store(out.at(vector, 2 * block), codes[0]);
    Isa::store(out.at(vector, 2 * block + 1), codes[1]);
  }
  if constexpr (kHasField<BITS, 4>) {
    Isa::store(out.at(vector, block), with_field<Isa, BITS, 4>(codes[0], codes));
  }
  if constexpr (kHasField<BITS, 2>) {
    fields.of_two[vector] = with_field<Isa, BITS, 2>(fields.of_two[vector], codes);
    if (block % 2 == 1) Isa::store(out.at(vector, field_start(BITS, 2) + block / 2), fields.of_two[vector]);
  }
  if constexpr (kHasField<BITS, 1>) {
    fields.of_one[vector] = with_field<Isa, BITS, 1>(fields.of_one[vector], codes);
    if (block == kBlocks - 1) Isa::store(out.at(vector, field_start(BITS, 1)), fields.of_one[vector]);
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

template <class Isa, int BITS>
GACT_INLINE void get_codes(const Rows<const u32>& words, int block, int vector, FieldWords<Isa>& fields,
                           typename Isa::Words codes[2]) {
  codes[0] = codes[1] = Isa::set(0u);
  if constexpr (kHasField<BITS, 8>) {
    codes[0] = Isa::load(words.at(vector, 2 * block));
    codes[1] = Isa::load(words.at(vector, 2 * block + 1));
  }
  if constexpr (kHasField<BITS, 4>) add_field<Isa, BITS, 4>(Isa::load(words.at(vector, block)), codes);
  if constexpr (kHasField<BITS, 2>) {
    typename Isa::Words& word = fields.of_two[vector];
    const u32* stored = words.at(vector, field_start(BITS, 2) + block / 2);
    word = block % 2 == 0 ? Isa::load(stored) : shifted<Isa, -4>(word);
    add_field<Isa, BITS, 2>(word, codes);
  }
  if constexpr (kHasField<BITS, 1>) {
    typename Isa::Words& word = fields.of_one[vector];
    word = block == 0 ? Isa::load(words.at(vector, field_start(BITS, 1))) : shifted<Isa, -2>(word);
    add_field<Isa, BITS, 1>(word, codes);
  }
}

// ---- quantising

// The codes of four rows of a vector as bytes. Groups has offset(vector, quad) and inverse(vector, quad), and takes
// add_edges(vector, quad, edges).
template <class Isa, class T, class Groups>
GACT_INLINE typename Isa::Words quantise_quad(const Rows<const T>& x, int vector, int quad, Groups& groups,
                                              typename Isa::Words noise) {
  using Words = typename Isa::Words;
  const Words even_bytes = Isa::set(kEvenBytes);
  Words sums[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    sums[i] = Isa::rounded(Isa::load(x.at(vector, 4 * quad + i)), groups.offset(vector, quad),
                           groups.inverse(vector, quad));
  }
  // Two rows in the halves of a lane: their sums with the noise have 16 bits.
  const Words even = Isa::lower_halves(sums[0], sums[2]), odd = Isa::lower_halves(sums[1], sums[3]);
  const Words fractions = Isa::chosen(even_bytes, even, Isa::template shifted_left<8>(odd));
  groups.add_edges(vector, quad, Isa::edges(fractions));
  const Words even_sums = Isa::add(even, Isa::both(noise, even_bytes));
  const Words odd_sums = Isa::add(odd, Isa::both(Isa::template shifted_right<8>(noise), even_bytes));
  return Isa::chosen(even_bytes, Isa::template shifted_right<8>(even_sums), odd_sums);
}

template <class Isa, class T, int BITS, class Groups>
__attribute__((noinline)) void quantise_tile(const Rows<const T> x, Groups& stored_groups, const TileNoise<Isa>& noise,
                                             const Rows<u32> out) {
  Groups groups = stored_groups;
  FieldWords<Isa> fields = {};
  for (int block = 0; block < kBlocks; ++block) {
    typename Isa::Words random[4], of_quads[2][2];
    noise.words_of(block, random);
    noise_of_quad<Isa>(random, 0, of_quads[0]);
    noise_of_quad<Isa>(random, 1, of_quads[1]);
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
      const typename Isa::Words codes[2] = {quantise_quad<Isa>(x, v, 2 * block, groups, of_quads[0][v]),
                                            quantise_quad<Isa>(x, v, 2 * block + 1, groups, of_quads[1][v])};
      put_codes<Isa, BITS>(codes, block, v, fields, out);
    }
  }
  stored_groups = groups;
}

// ---- decoding

// Four rows of both vectors. Groups has unit(vector, quad), base(vector, quad) and mask(vector, quad), the noise that is
// subtracted.
template <class Isa, class T, class Groups>
GACT_INLINE void decode_quad(const typename Isa::Words codes[2], int quad, const Groups& groups,
                             const typename Isa::Words noise[2], const Rows<T>& out, bool stream) {
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

// Without noise where none of the groups subtracts it.
template <class Isa, class T, int BITS, class Groups>
__attribute__((noinline)) void decode_tile(const Rows<const u32> words, const Groups& stored_groups,
                                           const TileNoise<Isa>* noise, const Rows<T> out, bool stream) {
  const Groups groups = stored_groups;
  FieldWords<Isa> fields = {};
  typename Isa::Words random[4] = {Isa::set(0u), Isa::set(0u), Isa::set(0u), Isa::set(0u)};
  for (int block = 0; block < kBlocks; ++block) {
    if (noise != nullptr) noise->words_of(block, random);
    typename Isa::Words codes[2][2], of_quad[2];
    get_codes<Isa, BITS>(words, block, 0, fields, codes[0]);
    get_codes<Isa, BITS>(words, block, 1, fields, codes[1]);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const typename Isa::Words of_half[2] = {codes[0][half], codes[1][half]};
      noise_of_quad<Isa>(random, half, of_quad);
      decode_quad<Isa>(of_half, 2 * block + half, groups, of_quad, out, stream);
    }
  }
}

}  // namespace
}  // namespace gact
