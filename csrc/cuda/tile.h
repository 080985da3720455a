// Which elements a thread has, and where they are in a packed buffer (docs/codec.md).
//
// Codes are a matrix: the rows of the tensor where groups are columns, rows of 16 elements in memory order. A thread has
// a tile of it, two adjacent columns of 32 rows: these are whole words of codes at every width, and a Philox counter
// makes the noise of 8 rows of two columns, so that threads exchange nothing but the ranges of their groups. The two
// layouts differ in which rows and columns of a tile belong to which group; of a group several threads have a part.
#pragma once

#include "cuda/warp.h"

namespace gact {

constexpr u32 kTileRows = 32;
constexpr u32 kQuads = 8;   // of four rows, in a tile
constexpr u32 kOctets = 4;  // of eight rows

// Groups are columns. A block has GROUP rows of some columns; its threads are in rows, one tile below the other.
template <int GROUP>
struct ByColumn {
  static constexpr u32 kPairs = GROUP <= 128 ? 64 : 32;  // of columns
  static constexpr u32 kParts = GROUP / kTileRows;       // tiles of a group
  static constexpr u32 kThreads = kPairs * kParts;
  static constexpr u32 kGroups = 2 * kPairs;  // of a block
  static constexpr u32 kThreadGroups = 2;
  static constexpr u32 kWidth = 0;  // of a row: known to the launch only

  // Of the groups of a thread, the one that has column 0 or 1 of four rows.
  GACT_FN constexpr u32 group_of(u32, u32 column) { return column; }
};

// Groups are GROUP elements in a row, some rows of 16 elements. Eight threads have 32 rows.
template <int GROUP>
struct InMemoryOrder {
  static constexpr u32 kWidth = 16;
  static constexpr u32 kParts = kWidth / 2;
  static constexpr u32 kThreads = 256;
  static constexpr u32 kThreadGroups = kTileRows * kWidth / GROUP;
  static constexpr u32 kGroups = kThreads / kParts * kThreadGroups;

