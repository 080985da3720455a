// Which elements a thread has, and where they are in a packed buffer (docs/codec.md).
//
// Codes are a matrix: the rows of the tensor where groups are columns, rows of 16 elements in memory order. A thread
// has a tile of it, two adjacent columns of 32 rows: these are whole words of codes at every width, and a Philox
// counter makes the noise of 8 rows of two columns, so that threads exchange nothing but the ranges of their groups.
// The two layouts differ in which rows and columns of a tile belong to which group; of a group several threads have a
// part.
#pragma once

#include "cuda/warp.h"

namespace gact {

constexpr int kQuads = kTileRows / 4;             // of four rows, in a tile
constexpr int kBlocks = kTileRows / kPhiloxRows;  // of eight rows, which share their noise
constexpr int kFields = 4;                        // of 8, 4, 2 and 1 bits; a code has those whose bit its width has

GACT_FN constexpr int field_bits(int field) { return 8 >> field; }

// Groups are columns. A block has GROUP rows of some columns; its threads are in rows, one tile below the other.
template <int GROUP>
struct ByColumn {
  static constexpr u32 kPairs = GROUP == 64 ? 64 : (GROUP == 512 ? 16 : 32);  // of columns
  static constexpr u32 kParts = GROUP / kTileRows;                            // tiles of a group
  static constexpr u32 kThreads = kPairs * kParts;
  static constexpr u32 kGroups = 2 * kPairs;  // of a block
  static constexpr u32 kThreadGroups = 2;

  // Of the groups of a thread, the one that has column 0 or 1 of four rows; whether it begins, or ends, with them.
  GACT_FN constexpr u32 group_of(int, int column) { return static_cast<u32>(column); }
  GACT_FN constexpr bool begins(int quad, int) { return quad == 0; }
  GACT_FN constexpr bool ends(int quad, int) { return quad == kQuads - 1; }
};

// Groups are GROUP elements in a row, some rows of 16 elements. Eight threads have 32 rows.
template <int GROUP>
struct InMemoryOrder {
  static constexpr u32 kParts = kRowElements / 2;
  static constexpr u32 kThreads = 128;
  static constexpr u32 kThreadGroups = kTileRows * kRowElements / GROUP;
  static constexpr u32 kGroups = kThreads / kParts * kThreadGroups;

