// How a block of threads holds a tile of columns, its noise and its bit planes.
//
// A row block is GROUP rows of `columns` elements, a tile kWidth columns of it. A thread has one column and 64 rows of
// it, a slice; the threads of a slice are neighbours in columns. Rows go through shared memory 16 at once, a batch: the
// noise that they need, 16 Philox counters for 256 elements in a row of memory, and the words of their bit planes.
// `columns` is a multiple of 32, so a warp is inside of a row or outside of it, and the 32 elements that it has of a
// row are one word of each plane.
#pragma once

#include "group.h"
#include "plain.h"

namespace gact {

constexpr int kSliceRows = 64;
constexpr int kBatchRows = 16;
constexpr int kBatches = kSliceRows / kBatchRows;
constexpr int kCounters = 16;         // for 256 elements in a row of memory,
constexpr int kCounterElements = 64;  // of which so many in a row share a word of each

template <class T, int GROUP>
struct ColumnTile {
  static constexpr int kSlices = GROUP / kSliceRows;
  // Two blocks of threads shall fit on a multiprocessor, with kWords registers of elements for each.
  static constexpr int kBlockWidth = 1024 / static_cast<int>(sizeof(T)) / kSlices;
  static constexpr int kWidth = kBlockWidth > 256 ? 256 : (kBlockWidth < 64 ? 64 : kBlockWidth);
  static constexpr int kThreads = kWidth * kSlices;
  static constexpr int kBlocks = 2048 / static_cast<int>(sizeof(T)) / kThreads;  // on a multiprocessor at once
  static constexpr int kWords = kSliceRows * static_cast<int>(sizeof(T)) / 4;
  static constexpr int kPieces = kWidth / kWarpLanes;                 // words of a row in a plane
  static constexpr int kNoisePieces = kWidth / kCounterElements + 1;  // as a row may begin within one
  static constexpr int kNoiseRow = (kNoisePieces | 1) * kCounters;    // odd, so that two rows lie in different banks
};

// What the threads of a block share.
template <class Shape, int BITS>
struct ColumnMemory {
  u32 noise[Shape::kSlices][kBatchRows][Shape::kNoiseRow];
  u32 planes[Shape::kSlices][kBatchRows * BITS][Shape::kPieces + 1];  // line row * BITS + plane; one more parts banks
  u32 exchanged[2][Shape::kSlices][Shape::kWidth];
};

// Where a thread works. Rows, and columns, are fewer than 2^32.
struct ColumnPlace {
  u32 columns;
  u32 first_row;     // of the row block
  u32 first_column;  // of the tile
  int rows;          // of the row block, fewer than GROUP in the last one
  int slice;
  int thread;   // of the slice: the number of its column in the tile
  bool inside;  // of the row; a thread that is not helps the others
};

template <class Shape, int GROUP>
GACT_FN ColumnPlace place_of_thread(i64 rows, i64 columns) {
  ColumnPlace place;
  place.columns = static_cast<u32>(columns);
  const u32 tiles = (place.columns - 1u) / Shape::kWidth + 1u;
  place.first_row = block_of_grid() / tiles * GROUP;
  place.first_column = block_of_grid() % tiles * Shape::kWidth;
  const u32 rows_left = static_cast<u32>(rows) - place.first_row;
  place.rows = static_cast<int>(rows_left < GROUP ? rows_left : GROUP);
  place.slice = static_cast<int>(thread_of_block()) / Shape::kWidth;
  place.thread = static_cast<int>(thread_of_block()) % Shape::kWidth;
  place.inside = place.first_column + static_cast<u32>(place.thread) < place.columns;
  return place;
}

// First element of a row of the tile.
GACT_FN u64 row_of_tile(const ColumnPlace& place, int row) {
  return wide_product(place.first_row + static_cast<u32>(row), place.columns) + place.first_column;
}

template <int GROUP>
GACT_FN u64 group_of_thread(const ColumnPlace& place) {
  return wide_product(place.first_row / GROUP, place.columns) + place.first_column + static_cast<u32>(place.thread);
}

// ---- elements

// The words at a column of rows `first`, first + STEP .. of the row block; rows beyond the end repeat the last one.
template <class Shape, int STEP, class T>
GACT_FN void load_words(const T* x, const ColumnPlace& place, int first, u32 column, u32 words[Shape::kWords]) {
  const int last = place.rows - 1;
  const u32 most = static_cast<u32>(first < last ? last - first : 0);
  const T* source = x + row_of_tile(place, first < last ? first : last) + column;
#pragma unroll
  for (u32 i = 0; i < Shape::kWords; ++i) {
    const u32 rows = i * STEP < most ? i * STEP : most;
    words[i] = *reinterpret_cast<const u32*>(rows_after(source, rows, place.columns));
  }
}

// The thread's column of its slice; threads outside of the row read its last one.
template <class Shape>
GACT_FN void load_column(const float* x, const ColumnPlace& place, u32 words[Shape::kWords]) {
  const u32 column = place.inside ? static_cast<u32>(place.thread) : place.columns - 1u - place.first_column;
  load_words<Shape, 1>(x, place, place.slice * kSliceRows, column, words);
}

// Two rows in a word: of two columns side by side, one lane reads the even rows and the other the odd ones, and they
// exchange halves. `x` is aligned to 4 bytes.
template <class Shape, class T>
GACT_FN void load_column(const T* x, const ColumnPlace& place, u32 words[Shape::kWords]) {
  const int odd = place.thread % 2;
  const u32 column = place.inside ? static_cast<u32>(place.thread - odd) : place.columns - 2u - place.first_column;
  load_words<Shape, 2>(x, place, place.slice * kSliceRows + odd, column, words);
  const u32 selector = odd != 0 ? 0x3276u : 0x5410u;
#pragma unroll
  for (int i = 0; i < Shape::kWords; ++i) words[i] = select_bytes(words[i], shuffle_xor(words[i], 1), selector);
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

template <class T>
GACT_FN T* store_rows(const float values[4], u32 columns, int rows, T* out) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const u32 pair = narrow_pair(values[i / 2 * 2], values[i / 2 * 2 + 1], T{});
    if (i < rows) out->bits = static_cast<u16>(pair >> (16 * (i % 2)));
    out = rows_after(out, 1u, columns);
  }
  return out;
}