  GACT_FN constexpr u32 group_of(u32 quad, u32) { return 4u * quad * kWidth / GROUP; }
};

// The tile of a thread.
struct Place {
  u64 first;         // number of its first element
  u64 first_word;    // of its first column, in row of words 0 of the tile
  u64 octet;         // number of its first 8 rows, a multiple of 4
  u32 pair;          // number of its two columns
  u32 width;         // of a row
  u32 part, group;   // of its groups it has part `part`; the first of them, in the block
  u32 tile_rows;     // in the matrix, at most 32
  u32 rows[2];       // in each column
};

GACT_FN bool is_whole(const Place& place) { return place.rows[0] == kTileRows && place.rows[1] == kTileRows; }

// One group of the block, for the thread that describes it.
struct GroupPlace {
  u64 number;  // in the sections of scales and offsets
  u64 first;   // number of its first element
  u32 stride;
  u32 count;  // of its elements; 0 where there is no such group
};

GACT_FN u32 at_most(u64 value, u32 limit) { return value < limit ? static_cast<u32>(value) : limit; }

// How much of `length` lies from `start` on, at most `limit`.
GACT_FN u32 rest(u64 length, u64 start, u32 limit) { return start < length ? at_most(length - start, limit) : 0u; }

template <int BITS, int GROUP>
GACT_FN Place place_of_thread(ByColumn<GROUP>, u64 rows, u32 columns) {
  using Layout = ByColumn<GROUP>;
  const u32 across = (columns + Layout::kGroups - 1) / Layout::kGroups;
  const u32 down = block_of_grid() / across;
  Place place;
  place.part = thread_of_block() / Layout::kPairs;
  place.group = 2 * (thread_of_block() % Layout::kPairs);
  place.width = columns;
  const u32 column = (block_of_grid() - down * across) * Layout::kGroups + place.group;
  const u32 tile = down * Layout::kParts + place.part;
  const u64 row = static_cast<u64>(tile) * kTileRows;
  place.pair = column / 2;
  place.octet = static_cast<u64>(tile) * kOctets;
  place.first = row * columns + column;
  place.first_word = static_cast<u64>(tile) * BITS * columns + column;
  place.tile_rows = column < columns ? rest(rows, row, kTileRows) : 0u;
  place.rows[0] = place.rows[1] = place.tile_rows;
  return place;
}

template <int BITS, int GROUP>
GACT_FN Place place_of_thread(InMemoryOrder<GROUP>, u64 numel, u32) {
  using Layout = InMemoryOrder<GROUP>;
  Place place;
  place.part = thread_of_block() % Layout::kParts;
  place.group = thread_of_block() / Layout::kParts * Layout::kThreadGroups;
  place.width = Layout::kWidth;
  const u64 tile = static_cast<u64>(block_of_grid()) * (Layout::kThreads / Layout::kParts) +
                   thread_of_block() / Layout::kParts;
  const u64 start = tile * (kTileRows * Layout::kWidth);
  place.pair = place.part;
  place.octet = tile * kOctets;
  place.first = start + 2 * place.pair;
  place.first_word = tile * (BITS * Layout::kWidth) + 2 * place.pair;
  place.tile_rows = (rest(numel, start, kTileRows * Layout::kWidth) + Layout::kWidth - 1) / Layout::kWidth;
#pragma unroll
  for (u32 column = 0; column < 2; ++column) {
    const u32 left = rest(numel, place.first + column, kTileRows * Layout::kWidth);
    place.rows[column] = (left + Layout::kWidth - 1) / Layout::kWidth;
  }
  return place;
}

// Group `index` of the block.
template <int GROUP>
GACT_FN GroupPlace place_of_group(ByColumn<GROUP>, u32 index, u64 rows, u32 columns) {
  using Layout = ByColumn<GROUP>;
  const u32 across = (columns + Layout::kGroups - 1) / Layout::kGroups;
  const u32 down = block_of_grid() / across;
  const u32 column = (block_of_grid() - down * across) * Layout::kGroups + index;
  const u64 row = static_cast<u64>(down) * GROUP;
  return GroupPlace{static_cast<u64>(down) * columns + column, row * columns + column, columns,
                    column < columns ? rest(rows, row, GROUP) : 0u};
}

template <int GROUP>
GACT_FN GroupPlace place_of_group(InMemoryOrder<GROUP>, u32 index, u64 numel, u32) {
  const u64 number = static_cast<u64>(block_of_grid()) * InMemoryOrder<GROUP>::kGroups + index;
  return GroupPlace{number, number * GROUP, 1u, rest(numel, number * GROUP, GROUP)};
}

// In the sections of scales and offsets.
template <int GROUP>
GACT_FN u64 first_group_of(ByColumn<GROUP>, const Place& place) {
  return place.octet / (GROUP / 8) * place.width + 2 * place.pair;
}

template <int GROUP>
GACT_FN u64 first_group_of(InMemoryOrder<GROUP>, const Place& place) {
  return place.octet / kOctets * InMemoryOrder<GROUP>::kThreadGroups;
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

// Field number `index` of a code, in parts of 8, 4, 2 and 1 bits, the widest first.
template <int BITS>
struct Fields {
  static constexpr int kCount = (BITS >> 3) + (BITS >> 2 & 1) + (BITS >> 1 & 1) + (BITS & 1);

  GACT_FN constexpr u32 start(int index) {
    u32 start = 0;
    for (int i = 0; i < index; ++i) start += width(i);
    return start;
  }

  GACT_FN constexpr u32 width(int index) {
    int left = BITS;
    for (int i = 0; i < index; ++i) left -= left & 8 ? 8 : (left & 4 ? 4 : (left & 2 ? 2 : 1));
    return left & 8 ? 8 : (left & 4 ? 4 : (left & 2 ? 2 : 1));
  }

  // The bits of the field, at its lowest place, in each of four bytes.
  GACT_FN constexpr u32 mask(int index) { return ((1u << width(index)) - 1u) * 0x01010101u; }
};

// ---- elements, two of a row at a time

template <class T>
struct Row {
  u32 pair;
};

template <>
struct alignas(8) Row<float> {
  float values[2];
};

GACT_FN float value_of(const Row<float>& row, u32 column) { return row.values[column]; }

GACT_FN float value_of(const Row<Bfloat>& row, u32 column) {
  return float_of(column == 0 ? row.pair << 16 : row.pair & 0xFFFF0000u);
}

GACT_FN float value_of(const Row<Half>& row, u32 column) {
  return to_float(Half{static_cast<u16>(column == 0 ? row.pair : row.pair >> 16)});
}

GACT_FN Row<float> row_of(float first, float second, float) { return Row<float>{{first, second}}; }

template <class T>
GACT_FN Row<T> row_of(float first, float second, T type) {
  return Row<T>{narrow_pair(first, second, type)};
}

}  // namespace gact