  GACT_FN constexpr u32 group_of(int quad, int) { return static_cast<u32>(4 * quad * kRowElements / GROUP); }
  GACT_FN constexpr bool begins(int quad, int column) { return column == 0 && 4 * quad * kRowElements % GROUP == 0; }
  GACT_FN constexpr bool ends(int quad, int column) {
    return column == 1 && 4 * (quad + 1) * kRowElements % GROUP == 0;
  }
};

// The tile of a thread.
struct Place {
  u32 tile, pair;         // its number among 32 rows each, and that of its two columns
  u32 width, pitch;       // of a row of codes; from one row of elements to the next
  u32 part, group;        // of its groups it has part `part`; the first of them, in the block
  int tile_rows;          // in the matrix, at most 32
  int rows, second_rows;  // in each of its columns
};

// The second column never has more rows than the first.
GACT_FN bool is_whole(const Place& place) { return place.second_rows == kTileRows; }

// Number of the first of `rows` rows of words for each tile, of the thread's first column.
GACT_FN u64 place_of_rows(const Place& place, int rows) {
  return static_cast<u64>(place.tile) * static_cast<u32>(rows) * place.width + 2u * place.pair;
}

GACT_FN u64 first_element(const Place& place) {
  return static_cast<u64>(place.tile) * kTileRows * place.pitch + 2u * place.pair;
}

// Number of the first eight rows, a multiple of 4.
GACT_FN u64 first_block(const Place& place) { return static_cast<u64>(place.tile) * kBlocks; }

// One group of the block, for the thread that describes it.
struct GroupPlace {
  u64 number;  // in the sections of scales and offsets
  u64 first;   // number of its first element
  u32 stride;
  int count;  // of its elements; 0 where there is no such group
};

// How much of `length` lies from `start` on, at most `limit`.
GACT_FN int rest(u64 length, u64 start, int limit) {
  const u64 left = start < length ? length - start : 0u;
  return left < static_cast<u64>(limit) ? static_cast<int>(left) : limit;
}

// Rows of 16 elements, the last of which may be short.
GACT_FN int rows_of(int elements) { return (elements + kRowElements - 1) / kRowElements; }

// pitch: from a row of elements to the next, even; `columns` where rows lie close together.
template <int GROUP>
GACT_FN Place place_of_thread(ByColumn<GROUP>, u64 rows, u32 columns, u32 pitch) {
  using Layout = ByColumn<GROUP>;
  const u32 across = (columns + Layout::kGroups - 1) / Layout::kGroups;
  const u32 down = block_of_grid() / across;
  Place place;
  place.part = thread_of_block() / Layout::kPairs;
  place.group = 2 * (thread_of_block() % Layout::kPairs);
  place.width = columns;
  place.pitch = pitch;
  place.tile = down * Layout::kParts + place.part;
  const u32 column = (block_of_grid() - down * across) * Layout::kGroups + place.group;
  place.pair = column / 2;
  const int left = column < columns ? rest(rows, static_cast<u64>(place.tile) * kTileRows, kTileRows) : 0;
  place.tile_rows = place.rows = place.second_rows = left;
  return place;
}

template <int GROUP>
GACT_FN Place place_of_thread(InMemoryOrder<GROUP>, u64 numel, u32, u32) {
  using Layout = InMemoryOrder<GROUP>;
  constexpr int kElements = kTileRows * kRowElements;
  Place place;
  place.part = place.pair = thread_of_block() % Layout::kParts;
  place.group = thread_of_block() / Layout::kParts * Layout::kThreadGroups;
  place.width = place.pitch = kRowElements;
  place.tile = block_of_grid() * (Layout::kThreads / Layout::kParts) + thread_of_block() / Layout::kParts;
  const u64 first = first_element(place);
  place.tile_rows = rows_of(rest(numel, first - 2u * place.pair, kElements));
  place.rows = rows_of(rest(numel, first, kElements));
  place.second_rows = rows_of(rest(numel, first + 1, kElements));
  return place;
}

// Group `index` of the block.
template <int GROUP>
GACT_FN GroupPlace place_of_group(ByColumn<GROUP>, u32 index, u64 rows, u32 columns, u32 pitch) {
  using Layout = ByColumn<GROUP>;
  const u32 across = (columns + Layout::kGroups - 1) / Layout::kGroups;
  const u32 down = block_of_grid() / across;
  const u32 column = (block_of_grid() - down * across) * Layout::kGroups + index;
  const u64 row = static_cast<u64>(down) * GROUP;
  return GroupPlace{static_cast<u64>(down) * columns + column, row * pitch + column, pitch,
                    column < columns ? rest(rows, row, GROUP) : 0};
}

template <int GROUP>
GACT_FN GroupPlace place_of_group(InMemoryOrder<GROUP>, u32 index, u64 numel, u32, u32) {
  const u64 number = static_cast<u64>(block_of_grid()) * InMemoryOrder<GROUP>::kGroups + index;
  return GroupPlace{number, number * GROUP, 1u, rest(numel, number * GROUP, GROUP)};
}

// In the sections of scales and offsets.
template <int GROUP>
GACT_FN u64 first_group_of(ByColumn<GROUP>, const Place& place) {
  return static_cast<u64>(place.tile / (GROUP / kTileRows)) * place.width + 2 * place.pair;
}

template <int GROUP>
GACT_FN u64 first_group_of(InMemoryOrder<GROUP>, const Place& place) {
  return static_cast<u64>(place.tile) * InMemoryOrder<GROUP>::kThreadGroups;
}

// ---- a packed buffer

struct Buffer {
  u32* words;
  u16* scales;
  u16* offsets;
};

GACT_FN Buffer sections_of(u8* buffer, i64 scale_start, i64 offset_start) {
  return Buffer{reinterpret_cast<u32*>(buffer), reinterpret_cast<u16*>(buffer + scale_start),
                reinterpret_cast<u16*>(buffer + offset_start)};
}

// ---- elements, two of a row at a time

template <class T>
struct Row {
  u32 pair;
};

template <>
struct alignas(8) Row<float> {
  float values[2];
};

GACT_FN float value_of(const Row<float>& row, int column) { return row.values[column]; }

GACT_FN float value_of(const Row<Bfloat>& row, int column) {
  return float_of(column == 0 ? row.pair << 16 : row.pair & 0xFFFF0000u);
}

GACT_FN float value_of(const Row<Half>& row, int column) {
  return to_float(Half{static_cast<u16>(column == 0 ? row.pair : row.pair >> 16)});
}

GACT_FN Row<float> row_of(float first, float second, float) { return Row<float>{{first, second}}; }

template <class T>
GACT_FN Row<T> row_of(float first, float second, T type) {
  return Row<T>{narrow_pair(first, second, type)};
}

}  // namespace gact
