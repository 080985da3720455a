// CUDA kernels pack_columns and unpack_columns: groups of one column. Modules and options are those of memory_order.cu.
// The blocks of the grid take the tiles of a row block one after the other, then those of the next.
#include "cuda/column_tile.h"

namespace gact {

// ---- pack

// What rounding a column needs and, in threads of the first slice, what is stored of it.
struct ColumnGrid {
  float offset, inverse;
  float scale;
  bool slow, may_dither;
};

// From the ranges of the slices; threads of the first slice compute it for all. Synchronises the block.
template <class T, int BITS, class Shape>
GACT_FN ColumnGrid grid_of_column(Ends ends, const ColumnPlace& place, u16* stored_offset,
                                  u32 exchanged[2][Shape::kSlices][Shape::kWidth]) {
  exchanged[0][place.slice][place.thread] = bits_of(ends.low);
  exchanged[1][place.slice][place.thread] = bits_of(ends.high);
  sync_block();
  ColumnGrid column{};
  if (place.slice == 0) {
#pragma unroll
    for (int slice = 1; slice < Shape::kSlices; ++slice) {
      ends.low = smaller(ends.low, float_of(exchanged[0][slice][place.thread]));
      ends.high = larger(ends.high, float_of(exchanged[1][slice][place.thread]));
    }
    constexpr float kLevels = (1 << BITS) - 1;
    const Grid grid = finest_grid(ends.low + 0.0f, ends.high, kLevels, T{});  // + 0.0 turns -0.0 into 0.0
    const PlainGroup plain = plain_group(grid, ends.low, ends.high, kLevels, T{});
    column = ColumnGrid{grid.offset, grid.inverse, grid.scale, plain.slow, plain.may_dither};
    if (place.inside) *stored_offset = static_cast<u16>(grid.stored_offset);
  }
  if (Shape::kSlices == 1) return column;
  if (place.slice == 0) {
    exchanged[0][0][place.thread] = bits_of(column.offset);
    exchanged[1][0][place.thread] = bits_of(column.inverse);
  }
  sync_block();
  column.offset = float_of(exchanged[0][0][place.thread]);
  column.inverse = float_of(exchanged[1][0][place.thread]);
  return column;
}

// Leaves the planes of 16 rows in shared memory; returns `edges` and the edge_of of what it rounds.
template <class T, class Shape, int BITS>
GACT_FN u32 quantise_batch(const u32* words, int batch, const ColumnGrid& column, const ColumnPlace& place,
                           const NoisePlace& noise, u32 edges, ColumnMemory<Shape, BITS>& memory) {
  using Joined = JoinedCodes<BITS>;
  u32 joined = 0;
#pragma unroll
  for (int quad = 0; quad < kBatchRows / 4; quad += 2) {
    float values[kLaneElements];
    u32 noise_words[kLaneElements], codes[2];
    widen_rows(words, batch * kBatchRows + 4 * quad, T{}, values);
#pragma unroll
    for (int i = 0; i < kLaneElements; ++i) {
      noise_words[i] = memory.noise[place.slice][4 * quad + i][noise.words[i % 2]];
    }
    edges = quantise<BITS>(values, column.offset, column.inverse, noise_words, noise.selectors, edges, codes);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int number = (quad + half) % Joined::kQuads;
      joined = (number == 0 ? 0u : joined) | codes[half] << (Joined::kPlanes * number);
      if (number != Joined::kQuads - 1) continue;
      const u32 word = transpose_warp(joined);
      const u32 line = row_of_lane<BITS>((quad + half) / Joined::kQuads) * BITS + plane_of_lane<BITS>();
      if (plane_of_lane<BITS>() < BITS) memory.planes[place.slice][line][place.thread / kWarpLanes] = word;
    }
  }
  return edges;
}

template <class Shape, int BITS, int GROUP>
GACT_FN void store_batch(const ColumnMemory<Shape, BITS>& memory, const ColumnPlace& place, const PlaneWords& words,
                         int batch) {
  u32* target = words_of_batch<BITS>(words, batch, place);
#pragma unroll
  for (int i = 0; i < kPlaneWords<BITS>; ++i) {
    if (!word_exists<BITS>(words, batch, i)) continue;
    target[i * (GROUP / 16)] = memory.planes[place.slice][words.row * BITS + words.plane + 2 * i][words.piece];
  }
}

