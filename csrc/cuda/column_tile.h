// How a block of threads holds a tile of columns, its noise and its bit planes.
//
// A row block is GROUP rows of `columns` elements, a tile kWidth columns of it. A thread has one column and 64 rows of
// it, a slice; the threads of a slice are neighbours in columns. Rows go through shared memory 16 at once, a batch: the
// noise that they need, 16 Philox counters for 256 elements in a row of memory, and the words of their bit planes.
// `columns` is a multiple of 32, so a warp is entirely inside a row or outside it, and its 32 elements of a row
// are one word of each plane.
#pragma once

#include "cuda/fast_path.h"
#include "cuda/group.h"

namespace gact {

constexpr int kSliceRows = 64;
constexpr int kBatchRows = 16;
constexpr int kBatches = kSliceRows / kBatchRows;
constexpr int kCounters = 16;         // for 256 elements in a row of memory,
constexpr int kCounterElements = 64;  // of which so many in a row share a word of each

template <class T, int GROUP>
struct ColumnTile {
  static constexpr int kSlices = GROUP / kSliceRows;
  // Two blocks should fit on a multiprocessor, with kWords registers of elements for each thread.
  static constexpr int kBlockWidth = 1024 / static_cast<int>(sizeof(T)) / kSlices;
  static constexpr int kWidth = kBlockWidth > 256 ? 256 : (kBlockWidth < 64 ? 64 : kBlockWidth);
  static constexpr int kThreads = kWidth * kSlices;
  static constexpr int kBlocks = 2048 / static_cast<int>(sizeof(T)) / kThreads;  // on a multiprocessor at once
  static constexpr int kWords = kSliceRows * static_cast<int>(sizeof(T)) / 4;
  static constexpr int kPieces = kWidth / kWarpLanes;                 // words of a row in a plane
  static constexpr int kNoisePieces = kWidth / kCounterElements + 1;  // as a row may begin within one
  static constexpr int kNoiseRow = (kNoisePieces | 1) * kCounters;    // odd, so that two rows use different banks
};

// What the threads of a block share.
template <class Shape, int BITS>
struct ColumnMemory {
  u32 noise[Shape::kSlices][kBatchRows][Shape::kNoiseRow];
  u32 planes[Shape::kSlices][kBatchRows * BITS]
            [Shape::kPieces + 1];  // line row * BITS + plane; padded by one word against bank conflicts
  u32 exchanged[2][Shape::kSlices][Shape::kWidth];
};

// Where a thread works. Rows, and columns, are fewer than 2^32.
struct ColumnPlace {
  u32 columns;
  u32 first_row;     // of the row block
  u32 first_column;  // of the tile
  u32 rows;          // of the row block, fewer than GROUP in the last one
  u32 slice;
  u32 thread;   // of the slice: the number of its column in the tile
  bool inside;  // the row; a thread outside it helps the others
};

template <class Shape, int GROUP>
GACT_FN ColumnPlace place_of_thread(i64 rows, i64 columns) {
  ColumnPlace place;
  place.columns = static_cast<u32>(columns);
  const u32 tiles = (place.columns - 1u) / Shape::kWidth + 1u;
  place.first_row = block_of_grid() / tiles * GROUP;
  place.first_column = block_of_grid() % tiles * Shape::kWidth;
  const u32 rows_left = static_cast<u32>(rows) - place.first_row;
  place.rows = rows_left < GROUP ? rows_left : GROUP;
  place.slice = thread_of_block() / Shape::kWidth;
  place.thread = thread_of_block() % Shape::kWidth;
  place.inside = place.first_column + place.thread < place.columns;
  return place;
}

// How many of the row block lie in the slice.
GACT_FN u32 rows_of_slice(const ColumnPlace& place) {
  const u32 first = place.slice * kSliceRows;
  return place.rows < first ? 0u : place.rows - first;
}

// First element of a row of the tile.
GACT_FN u64 row_of_tile(const ColumnPlace& place, u32 row) {
  return wide_product(place.first_row + row, place.columns) + place.first_column;
}

template <int GROUP>
GACT_FN u64 group_of_thread(const ColumnPlace& place) {
  return wide_product(place.first_row / GROUP, place.columns) + place.first_column + place.thread;
}

// ---- elements

// The words at a column of rows `first`, first + STEP .. of the row block; rows beyond the end repeat the last one.
template <class Shape, int STEP, class T>
GACT_FN void load_words(const T* x, const ColumnPlace& place, u32 first, u32 column, u32 words[Shape::kWords]) {
  const u32 last = place.rows - 1u;
  const T* source = x + row_of_tile(place, first < last ? first : last) + column;
  if (first + (Shape::kWords - 1) * STEP <= last) {
#pragma unroll
    for (int i = 0; i < Shape::kWords; ++i) {
      words[i] = *reinterpret_cast<const u32*>(source);
      source = rows_after(source, STEP, place.columns);
    }
    return;
  }
  const u32 most = first < last ? last - first : 0u;
#pragma unroll
  for (u32 i = 0; i < Shape::kWords; ++i) {
    const u32 rows = i * STEP < most ? i * STEP : most;
    words[i] = *reinterpret_cast<const u32*>(rows_after(source, rows, place.columns));
  }
}

// The thread's column of its slice; threads outside of the row read its last one.
template <class Shape>
GACT_FN void load_column(const float* x, const ColumnPlace& place, u32 words[Shape::kWords]) {
  const u32 column = place.inside ? place.thread : place.columns - 1u - place.first_column;
  load_words<Shape, 1>(x, place, place.slice * kSliceRows, column, words);
}

// Converts between two columns of one row, the even row in the even lane and the odd row in the odd one, and two rows
// of the lane's own column. Its own inverse.
GACT_FN u32 exchange_halves(u32 word) {
  return select_bytes(word, shuffle_xor(word, 1), lane_id() % 2u != 0 ? 0x3276u : 0x5410u);
}

// Two rows in a word: of two columns side by side one lane reads the even rows and the other the odd ones. `x` is
// aligned to 4 bytes.
template <class Shape, class T>
GACT_FN void load_column(const T* x, const ColumnPlace& place, u32 words[Shape::kWords]) {
  const u32 odd = place.thread % 2u;
  const u32 column = place.inside ? place.thread - odd : place.columns - 2u - place.first_column;
  load_words<Shape, 2>(x, place, place.slice * kSliceRows + odd, column, words);
#pragma unroll
  for (int i = 0; i < Shape::kWords; ++i) words[i] = exchange_halves(words[i]);
}

// Rows first_row .. first_row + 7 of the slice.
GACT_FN void widen_rows(const u32* words, int first_row, float, float values[kLaneElements]) {
#pragma unroll
  for (int i = 0; i < kLaneElements; ++i) values[i] = float_of(words[first_row + i]);
}

template <class T>
GACT_FN void widen_rows(const u32* words, int first_row, T type, float values[kLaneElements]) {
#pragma unroll
  for (int i = 0; i < kLaneElements; i += 2) {
    widen_pair(words[(first_row + i) / 2], type, values + i, values + i + 1);
  }
}

GACT_FN Ends ends_of_column(const u32* words, float) {
  Ends ends{float_of(words[0]), float_of(words[0])};
#pragma unroll
  for (int i = 1; i < kSliceRows; ++i) {
    ends.low = smaller(ends.low, float_of(words[i]));
    ends.high = larger(ends.high, float_of(words[i]));
  }
  return ends;
}

template <class T>
GACT_FN Ends ends_of_column(const u32* words, T type) {
  u32 low = words[0], high = words[0];
#pragma unroll
  for (int i = 1; i < kSliceRows / 2; ++i) {
    low = smaller_pair(low, words[i], type);
    high = larger_pair(high, words[i], type);
  }
  float lows[2], highs[2];
  widen_pair(low, type, &lows[0], &lows[1]);
  widen_pair(high, type, &highs[0], &highs[1]);
  return Ends{smaller(lows[0], lows[1]), larger(highs[0], highs[1])};
}

// Values of the first `rows` of four rows; returns the place after them.
GACT_FN float* store_rows(const float values[4], u32 columns, int rows, float* out) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i < rows) *out = values[i];
    out = rows_after(out, 1u, columns);
  }
  return out;
}

