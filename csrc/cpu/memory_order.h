// Pack and unpack for groups in memory order: sets of 512 elements in rows of 16, of which a tile has one or two.
#pragma once

#include "cpu/columns.h"

namespace gact {
namespace {

constexpr int kSetElements = kTileRows * kRowElements;
// Most elements whose groups are described before they are quantised: they stay in the L1 cache.
constexpr i64 kChunkElements = 4096;
// How far ahead of quantising to prefetch: past the chunk that is described next.
constexpr i64 kPrefetchElements = 2 * kChunkElements;

template <class Isa>
constexpr int kTileSets = kStrip<Isa> / kRowElements;

template <class Isa>
constexpr int kTileElements = kTileSets<Isa> * kSetElements;

// The set of a tile to which a vector belongs, and where the vector begins in a row of it.
template <class Isa>
constexpr int set_of(int vector) {
  return vector * Isa::kLanes / kRowElements;
}

// Rows of a tile, given its elements or its words; SIZE of these are a set.
template <class Isa, int SIZE, class T>
struct SetRows {
  T* first;

  T* at(int vector, i64 row) const {
    constexpr int kSecond = set_of<Isa>(1) * SIZE + Isa::kLanes % kRowElements;
    return first + row * kRowElements + vector * kSecond;
  }
};

template <class Isa, int SIZE, class T>
SetRows<Isa, SIZE, T> sets_at(T* first) {
  return SetRows<Isa, SIZE, T>{first};
}

// The pairs of columns of the vectors of a tile.
template <class Isa>
struct SetNoise {
  PairVectors<Isa> pairs[2];
  const RoundKeys& keys;
  u64 seed;

  SetNoise(i64 first_set, const RoundKeys& round_keys, u64 seed) : keys(round_keys), seed(seed) {
    const u32 blocks_high = high_half(static_cast<u64>(first_set) * kBlocks);
    pairs[0] = philox_pairs<Isa>(0, blocks_high, keys);
    pairs[1] = philox_pairs<Isa>(Isa::kLanes % kRowElements / 2, blocks_high, keys);
  }

  TileNoise<Isa> at(i64 set) const {
    const u32 block = low_half(static_cast<u64>(set) * kBlocks);
    return TileNoise<Isa>{{pairs, pairs + 1}, {block, block + set_of<Isa>(1) * kBlocks}, &keys, seed};
  }
};

// Which of the groups of a set has four rows of it: quad >> shift.
inline int quad_shift(int group_size) { return __builtin_ctz(static_cast<unsigned>(group_size)) - 6; }

// ---- pack

template <class Isa>
struct SetGroups {
  const float* offsets[2];  // of the first group of each vector's set
  const float* inverses[2];
  int shift;
  typename Isa::Words (*edges)[kQuads];  // of each set of the tile

  GACT_INLINE typename Isa::Floats offset(int vector, int quad) const {
    return Isa::set(offsets[vector][quad >> shift]);
  }
  GACT_INLINE typename Isa::Floats inverse(int vector, int quad) const {
    return Isa::set(inverses[vector][quad >> shift]);
  }
  GACT_INLINE void add_edges(int vector, int quad, typename Isa::Words of_quad) {
    typename Isa::Words& of_set = edges[set_of<Isa>(vector)][quad];
    of_set = vector > 0 && set_of<Isa>(vector) == 0 ? Isa::add_edges(of_set, of_quad) : of_quad;
  }

  // The sums of the groups of a set.
  void write_sums(int set, u32* sums) const {
    const int quads = 1 << shift;
    for (int first = 0; first < kQuads; first += quads) {
      typename Isa::Words sum = edges[set][first];
      for (int quad = first + 1; quad < first + quads; ++quad) sum = Isa::add_edges(sum, edges[set][quad]);
      sums[first >> shift] = Isa::sum(Isa::edge_sums(sum));
    }
  }
};

// The elements of a later tile, up to the end of the tensor. In the L2 cache, as L1 holds two chunks at most.
template <class T>
struct TileAhead {
  static constexpr int kElements = 32;

  const T *next, *end;