// The sum over the slices, without the rows beyond the end, which repeat the last one.
template <class T, class Shape, int BITS, int GROUP>
GACT_FN u32 edges_of_column(const u32 edges[Shape::kSlices][Shape::kWidth], const ColumnPlace& place,
                            const ColumnGrid& column, const T* x) {
  u32 sum = 0;
#pragma unroll
  for (int slice = 0; slice < Shape::kSlices; ++slice) sum += edges[slice][place.thread];
  if (place.rows == GROUP) return sum;
  const float last = to_float(x[row_of_tile(place, place.rows - 1) + place.thread]);
  constexpr i32 kLimit = ((1 << BITS) - 1) << 16;
  const u32 repeated = GROUP - place.rows;
  return sum - repeated * edge_of(scaled_value(last, column.offset, column.inverse, kLimit));
}

// Zeros beyond the end, in a set that is short; by the last block of the grid.
template <class Shape, int BITS, int GROUP>
GACT_FN void clear_rest(u64 numel, u8* planes) {
  const u32 words = static_cast<u32>(GROUP - numel % GROUP) % GROUP / kWarpLanes;
  for (u32 i = thread_of_block(); i < words * BITS; i += Shape::kThreads) {
    *plane_word<BITS, GROUP>(planes, numel + i % words * kWarpLanes, i / words) = 0u;
  }
}

// The columns of a warp by the definitions of group_codec.h, whatever their values; overwrites their planes.
template <class T, int BITS, int GROUP>
GACT_FN void pack_any_columns(const T* x, u64 seed, const Buffer& buffer, const ColumnPlace& place) {
  const u64 start = row_of_tile(place, 0) + place.thread;
  const u32 lane = lane_id();
  Extent extent = no_extent();
#pragma unroll 1
  for (u32 row = 0; row < place.rows; ++row) extend(extent, to_float(x[start + wide_product(row, place.columns)]));
  const Group group = describe(finished(extent), BITS, T{});
  u32 edges = 0;
#pragma unroll 1
  for (u32 row = 0; row < place.rows; ++row) {
    const u64 element = start + wide_product(row, place.columns);
    i32 scaled;
    const u32 code = code_of(to_float(x[element]), group, BITS, noise_of(element, seed), &scaled);
    edges += edge_of(scaled);
    u32 word = 0;
#pragma unroll
    for (u32 plane = 0; plane < BITS; ++plane) {
      const u32 lanes = ballot((code >> plane & 1u) != 0);
      if (lane == plane) word = lanes;
    }
    if (lane < BITS) *plane_word<BITS, GROUP>(buffer.planes, element - lane, lane) = word;
  }
  const bool dithered = group.may_dither && dither_pays(edges, static_cast<int>(place.rows));
  const u64 number = group_of_thread<GROUP>(place);
  buffer.scales[number] = static_cast<u16>(group.stored_scale | (dithered ? kDitherFlag : 0));
  buffer.offsets[number] = static_cast<u16>(group.grid.stored_offset);
}

