// Pack and unpack for groups of one column. A block is group_size rows; it is worked on in panels of columns, so that
// their elements are still in the cache when they are quantised after their range is known.
#pragma once

#include <type_traits>

#include "cpu/tile.h"

namespace gact {
namespace {

// Whether a cache line begins there, as stores that bypass the cache need.
inline bool is_line(const void* start) { return reinterpret_cast<u64>(start) % kCacheLine == 0; }

// Of _mm_prefetch.
constexpr int kToL1 = 3, kToL2 = 2;

// Always inlined, as g++ drops calls of a function that does nothing else.
template <int HINT>
GACT_INLINE void prefetch([[maybe_unused]] const void* start) {
#if defined(__x86_64__)
  _mm_prefetch(static_cast<const char*>(start), static_cast<_mm_hint>(HINT));
#endif
}

inline void end_of_streaming(bool stream) {
#if defined(__x86_64__)
  if (stream) _mm_sfence();
#endif
}

// Calls use(its row of words in a whole tile, its row in a tile of `rows` rows).
template <class Use>
void for_word_rows(int bits, int rows, Use&& use) {
  for (int field = 8; field > 0; field /= 2) {
    if ((bits & field) == 0) continue;
    for (int i = 0; i < word_rows(rows, field); ++i) {
      use(field_start(bits, field) + i, first_word_row(bits, field, rows) + i);
    }
  }
}

// ---- panels

struct Panel {
  i64 first_row, first_column;
  int rows, width;
  i64 first_group;
};

inline Panel panel_at(i64 unit, i64 numel, int group_size, i64 columns, int element_bytes) {
  const i64 width = panel_width(columns, group_size, element_bytes), panels = (columns + width - 1) / width;
  const i64 block = unit / panels, column = unit % panels * width;
  const i64 left_rows = numel / columns - block * group_size, left_columns = columns - column;
  return Panel{block * group_size, column, static_cast<int>(left_rows < group_size ? left_rows : group_size),
               static_cast<int>(left_columns < width ? left_columns : width), block * columns + column};
}

template <class Isa>
constexpr int kStrip = 2 * Isa::kLanes;  // columns of two vectors

// Rows of a strip.
template <class Isa, class T>
struct StripRows {
  T* first;
  i64 stride;

  T* at(int vector, i64 row) const { return first + row * stride + vector * Isa::kLanes; }
};

template <class Isa, class T>
StripRows<Isa, T> strip_of(T* first, i64 stride) {
  return StripRows<Isa, T>{first, stride};
}

// Those of each vector of columns of a panel.
template <class Isa>
using PanelNoise = PairVectors<Isa>[kMostGroups / Isa::kLanes];

template <class Isa>
void make_pairs(const Panel& panel, const RoundKeys& keys, PanelNoise<Isa>& pairs) {
  const u32 blocks_high = high_half(static_cast<u64>(panel.first_row) / kPhiloxRows);
  for (int column = 0; column < panel.width; column += Isa::kLanes) {
    const u32 first_pair = static_cast<u32>((panel.first_column + column) / 2);
    pairs[column / Isa::kLanes] = philox_pairs<Isa>(first_pair, blocks_high, keys);
  }
}

// For two vectors of columns, of which `pairs` is the first.
template <class Isa>
TileNoise<Isa> noise_at(const PairVectors<Isa>* pairs, const RoundKeys& keys, u64 seed, i64 row) {
  const u32 block = low_half(static_cast<u64>(row) / kPhiloxRows);
  return TileNoise<Isa>{{pairs, pairs + 1}, {block, block}, &keys, seed};
}

// ---- ranges

inline u32 raw(float value) { return bits_of(value); }

template <class T>
u16 raw(T value) {
  return value.bits;
}

inline float from_raw(u32 bits, float) { return float_of(bits); }

template <class T>
float from_raw(u16 bits, T) {
  return to_float(T{bits});
}

template <class T>
struct RangeArrays {
  using Unsigned = decltype(raw(T{}));
  using Signed = std::make_signed_t<Unsigned>;