  GACT_INLINE void advance() {
    if (next >= end) return;
    for (int i = 0; i < kElements; i += kCacheLine / sizeof(T)) prefetch<kToL2>(next + i);
    next += kElements;
  }
};

// The sets of a tile, whose first group is number `group` of the arrays. Writes the sums of edge_of.
template <class Isa, class T, int BITS>
void quantise_sets(const T* x, int group_size, const GroupArrays& groups, int group, const TileNoise<Isa>& noise,
                   u32* words, u32* edges, bool stream, const TileAhead<T>& ahead) {
  const int in_set = kSetElements / group_size;
  SetGroups<Isa> of_tile;
  typename Isa::Words of_quads[kTileSets<Isa>][kQuads];
  of_tile.edges = of_quads;
  of_tile.shift = quad_shift(group_size);
  for (int v = 0; v < 2; ++v) {
    of_tile.offsets[v] = groups.offset + group + set_of<Isa>(v) * in_set;
    of_tile.inverses[v] = groups.inverse + group + set_of<Isa>(v) * in_set;
  }
  quantise_tile<Isa, T, BITS>(sets_at<Isa, kSetElements>(x), of_tile, noise, sets_at<Isa, BITS * kRowElements>(words),
                              stream, ahead);
  for (int set = 0; set < kTileSets<Isa>; ++set) of_tile.write_sums(set, edges + group + set * in_set);
}

template <class Isa, class T>
void ranges_of(const T* x, int group_size, int count, GroupArrays& groups) {
  for (int g = 0; g < count; ++g) {
    const Range range = Isa::range(x + g * group_size, group_size);
    groups.low[g] = range.low;
    groups.high[g] = range.high;
  }
}

template <class T>
void finish_groups(const PackJob& job, i64 first, int count, const GroupArrays& groups, const u32* edges,
                   int elements) {
  i32 any_slow = 0;
  for (int g = 0; g < count; ++g) {
    const int left = elements - g * job.group_size;
    job.scales[first + g] = stored_scale(groups, g, edges[g], left < job.group_size ? left : job.group_size);
    any_slow |= groups.slow[g];
  }
  if (!any_slow) return;
  for (int g = 0; g < count; ++g) {
    if (groups.slow[g]) pack_group<T>(job, first + g);
  }
}

// Whole tiles: elements start .. start + count - 1, at most kChunkElements.
template <class Isa, class T, int BITS>
void pack_chunk(const PackJob& job, const RoundKeys& keys, i64 start, int count, bool stream) {
  GroupArrays groups;
  u32 edges[kChunkElements / 64];
  const T *x = static_cast<const T*>(job.x) + start, *end = static_cast<const T*>(job.x) + job.numel;
  const int size = job.group_size;
  const i64 first_set = start / kSetElements;
  const SetNoise<Isa> noise(first_set, keys, job.seed);
  ranges_of<Isa>(x, size, count / size, groups);
  describe_groups<T>(groups, count / size, BITS, job.offsets + start / size);
  for (int i = 0; i < count; i += kTileElements<Isa>) {
    const i64 set = first_set + i / kSetElements;
    quantise_sets<Isa, T, BITS>(x + i, size, groups, i / size, noise.at(set), job.words + set * BITS * kRowElements,
                                edges, stream, TileAhead<T>{x + i + kPrefetchElements, end});
  }
  finish_groups<T>(job, start / size, count / size, groups, edges, count);
}

// Fewer elements than a tile at the end of a tensor, filled up: with one of them while the ranges are found, then with
// the offset of the last group, whose codes and fractions are zero, and with zeros in groups of zeros.
template <class Isa, class T, int BITS>
void pack_rest(const PackJob& job, const RoundKeys& keys, i64 start, int count) {
  constexpr int kElements = kTileElements<Isa>;
  GroupArrays groups;
  u32 edges[kElements / 64];
  alignas(kCacheLine) u32 words[BITS * kStrip<Isa>];
  alignas(kCacheLine) T x[kElements];
  const int size = job.group_size, group_count = (count + size - 1) / size;
  const i64 first_set = start / kSetElements;
  std::memcpy(x, static_cast<const T*>(job.x) + start, count * sizeof(T));
  for (int i = count; i < group_count * size; ++i) x[i] = x[count - 1];
  ranges_of<Isa>(x, size, group_count, groups);
  describe_groups<T>(groups, group_count, BITS, job.offsets + start / size);
  for (int g = group_count; g < kElements / size; ++g) groups.offset[g] = groups.inverse[g] = 0.0f;
  for (int i = count; i < kElements; ++i) from_float(groups.offset[i / size], x + i);
  const SetNoise<Isa> noise(first_set, keys, job.seed);
  quantise_sets<Isa, T, BITS>(x, size, groups, 0, noise.at(first_set), words, edges, false, TileAhead<T>{x, x});
  edges[group_count - 1] -= 128u * static_cast<u32>(group_count * size - count);
  for (int set = 0; set * kSetElements < count; ++set) {
    const int left = (count - set * kSetElements + kRowElements - 1) / kRowElements;
    u32* out = job.words + (first_set + set) * BITS * kRowElements;
    for_word_rows(BITS, left < kTileRows ? left : kTileRows, [&](int in_whole, int row) {
      std::memcpy(out + row * kRowElements, words + (set * BITS + in_whole) * kRowElements, kRowElements * sizeof(u32));
    });
  }
  finish_groups<T>(job, start / size, group_count, groups, edges, count);
}

// Calls whole(start, count) for the chunks of whole tiles of some units, and rest(start, count) for what is left.
template <class Isa, class Whole, class Rest>
void for_chunks(i64 numel, i64 first, i64 last, Whole&& whole, Rest&& rest) {
  const i64 end = last * kUnitElements < numel ? last * kUnitElements : numel;
  const i64 whole_end = end / kTileElements<Isa> * kTileElements<Isa>;
  for (i64 start = first * kUnitElements; start < whole_end;) {
    const i64 chunk_end = (start / kChunkElements + 1) * kChunkElements;
    const i64 next = chunk_end < whole_end ? chunk_end : whole_end;
    whole(start, static_cast<int>(next - start));
    start = next;
  }
  if (whole_end < end) rest(whole_end, static_cast<int>(end - whole_end));
}

template <class Isa, class T, int BITS>
void pack_units(const PackJob& job, i64 first, i64 last) {
  const StandardFloatMode standard;
  const RoundKeys keys(job.seed);
  const bool stream = job.stream && is_line(job.words);
  for_chunks<Isa>(
      job.numel, first, last, [&](i64 start, int count) { pack_chunk<Isa, T, BITS>(job, keys, start, count, stream); },
      [&](i64 start, int count) { pack_rest<Isa, T, BITS>(job, keys, start, count); });
  end_of_streaming(stream);
}

// ---- unpack

template <class Isa>
struct SetUnits {
  const float* units[2];  // of the first group of each vector's set
  const float* bases[2];
  const u32* masks[2];
  int shift;