template <class T, int BITS, int GROUP, class Shape>
GACT_FN void pack_columns(const T* x, i64 rows, i64 columns, u64 seed, const Buffer& buffer,
                          ColumnMemory<Shape, BITS>& memory) {
  const ColumnPlace place = place_of_thread<Shape, GROUP>(rows, columns);
  // Before the elements are loaded, as there are not enough registers for both.
  make_batch_noise<Shape>(place, 0, seed, false, memory.noise[place.slice]);
  u32 words[Shape::kWords];
  load_column<Shape>(x, place, words);
  const u64 group = group_of_thread<GROUP>(place);
  const ColumnGrid column =
      grid_of_column<T, BITS, Shape>(ends_of_column(words, T{}), place, buffer.offsets + group, memory.exchanged);
  const NoisePlace noise = noise_of_column(place);
  const PlaneWords plane_words = plane_words_of_thread<Shape, BITS, GROUP>(place, buffer.planes);
  u32 edges = 0;
#pragma unroll
  for (int batch = 0; batch < kBatches; ++batch) {
    edges = quantise_batch<T, Shape, BITS>(words, batch, column, place, noise, edges, memory);
    if (batch == kBatches - 1) memory.exchanged[0][place.slice][place.thread] = edges;
    sync_block();
    store_batch<Shape, BITS, GROUP>(memory, place, plane_words, batch);
    if (batch == kBatches - 1) break;
    make_batch_noise<Shape>(place, batch + 1, seed, false, memory.noise[place.slice]);
    sync_block();
  }
  if (block_of_grid() + 1 == blocks_of_grid()) clear_rest<Shape, BITS, GROUP>(rows * columns, buffer.planes);
  sync_block();  // orders this after the writes above for columns with rare values
  if (place.slice != 0 || !place.inside) return;
  const u32 all_edges = edges_of_column<T, Shape, BITS, GROUP>(memory.exchanged[0], place, column, x);
  const bool dithered = column.may_dither && dither_pays(all_edges, static_cast<int>(place.rows));
  buffer.scales[group] = static_cast<u16>((bits_of(column.scale) >> 16) | (dithered ? kDitherFlag : 0));
  if (any_lane(column.slow)) pack_any_columns<T, BITS, GROUP>(x, seed, buffer, place);
}

// ---- unpack

// What decoding the elements of one column needs; see decode_plain.
struct ColumnDecoder {
  u32 mask;
  float base, unit;
};

template <class T>
GACT_FN ColumnDecoder decoder_of(u16 stored, float offset, T) {
  const bool dithered = (stored & kDitherFlag) != 0;
  const float unit = step_of(stored) * kDitherUnit;
  return ColumnDecoder{dithered ? 0x00FFFFFFu : 0x00FF0000u, dithered ? dithered_base(offset, unit) : offset, unit};
}

// The 16 rows of a batch whose planes are in shared memory.
template <class T, class Shape, int BITS>
GACT_FN void decode_batch(const ColumnMemory<Shape, BITS>& memory, const ColumnPlace& place, const NoisePlace& noise,
                          const ColumnDecoder& decoder, int rows, T* out) {
  using Joined = JoinedCodes<BITS>;
  u32 joined = 0;
#pragma unroll
  for (int quad = 0; quad < kBatchRows / 4; ++quad) {
    const int number = quad % Joined::kQuads;
    if (number == 0) {
      const u32 line = row_of_lane<BITS>(quad / Joined::kQuads) * BITS + plane_of_lane<BITS>();
      const bool exists = plane_of_lane<BITS>() < BITS;
      joined = transpose_warp(exists ? memory.planes[place.slice][line][place.thread / kWarpLanes] : 0u);
    }
    const u32 codes = joined >> (Joined::kPlanes * number) & ((1u << BITS) - 1u) * 0x01010101u;
    float values[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const u32 word = memory.noise[place.slice][4 * quad + i][noise.words[i % 2]];
      const u32 selector = noise.selectors[i % 2] + (4u + static_cast<u32>(i)) * 0x100u;
      values[i] = decode_plain<BITS>(select_bytes(word, codes, selector), decoder.mask, decoder.base, decoder.unit);
    }
    out = store_rows(values, place.columns, rows - 4 * quad, out);
  }
}

// The thread's rows of a column with infinities or NaN, by the definition in group_codec.h; none of them has noise.
template <class T, int BITS, int GROUP>
GACT_FN void unpack_special_column(const Buffer& buffer, const ColumnPlace& place, u16 stored, float offset, T* out) {
  const u32 lane = lane_id();
  const u32 first = place.slice * kSliceRows, rows = rows_of_slice(place);
#pragma unroll 1
  for (u32 row = 0; row < rows && row < kSliceRows; ++row) {
    const u64 element = row_of_tile(place, first + row) + place.thread;
    u32 code = 0;
#pragma unroll
    for (u32 plane = 0; plane < BITS; ++plane) {
      code |= (*plane_word<BITS, GROUP>(buffer.planes, element - lane, plane) >> lane & 1u) << plane;
    }
    from_float(decode(code, stored, offset, BITS, 0u), out + element);
  }
}