  Signed most_signed[kMostGroups];
  Unsigned most[kMostGroups], least[kMostGroups];
};

template <int ROWS, class T>
void extend_ranges(const T* x, i64 stride, int width, RangeArrays<T>& arrays) {
  using Signed = typename RangeArrays<T>::Signed;
  using Unsigned = typename RangeArrays<T>::Unsigned;
  for (int c = 0; c < width; ++c) {
    Signed most_signed = arrays.most_signed[c];
    Unsigned most = arrays.most[c], least = arrays.least[c];
    for (int row = 0; row < ROWS; ++row) {
      const Unsigned bits = raw(x[row * stride + c]);
      const Signed as_signed = static_cast<Signed>(bits);
      most_signed = as_signed > most_signed ? as_signed : most_signed;
      most = bits > most ? bits : most;
      least = bits < least ? bits : least;
    }
    arrays.most_signed[c] = most_signed;
    arrays.most[c] = most;
    arrays.least[c] = least;
  }
}

// Floats as integers: among negative ones the largest is the lowest float, and beyond an infinity there is NaN. So of
// the largest signed, the largest unsigned and the smallest unsigned integer two are the range, and NaN is one of them.
template <class T>
void column_ranges(const T* x, i64 stride, const Panel& panel, GroupArrays& groups) {
  constexpr int kRowsAtOnce = 8;
  using Signed = typename RangeArrays<T>::Signed;
  using Unsigned = typename RangeArrays<T>::Unsigned;
  RangeArrays<T> arrays;
  for (int c = 0; c < panel.width; ++c) {
    arrays.most[c] = arrays.least[c] = raw(x[c]);
    arrays.most_signed[c] = static_cast<Signed>(raw(x[c]));
  }
  int row = 0;
  for (; row + kRowsAtOnce <= panel.rows; row += kRowsAtOnce) {
    extend_ranges<kRowsAtOnce>(x + row * stride, stride, panel.width, arrays);
  }
  for (; row < panel.rows; ++row) extend_ranges<1>(x + row * stride, stride, panel.width, arrays);
  for (int c = 0; c < panel.width; ++c) {
    const bool any_negative = static_cast<Signed>(arrays.most[c]) < 0, all_negative = arrays.most_signed[c] < 0;
    const float low = from_raw(any_negative ? arrays.most[c] : arrays.least[c], T{});
    const float high = from_raw(all_negative ? arrays.least[c] : static_cast<Unsigned>(arrays.most_signed[c]), T{});
    groups.low[c] = high != high ? high : low;
    groups.high[c] = high;
  }
}

// ---- pack

template <class Isa>
struct StripGroups {
  typename Isa::Floats offsets[2], inverses[2];
  typename Isa::Words sums[2];

  GACT_INLINE typename Isa::Floats offset(int vector, int) const { return offsets[vector]; }
  GACT_INLINE typename Isa::Floats inverse(int vector, int) const { return inverses[vector]; }
  GACT_INLINE void add_edges(int vector, int, typename Isa::Words edges) {
    sums[vector] = Isa::add_edges(sums[vector], edges);
  }
};

// Two lines of a row after another. So the pages of several rows are translated at a time, which takes longer than the
// lines of one page.
template <class T>
struct RowsAhead {
  static constexpr int kElements = 2 * kCacheLine / sizeof(T);

  const T* next;
  i64 stride;