// Two lanes share the rows as in load_column; here `rows` and `out` begin with the lane's first one.
template <class T>
GACT_FN T* store_rows(const float values[4], u32 columns, int rows, T* out) {
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const u32 word = exchange_halves(narrow_pair(values[i], values[i + 1], T{}));
    if (i < rows) *reinterpret_cast<u32*>(out) = word;
    out = rows_after(out, 2u, columns);
  }
  return out;
}

// ---- noise

// Makes the noise of a batch of its slice, with every bit inverted where `inverted`. Word counter + 16 * piece of a row
// is for the elements of that counter in 64 elements in a row, counted from the last multiple of 64 that is not beyond
// the first element. An element of number e takes its noise from counter e / 256 * 16 + e % 16, and 16 rows have
// `columns` such counters.
template <class Shape>
GACT_FN void make_batch_noise(const ColumnPlace& place, int batch, u64 seed, bool inverted,
                              u32 noise[kBatchRows][Shape::kNoiseRow]) {
  constexpr int kRowsAtOnce = Shape::kWidth / kCounters;
  const u32 flip = inverted ? ~0u : 0u;
  const u32 counter = place.thread % kCounters, first_row = place.thread / kCounters;
  u64 start = row_of_tile(place, place.slice * kSliceRows + first_row) / kCounters;
  start += wide_product(static_cast<u32>(batch), place.columns);
#pragma unroll 1
  for (u32 row = first_row; row < kBatchRows; row += kRowsAtOnce, start += place.columns / kCounters * kRowsAtOnce) {
    const u32 place_in_chunk = static_cast<u32>(start) % kCounters;
    const int pieces = Shape::kWidth / kCounterElements + (place_in_chunk % 4u != 0 ? 1 : 0);
    u64 number = start - place_in_chunk + counter;
#pragma unroll 1
    for (int piece = -static_cast<int>(place_in_chunk / 4u); piece < pieces; piece += 4, number += kCounters) {
      u32 words[4];
      u32* target = noise[row] + piece * kCounters + static_cast<int>(counter);
      philox_at(number, seed, words);
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        if (piece + word >= 0 && piece + word < pieces) target[word * kCounters] = words[word] ^ flip;
      }
    }
  }
}