template <class T, int BITS, int GROUP, class Shape>
GACT_FN void unpack_columns(const Buffer& buffer, i64 rows, i64 columns, u64 seed, T* out,
                            ColumnMemory<Shape, BITS>& memory) {
  const ColumnPlace place = place_of_thread<Shape, GROUP>(rows, columns);
  const PlaneWords plane_words = plane_words_of_thread<Shape, BITS, GROUP>(place, buffer.planes);
  u32 words[kBatches][kPlaneWords<BITS>];
#pragma unroll
  for (int batch = 0; batch < kBatches; ++batch) {
    const u32* source = words_of_batch<BITS>(plane_words, batch, place);
#pragma unroll
    for (int i = 0; i < kPlaneWords<BITS>; ++i) {
      words[batch][i] = word_exists<BITS>(plane_words, batch, i) ? source[i * (GROUP / 16)] : 0u;
    }
  }
  const NoisePlace noise = noise_of_column(place);
  const u64 group = group_of_thread<GROUP>(place);
  const u16 stored = place.inside ? buffer.scales[group] : u16{0};
  const float offset = place.inside ? offset_value(buffer.offsets[group], step_of(stored), T{}) : 0.0f;
  const ColumnDecoder decoder = decoder_of(stored, offset, T{});
  const u32 odd = sizeof(T) == 2 ? place.thread % 2u : 0u;  // of two rows, the one that the thread stores
#pragma unroll
  for (int batch = 0; batch < kBatches; ++batch) {
    if (batch > 0) sync_block();  // until the previous batch has been read
    make_batch_noise<Shape>(place, batch, seed, true, memory.noise[place.slice]);
#pragma unroll
    for (int i = 0; i < kPlaneWords<BITS>; ++i) {
      const u32 plane = plane_words.plane + 2 * i;
      if (plane < BITS) memory.planes[place.slice][plane_words.row * BITS + plane][plane_words.piece] = words[batch][i];
    }
    sync_block();
    const u32 first_row = place.slice * kSliceRows + batch * kBatchRows + odd;
    const int rows_left = place.inside ? static_cast<int>(place.rows - first_row) : 0;
    T* target = out + row_of_tile(place, first_row) + (place.thread - odd);
    decode_batch<T, Shape, BITS>(memory, place, noise, decoder, rows_left, target);
  }
  sync_warp();  // orders this after what other lanes wrote of special columns
  if (place.inside && (stored & kSpecialFlag) != 0) {
    unpack_special_column<T, BITS, GROUP>(buffer, place, stored, offset, out);
  }
}

// The element type and the tile of this module.
using Stored = GACT_ELEMENT;
using Shape = ColumnTile<Stored, GACT_GROUP>;

}  // namespace gact

GACT_KERNEL(gact::Shape::kThreads, gact::Shape::kBlocks)
pack_columns(const gact::Stored* x, gact::i64 rows, gact::i64 columns, gact::u64 seed, gact::u8* buffer,
             gact::i64 scale_start, gact::i64 offset_start) {
  using namespace gact;
  GACT_SHARED ColumnMemory<Shape, GACT_BITS> memory;
  pack_columns<Stored, GACT_BITS, GACT_GROUP>(x, rows, columns, seed, sections_of(buffer, scale_start, offset_start),
                                              memory);
}

GACT_KERNEL(gact::Shape::kThreads, gact::Shape::kBlocks)
unpack_columns(gact::u8* buffer, gact::i64 rows, gact::i64 columns, gact::u64 seed, gact::Stored* out,
               gact::i64 scale_start, gact::i64 offset_start) {
  using namespace gact;
  GACT_SHARED ColumnMemory<Shape, GACT_BITS> memory;
  unpack_columns<Stored, GACT_BITS, GACT_GROUP>(sections_of(buffer, scale_start, offset_start), rows, columns, seed,
                                                out, memory);
}