  GACT_INLINE void advance() {
    prefetch<kToL1>(next);
    prefetch<kToL1>(next + kElements / 2);
    next += stride;
  }
};

// Beside the tile in this row and column: that of the next panel, or half of two adjacent ones.
template <class T>
RowsAhead<T> ahead_of(const T* next, i64 stride, int row, int column) {
  constexpr int kElements = RowsAhead<T>::kElements;
  const int first_row = row + column % kElements * kTileRows / kElements;
  return RowsAhead<T>{next + first_row * stride + column / kElements * kElements, stride};
}

// A last tile of fewer than 32 rows, filled with the offsets, whose codes and fractions are zero.
template <class Isa, class T, int BITS>
void quantise_rest(const StripRows<Isa, const T>& x, int rows, const float* offsets, StripGroups<Isa>& groups,
                   const TileNoise<Isa>& noise, const StripRows<Isa, u32>& out) {
  constexpr int kWidth = kStrip<Isa>;
  T values[kTileRows * kWidth];
  alignas(kCacheLine) u32 words[BITS * kWidth];
  for (int row = 0; row < kTileRows; ++row) {
    for (int c = 0; c < kWidth; ++c) {
      if (row < rows) {
        values[row * kWidth + c] = x.at(0, row)[c];
      } else {
        from_float(offsets[c], values + row * kWidth + c);
      }
    }
  }
  quantise_tile<Isa, T, BITS>(strip_of<Isa, const T>(values, kWidth), groups, noise, strip_of<Isa>(words, kWidth),
                              false, RowsAhead<T>{values, 0});
  for_word_rows(BITS, rows, [&](int in_whole, int row) {
    std::memcpy(out.at(0, row), words + in_whole * kWidth, kWidth * sizeof(u32));
  });
}

template <class Isa, class T, int BITS>
void quantise_panel(const PackJob& job, const Panel& panel, const RoundKeys& keys, const GroupArrays& groups,
                    u32 edges[kMostGroups], bool stream) {
  constexpr int kLanes = Isa::kLanes;
  const T* x = static_cast<const T*>(job.x) + panel.first_row * job.columns + panel.first_column;
  const i64 columns = job.columns;
  const bool in_next_block = panel.first_column + panel.width == columns;
  const T* next = in_next_block ? x - panel.first_column + job.group_size * columns : x + panel.width;
  PanelNoise<Isa> pairs;
  StripGroups<Isa> strips[kMostGroups / kStrip<Isa>];
  make_pairs<Isa>(panel, keys, pairs);
  for (int column = 0; column < panel.width; column += kLanes) {
    StripGroups<Isa>& strip = strips[column / kStrip<Isa>];
    const int vector = column / kLanes % 2;
    strip.offsets[vector] = Isa::load(groups.offset + column);
    strip.inverses[vector] = Isa::load(groups.inverse + column);
    strip.sums[vector] = Isa::set(0u);
  }
  for (int row = 0; row < panel.rows; row += kTileRows) {
    u32* words = job.words + (panel.first_row + row) / kTileRows * BITS * columns + panel.first_column;
    for (int column = 0; column < panel.width; column += kStrip<Isa>) {
      const int number = column / kStrip<Isa>;
      const auto tile = strip_of<Isa>(x + row * columns + column, columns);
      const auto out = strip_of<Isa>(words + column, columns);
      const TileNoise<Isa> noise = noise_at<Isa>(pairs + 2 * number, keys, job.seed, panel.first_row + row);
      if (row + kTileRows > panel.rows) {
        quantise_rest<Isa, T, BITS>(tile, panel.rows - row, groups.offset + column, strips[number], noise, out);
        continue;
      }
      quantise_tile<Isa, T, BITS>(tile, strips[number], noise, out, stream, ahead_of(next, columns, row, column));
    }
  }
  for (int column = 0; column < panel.width; column += kLanes) {
    Isa::store(edges + column, Isa::edge_sums(strips[column / kStrip<Isa>].sums[column / kLanes % 2]), false);
  }
}

template <class Isa, class T, int BITS>
void pack_panel(const PackJob& job, const Panel& panel, const RoundKeys& keys, bool stream) {
  alignas(kCacheLine) GroupArrays groups;
  alignas(kCacheLine) u32 edges[kMostGroups];
  const T* x = static_cast<const T*>(job.x) + panel.first_row * job.columns + panel.first_column;
  column_ranges(x, job.columns, panel, groups);
  describe_groups<T>(groups, panel.width, BITS, job.offsets + panel.first_group);
  quantise_panel<Isa, T, BITS>(job, panel, keys, groups, edges, stream);
  const u32 of_filling = 128u * static_cast<u32>(-panel.rows & (kTileRows - 1));
  i32 any_slow = 0;
  for (int c = 0; c < panel.width; ++c) {
    job.scales[panel.first_group + c] = stored_scale(groups, c, edges[c] - of_filling, panel.rows);
    any_slow |= groups.slow[c];
  }
  if (!any_slow) return;
  for (int c = 0; c < panel.width; ++c) {
    if (groups.slow[c]) pack_group<T>(job, panel.first_group + c);
  }
}

template <class Isa, class T, int BITS>
void pack_panels(const PackJob& job, i64 first, i64 last) {
  const StandardFloatMode standard;
  const RoundKeys keys(job.seed);
  const bool stream = job.stream && is_line(job.words);
  for (i64 unit = first; unit < last; ++unit) {
    pack_panel<Isa, T, BITS>(job, panel_at(unit, job.numel, job.group_size, job.columns, sizeof(T)), keys, stream);
  }
  end_of_streaming(stream);
}

// ---- unpack

// What decoding needs of some groups.
struct DecodeArrays {
  float unit[kMostGroups], base[kMostGroups];
  u32 mask[kMostGroups];
  bool any_rare, any_dithered;  // any_rare: of those that unpack_group decodes
};

// Whether a group can decode to subnormal numbers other than zero. Units are multiples of 2^-125, so only if its
// offset, of 8 significant bits, is below 2^-119.
template <class Isa, class T>
bool needs_subnormals(u16 stored_offset) {
  if constexpr (!Isa::kFlushesSubnormals || !std::is_same_v<T, Bfloat>) return false;
  return (stored_offset & 0x7FFFu) - 1u < 0x0400u - 1u;
}

template <class Isa, class T>
void read_groups(const u16* scales, const u16* offsets, int count, DecodeArrays& arrays) {
  u32 any = 0, any_subnormal = 0;
  for (int g = 0; g < count; ++g) {
    const u32 stored = scales[g];
    const float step = float_of((stored & 0x7FFEu) << 16);
    const float unit = step * kUnit;
    const float offset = offset_value(offsets[g], step, T{});
    arrays.unit[g] = unit;
    arrays.base[g] = (stored & kDitherFlag) != 0 ? dithered_base(offset, unit) : offset;
    arrays.mask[g] = (stored & kDitherFlag) != 0 ? ~0u : 0u;
    any |= stored;
    any_subnormal |= needs_subnormals<Isa, T>(offsets[g]);
  }
  arrays.any_rare = (any & kSpecialFlag) != 0 || any_subnormal != 0;
  arrays.any_dithered = (any & kDitherFlag) != 0;
}

template <class Isa, class T>
void unpack_rare_groups(const UnpackJob& job, i64 first, int count) {
  for (i64 group = first; group < first + count; ++group) {
    const bool special = (job.scales[group] & kSpecialFlag) != 0;
    if (special || needs_subnormals<Isa, T>(job.offsets[group])) unpack_group<T>(job, group);
  }
}

template <class Isa>
struct StripUnits {
  typename Isa::Floats units[2], bases[2];
  typename Isa::Words masks[2];