// Where a thread finds its noise: for rows of even and odd number, as a row may be an odd multiple of 32 elements long.
struct NoisePlace {
  u32 words[2];
  u32 selectors[2];
};

GACT_FN NoisePlace noise_of_column(const ColumnPlace& place) {
  const u32 shift = place.columns % kCounterElements;
  NoisePlace noise;
#pragma unroll
  for (u32 odd = 0; odd < 2; ++odd) {
    const u32 column = place.thread + odd * shift;
    noise.words[odd] = column / kCounterElements * kCounters + column % kCounters;
    noise.selectors[odd] = noise_selector(column);
  }
  return noise;
}

// ---- bit planes

// Exchanges, between lanes whose numbers differ by SHIFT, the bits whose positions do; `low` has the lower ones.
template <int SHIFT>
GACT_FN u32 exchange_bits(u32 word, u32 low) {
  const bool upper = (lane_id() & SHIFT) != 0;
  const u32 kept = upper ? ~low : low;
  const u32 turn = upper ? 32u - SHIFT : SHIFT;
  const u32 other = shuffle_xor(word, SHIFT);
  return (word & kept) | (((other << turn) | (other >> (32u - turn))) & ~kept);
}

// Bit j of lane i becomes bit i of lane j. Its own inverse.
GACT_FN u32 transpose_warp(u32 word) {
  word = select_bytes(word, shuffle_xor(word, 16), (lane_id() & 16u) != 0 ? 0x3276u : 0x5410u);
  word = select_bytes(word, shuffle_xor(word, 8), (lane_id() & 8u) != 0 ? 0x3715u : 0x6240u);
  word = exchange_bits<4>(word, 0x0F0F0F0Fu);
  word = exchange_bits<2>(word, 0x33333333u);
  return exchange_bits<1>(word, 0x55555555u);
}

// A lane joins the codes of some rows of its column in one word: of four rows in its bytes, and of kQuads times four
// rows side by side in a byte. Transposed, a lane has one plane of one row.
template <int BITS>
struct JoinedCodes {
  static constexpr int kPlanes = BITS <= 2 ? 2 : (BITS <= 4 ? 4 : 8);  // places of a code
  static constexpr int kQuads = 8 / kPlanes;
  static constexpr int kWords = kBatchRows / 4 / kQuads;
};

template <int BITS>
GACT_FN u32 plane_of_lane() {
  return lane_id() % JoinedCodes<BITS>::kPlanes;
}

// Of a batch, for its joined word of this number.
template <int BITS>
GACT_FN u32 row_of_lane(u32 word) {
  return 4u * (word * JoinedCodes<BITS>::kQuads + lane_id() % 8u / JoinedCodes<BITS>::kPlanes) + lane_id() / 8u;
}

// The word of a plane that has an element and the 31 after it.
template <int BITS, int GROUP>
GACT_FN u32* plane_word(u8* planes, u64 element, u32 plane) {
  return reinterpret_cast<u32*>(planes + (element / GROUP * BITS + plane) * (GROUP / 8) + element % GROUP / 8);
}

// Which words of the planes of a batch a thread reads or writes in memory: of one row, every other plane. Those of a
// warp lie close together.
struct PlaneWords {
  u32 row, plane, piece;
  u32* first;  // in the first batch of the slice
  u32 rows;    // of the slice, 0 if the words lie outside of the row
};

// The number of words of every thread; the last is unused where the number of planes is odd.
template <int BITS>
constexpr int kPlaneWords = (BITS + 1) / 2;

template <class Shape, int BITS, int GROUP>
GACT_FN PlaneWords plane_words_of_thread(const ColumnPlace& place, u8* planes) {
  PlaneWords words;
  words.piece = place.thread % Shape::kPieces;
  words.row = place.thread / Shape::kPieces / 2;
  words.plane = place.thread / Shape::kPieces % 2;
  const u32 column = words.piece * kWarpLanes;
  const u64 element = row_of_tile(place, place.slice * kSliceRows + words.row) + column;
  words.first = plane_word<BITS, GROUP>(planes, element, words.plane);
  words.rows = place.first_column + column < place.columns ? rows_of_slice(place) : 0u;
  return words;
}

// Its word number 0 of a batch; the others follow at distances of two planes, which is GROUP / 16 words. 16 rows are
// whole sets, columns / 2 words in each plane.
template <int BITS>
GACT_FN u32* words_of_batch(const PlaneWords& words, int batch, const ColumnPlace& place) {
  return rows_after(words.first, static_cast<u32>(batch * BITS), place.columns / 2u);
}

template <int BITS>
GACT_FN bool word_exists(const PlaneWords& words, u32 batch, u32 number) {
  return batch * kBatchRows + words.row < words.rows && (BITS % 2 == 0 || words.plane + 2 * number < BITS);
}

}  // namespace gact