  static constexpr bool kAdjacent = set_of<Isa>(1) == 0;

  GACT_INLINE typename Isa::Floats unit(int vector, int quad) const { return Isa::set(units[vector][quad >> shift]); }
  GACT_INLINE typename Isa::Floats base(int vector, int quad) const { return Isa::set(bases[vector][quad >> shift]); }
  GACT_INLINE typename Isa::Words mask(int vector, int quad) const { return Isa::set(masks[vector][quad >> shift]); }
};

template <class Isa, class T, int BITS>
void decode_sets(const u32* words, int group_size, const DecodeArrays& arrays, int group, const TileNoise<Isa>& noise,
                 T* out, bool stream) {
  SetUnits<Isa> groups;
  groups.shift = quad_shift(group_size);
  for (int v = 0; v < 2; ++v) {
    const int first = group + set_of<Isa>(v) * (kSetElements / group_size);
    groups.units[v] = arrays.unit + first;
    groups.bases[v] = arrays.base + first;
    groups.masks[v] = arrays.mask + first;
  }
  decode_tile<Isa, BITS>(sets_at<Isa, BITS * kRowElements>(words), groups, arrays.any_dithered ? &noise : nullptr,
                         sets_at<Isa, kSetElements>(out), stream);
}

template <class Isa, class T, int BITS>
void unpack_chunk(const UnpackJob& job, const RoundKeys& keys, i64 start, int count, bool stream) {
  DecodeArrays arrays;
  const int size = job.group_size;
  const i64 first_set = start / kSetElements, first = start / size;
  read_groups<Isa, T>(job.scales + first, job.offsets + first, count / size, arrays);
  const SetNoise<Isa> noise(first_set, keys, job.seed);
  for (int i = 0; i < count; i += kTileElements<Isa>) {
    const i64 set = first_set + i / kSetElements;
    decode_sets<Isa, T, BITS>(job.words + set * BITS * kRowElements, size, arrays, i / size, noise.at(set),
                              static_cast<T*>(job.out) + start + i, stream);
  }
  if (arrays.any_rare) unpack_rare_groups<Isa, T>(job, first, count / size);
}

template <class Isa, class T, int BITS>
void unpack_rest(const UnpackJob& job, const RoundKeys& keys, i64 start, int count) {
  constexpr int kElements = kTileElements<Isa>;
  DecodeArrays arrays = {};
  alignas(kCacheLine) u32 words[BITS * kStrip<Isa>] = {};
  alignas(kCacheLine) T out[kElements];
  const int size = job.group_size, group_count = (count + size - 1) / size;
  const i64 first_set = start / kSetElements, first = start / size;
  for (int set = 0; set * kSetElements < count; ++set) {
    const int left = (count - set * kSetElements + kRowElements - 1) / kRowElements;
    const u32* stored = job.words + (first_set + set) * BITS * kRowElements;
    for_word_rows(BITS, left < kTileRows ? left : kTileRows, [&](int in_whole, int row) {
      std::memcpy(words + (set * BITS + in_whole) * kRowElements, stored + row * kRowElements,
                  kRowElements * sizeof(u32));
    });
  }
  read_groups<Isa, T>(job.scales + first, job.offsets + first, group_count, arrays);
  const SetNoise<Isa> noise(first_set, keys, job.seed);
  decode_sets<Isa, T, BITS>(words, size, arrays, 0, noise.at(first_set), out, false);
  std::memcpy(static_cast<T*>(job.out) + start, out, count * sizeof(T));
  if (arrays.any_rare) unpack_rare_groups<Isa, T>(job, first, group_count);
}

template <class Isa, class T, int BITS>
void unpack_units(const UnpackJob& job, i64 first, i64 last) {
  const StandardFloatMode standard;
  const RoundKeys keys(job.seed);
  const bool stream = job.stream && is_line(job.out);
  for_chunks<Isa>(
      job.numel, first, last,
      [&](i64 start, int count) { unpack_chunk<Isa, T, BITS>(job, keys, start, count, stream); },
      [&](i64 start, int count) { unpack_rest<Isa, T, BITS>(job, keys, start, count); });
  end_of_streaming(stream);
}

}  // namespace
}  // namespace gact