  static constexpr bool kAdjacent = true;

  GACT_INLINE typename Isa::Floats unit(int vector, int) const { return units[vector]; }
  GACT_INLINE typename Isa::Floats base(int vector, int) const { return bases[vector]; }
  GACT_INLINE typename Isa::Words mask(int vector, int) const { return masks[vector]; }
};

template <class Isa>
StripUnits<Isa> units_at(const DecodeArrays& arrays, int column) {
  StripUnits<Isa> found;
  for (int v = 0; v < 2; ++v) {
    found.units[v] = Isa::load(arrays.unit + column + v * Isa::kLanes);
    found.bases[v] = Isa::load(arrays.base + column + v * Isa::kLanes);
    found.masks[v] = Isa::load(arrays.mask + column + v * Isa::kLanes);
  }
  return found;
}

template <class Isa, class T, int BITS>
void decode_rest(const StripRows<Isa, const u32>& words, int rows, const StripUnits<Isa>& groups,
                 const TileNoise<Isa>* noise, const StripRows<Isa, T>& out) {
  constexpr int kWidth = kStrip<Isa>;
  alignas(kCacheLine) u32 whole[BITS * kWidth] = {};
  T values[kTileRows * kWidth];
  for_word_rows(BITS, rows, [&](int in_whole, int row) {
    std::memcpy(whole + in_whole * kWidth, words.at(0, row), kWidth * sizeof(u32));
  });
  decode_tile<Isa, BITS>(strip_of<Isa, const u32>(whole, kWidth), groups, noise, strip_of<Isa>(values, kWidth), false);
  for (int row = 0; row < rows; ++row) std::memcpy(out.at(0, row), values + row * kWidth, kWidth * sizeof(T));
}

// Past the cache where the processor has stores that do that.
inline void write_line(void* out, const void* line) {
#if defined(__AVX__)
  for (int i = 0; i < kCacheLine / 32; ++i) {
    _mm256_stream_si256(static_cast<__m256i*>(out) + i, _mm256_load_si256(static_cast<const __m256i*>(line) + i));
  }
#else
  std::memcpy(out, line, kCacheLine);
#endif
}

// The rows of a block, where a strip is less than a cache line: a line that is written past the cache piece by piece
// takes as long as several lines. Panels consist of whole lines.
template <class Isa, class T>
struct Lines {
  static constexpr int kWidth = kCacheLine / sizeof(T);
  static constexpr bool kNeeded = kStrip<Isa> < kWidth;

  alignas(kCacheLine) T values[kPhiloxRows * kWidth];

  // The strip in this column; rows are counted from the first one of the tile that has the block.
  StripRows<Isa, T> strip(int column, int block) {
    return strip_of<Isa>(values + column % kWidth - block * kPhiloxRows * kWidth, kWidth);
  }

  // When the strip in this column is there, if it is a line's last one. out: the first row's part of that strip.
  void write_whole(T* out, i64 stride, int column) const {
    const int before = column % kWidth;
    if (before + kStrip<Isa> < kWidth) return;
    for (int row = 0; row < kPhiloxRows; ++row) write_line(out + row * stride - before, values + row * kWidth);
  }
};

// What a panel is decoded with, beside its groups.
template <class Isa>
struct PanelUnpack {
  const UnpackJob& job;
  const Panel& panel;
  const RoundKeys& keys;
  const PairVectors<Isa>* pairs;