// ---- noise

// Makes the noise of 16 rows of the tile, the first of which is even, for their slice; every bit turned over where
// `inverted`. Word counter + 16 * piece of a row is for the elements of that counter in 64 elements in a row, counted
// from the last multiple of 64 that is not beyond the first element.
template <class Shape>
GACT_FN void make_batch_noise(const ColumnPlace& place, int first_row, u64 seed, bool inverted,
                              u32 noise[kBatchRows][Shape::kNoiseRow]) {
  constexpr int kRowsAtOnce = Shape::kWidth / kCounters;
  const u32 flip = inverted ? ~0u : 0u;
  const int counter = place.thread % kCounters;
#pragma unroll 1
  for (int row = place.thread / kCounters; row < kBatchRows; row += kRowsAtOnce) {
    const u64 element = row_of_tile(place, first_row + row);
    const int pieces = Shape::kWidth / kCounterElements + (element % kCounterElements != 0 ? 1 : 0);
    u64 chunk = element / kPhiloxBlock;
#pragma unroll 1
    for (int piece = -static_cast<int>(element / kCounterElements % 4); piece < pieces; piece += 4, ++chunk) {
      u32 words[4];
      philox_of_lane(chunk, static_cast<u32>(counter), seed, words);
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        if (piece + word < 0 || piece + word >= pieces) continue;
        noise[row][(piece + word) * kCounters + counter] = words[word] ^ flip;
      }
    }
  }
}

// Where a thread finds its noise: for rows of even and odd number, as a row may be an odd multiple of 32 elements long.
struct NoisePlace {
  int words[2];
  u32 selectors[2];
};

GACT_FN NoisePlace noise_of_column(const ColumnPlace& place) {
  const int shift = static_cast<int>(place.columns % kCounterElements);
  NoisePlace noise;
#pragma unroll
  for (int odd = 0; odd < 2; ++odd) {
    const int column = place.thread + odd * shift;
    noise.words[odd] = column / kCounterElements * kCounters + column % kCounters;
    noise.selectors[odd] = noise_selector(static_cast<u32>(column));
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

// Bit j of lane i becomes bit i of lane j. Twice is the identity.
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
GACT_FN int plane_of_lane() {
  return static_cast<int>(lane_id()) % JoinedCodes<BITS>::kPlanes;
}

// Of a batch, for its joined word of this number.
template <int BITS>
GACT_FN int row_of_lane(int word) {
  const int lane = static_cast<int>(lane_id());
  return 4 * (word * JoinedCodes<BITS>::kQuads + lane % 8 / JoinedCodes<BITS>::kPlanes) + lane / 8;
}

// The word of a plane that has an element and the 31 after it.
template <int BITS, int GROUP>
GACT_FN u32* plane_word(u8* planes, u64 element, u32 plane) {
  return reinterpret_cast<u32*>(planes + (element / GROUP * BITS + plane) * (GROUP / 8) + element % GROUP / 8);
}

// Which word of a batch's planes a thread reads and writes in memory: those of a warp lie close together.
struct BatchWord {
  int line, piece;
  bool exists;
};

// Each thread of a slice has so many.
template <int BITS>
constexpr int kBatchWords = (BITS + 1) / 2;

template <class Shape, int BITS>
GACT_FN BatchWord batch_word(const ColumnPlace& place, int first_row, int number) {
  BatchWord word;
  word.piece = place.thread % Shape::kPieces;
  word.line = place.thread / Shape::kPieces + number * kWarpLanes;
  word.exists = word.line < kBatchRows * BITS && first_row + word.line / BITS < place.rows &&
                place.first_column + static_cast<u32>(word.piece) * kWarpLanes < place.columns;
  return word;
}

template <class Shape, int BITS, int GROUP>
GACT_FN u32* address_of(const BatchWord& word, const ColumnPlace& place, int first_row, u8* planes) {
  const u64 element = row_of_tile(place, first_row + word.line / BITS) + static_cast<u32>(word.piece) * kWarpLanes;
  return plane_word<BITS, GROUP>(planes, element, static_cast<u32>(word.line % BITS));
}

}  // namespace gact