  // The words and elements of a tile from the panel's first column on.
  const u32* words(int tile, int bits) const {
    return job.words + (panel.first_row + tile) / kTileRows * bits * job.columns + panel.first_column;
  }
  template <class T>
  T* out(int tile) const {
    return static_cast<T*>(job.out) + (panel.first_row + tile) * job.columns + panel.first_column;
  }
};

// A row of blocks of whole tiles. Not inlined, so that compilers keep constants from one strip to the next.
template <class Isa, class T, int BITS>
__attribute__((noinline)) void decode_blocks(const PanelUnpack<Isa> unpack, const DecodeArrays& arrays, int tile,
                                             int block, bool stream) {
  const i64 columns = unpack.job.columns, first_row = unpack.panel.first_row + tile;
  const u64 seed = unpack.job.seed;
  const int width = unpack.panel.width;
  const u32* words = unpack.words(tile, BITS);
  T* out = unpack.template out<T>(tile);
  Lines<Isa, T> lines;
  for (int column = 0; column < width; column += kStrip<Isa>) {
    const StripUnits<Isa> groups = units_at<Isa>(arrays, column);
    const auto stored = strip_of<Isa>(words + column, columns);
    const auto values = strip_of<Isa>(out + column, columns);
    const TileNoise<Isa> noise = noise_at<Isa>(unpack.pairs + column / Isa::kLanes, unpack.keys, seed, first_row);
    const TileNoise<Isa>* used = arrays.any_dithered ? &noise : nullptr;
    if (Lines<Isa, T>::kNeeded && stream) {
      decode_block<Isa, BITS>(stored, groups, used, lines.strip(column, block), false, block);
      lines.write_whole(values.at(0, block * kPhiloxRows), columns, column);
    } else {
      decode_block<Isa, BITS>(stored, groups, used, values, stream, block);
    }
  }
}

// A last tile of fewer than 32 rows.
template <class Isa, class T, int BITS>
void decode_last(const PanelUnpack<Isa>& unpack, const DecodeArrays& arrays, int tile) {
  const i64 columns = unpack.job.columns;
  const int rows = unpack.panel.rows - tile;
  for (int column = 0; column < unpack.panel.width; column += kStrip<Isa>) {
    const TileNoise<Isa> noise =
        noise_at<Isa>(unpack.pairs + column / Isa::kLanes, unpack.keys, unpack.job.seed, unpack.panel.first_row + tile);
    decode_rest<Isa, T, BITS>(strip_of<Isa>(unpack.words(tile, BITS) + column, columns), rows,
                              units_at<Isa>(arrays, column), arrays.any_dithered ? &noise : nullptr,
                              strip_of<Isa>(unpack.template out<T>(tile) + column, columns));
  }
}

// A row of blocks after the other, so that large outputs are written in the order of memory.
template <class Isa, class T, int BITS>
void unpack_panel(const UnpackJob& job, const Panel& panel, const RoundKeys& keys, bool stream) {
  alignas(kCacheLine) DecodeArrays arrays;
  PanelNoise<Isa> pairs;
  read_groups<Isa, T>(job.scales + panel.first_group, job.offsets + panel.first_group, panel.width, arrays);
  if (arrays.any_dithered) make_pairs<Isa>(panel, keys, pairs);
  const PanelUnpack<Isa> unpack{job, panel, keys, pairs};
  int tile = 0;
  for (; tile + kTileRows <= panel.rows; tile += kTileRows) {
    for (int block = 0; block < kBlocks; ++block) decode_blocks<Isa, T, BITS>(unpack, arrays, tile, block, stream);
  }
  if (tile < panel.rows) decode_last<Isa, T, BITS>(unpack, arrays, tile);
  if (arrays.any_rare) unpack_rare_groups<Isa, T>(job, panel.first_group, panel.width);
}

template <class Isa, class T, int BITS>
void unpack_panels(const UnpackJob& job, i64 first, i64 last) {
  const StandardFloatMode standard;
  const RoundKeys keys(job.seed);
  const bool stream = job.stream && is_line(job.out);
  for (i64 unit = first; unit < last; ++unit) {
    unpack_panel<Isa, T, BITS>(job, panel_at(unit, job.numel, job.group_size, job.columns, sizeof(T)), keys, stream);
  }
  end_of_streaming(stream);
}

}  // namespace
}  // namespace gact
