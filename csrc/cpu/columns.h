// The loops of pack and unpack for groups of one column of group_size rows. A block is group_size rows; the groups of
// its columns are stored side by side and its bits in memory order, so that 64 consecutive elements are quantised and
// decoded at once whatever their columns: their parameters are read from arrays. Each array repeats its first 64
// entries at its end, for elements that continue in the next row.
//
// An Isa provides:
//   quantise_columns<T, BITS>(x, offset, inverse, words, edges, planes, stride)   64 elements to 8 bytes in each plane;
//                                                                          adds their edge_of to `edges`, saturating
//   decode_columns<T, BITS>(planes, stride, unit, base, mask, words, out, stream)   base + units * unit of 64 elements,
//                                                                          where `mask` has the noise that is
//                                                                          subtracted
#pragma once

#include "cpu/memory_order.h"

namespace gact {
namespace {

constexpr int kChunk = 64;
constexpr int kRowsAtOnce = 8;

// The arrays of a block, in memory that the caller owns.
class ColumnArrays {
 public:
  ColumnArrays(float* scratch, i64 columns) : scratch_(scratch), columns_(columns) {}

  float* low() { return array(0); }
  float* high() { return array(1); }
  float* offset() { return array(2); }
  float* inverse() { return array(3); }
  float* scale() { return array(4); }
  i32* may_dither() { return reinterpret_cast<i32*>(array(5)); }
  i32* slow() { return reinterpret_cast<i32*>(array(6)); }
  u16* edges() { return reinterpret_cast<u16*>(array(7)); }

  float* unit() { return array(0); }
  float* base() { return array(1); }
  u32* mask() { return reinterpret_cast<u32*>(array(2)); }

 private:
  float* array(int number) { return scratch_ + number * (columns_ + kChunk); }

  float* scratch_;
  i64 columns_;
};

template <class Value>
void repeat_start(Value* array, i64 columns) {
  for (int i = 0; i < kChunk; ++i) array[columns + i] = array[i];
}

struct Block {
  i64 start;  // its first element
  i64 numel;
  int rows;
};

inline Block block_at(i64 index, i64 numel, int group_size, i64 columns) {
  const i64 start = index * group_size * columns;
  const i64 left = (numel - start) / columns;
  const int rows = static_cast<int>(left < group_size ? left : group_size);
  return Block{start, rows * columns, rows};
}

// The byte of the first plane that holds an element. The group size is a power of two, which saves a division.
inline i64 plane_byte(i64 element, int bits, int group_size) {
  const i64 set = element >> __builtin_ctz(static_cast<unsigned>(group_size));
  return set * (bits * group_size / 8) + (element & (group_size - 1)) / 8;
}

// The bits of a float as an integer in the same order, NaN beyond the infinities; and back.
inline i32 ordered(float value) {
  const i32 bits = static_cast<i32>(bits_of(value));
  return bits ^ ((bits >> 31) & 0x7FFFFFFF);
}

template <class T>
i16 ordered(T value) {
  const i16 bits = static_cast<i16>(value.bits);
  return static_cast<i16>(bits ^ ((bits >> 15) & 0x7FFF));
}

inline float float_in_order(i32 order, float) {
  return float_of(static_cast<u32>(order ^ ((order >> 31) & 0x7FFFFFFF)));
}

template <class T>
float float_in_order(i16 order, T) {
  return to_float(T{static_cast<u16>(order ^ ((order >> 15) & 0x7FFF))});
}

template <int ROWS, class T, class Order>
void extend_ranges(const T* x, i64 columns, Order* __restrict least, Order* __restrict most) {
  for (i64 c = 0; c < columns; ++c) {
    Order low = least[c], high = most[c];
    for (int i = 0; i < ROWS; ++i) {
      const Order value = ordered(x[i * columns + c]);
      low = value < low ? value : low;
      high = value > high ? value : high;
    }
    least[c] = low;
    most[c] = high;
  }
}

// The range of each column; `low` is NaN where an element is.
template <class T>
void column_ranges(const T* x, int rows, i64 columns, ColumnArrays& arrays) {
  using Order = decltype(ordered(T{}));
  Order* least = reinterpret_cast<Order*>(arrays.offset());  // unused until the ranges are known
  Order* most = reinterpret_cast<Order*>(arrays.inverse());
  for (i64 c = 0; c < columns; ++c) least[c] = most[c] = ordered(x[c]);
  int row = 0;
  for (; row + kRowsAtOnce <= rows; row += kRowsAtOnce) {
    extend_ranges<kRowsAtOnce>(x + row * columns, columns, least, most);
  }
  for (; row < rows; ++row) extend_ranges<1>(x + row * columns, columns, least, most);
  for (i64 c = 0; c < columns; ++c) {
    const float low = float_in_order(least[c], T{}), high = float_in_order(most[c], T{});
    arrays.low()[c] = high != high ? high : low;
    arrays.high()[c] = high;
  }
}

// Offsets, scales and the other parameters of quantising, from the ranges.
template <class T>
void describe_columns(const PackJob& job, i64 first_group, ColumnArrays& arrays) {
  constexpr int kBatch = kBlockElements / 64;
  const float levels = static_cast<float>((1 << job.bits) - 1);
  for (i64 start = 0; start < job.columns; start += kBatch) {
    BlockGroups groups;
    const int count = static_cast<int>(job.columns - start < kBatch ? job.columns - start : kBatch);
    std::memcpy(groups.low, arrays.low() + start, count * sizeof(float));
    std::memcpy(groups.high, arrays.high() + start, count * sizeof(float));
    describe_groups<T>(groups, count, levels);
    std::memcpy(arrays.offset() + start, groups.offset, count * sizeof(float));
    std::memcpy(arrays.inverse() + start, groups.inverse, count * sizeof(float));
    std::memcpy(arrays.scale() + start, groups.scale, count * sizeof(float));
    std::memcpy(arrays.may_dither() + start, groups.may_dither, count * sizeof(i32));
    std::memcpy(arrays.slow() + start, groups.slow, count * sizeof(i32));
    for (int g = 0; g < count; ++g) {
      job.offsets[first_group + start + g] = static_cast<u16>(groups.stored_offset[g]);
    }
  }
  repeat_start(arrays.offset(), job.columns);
  repeat_start(arrays.inverse(), job.columns);
}

// One column alone, by the definitions of group_codec.h; its bits are overwritten.
template <class T>
void pack_column(const PackJob& job, const Block& block, i64 group, i64 column) {
  const T* x = static_cast<const T*>(job.x) + block.start;
  Extent extent = no_extent();
  for (int row = 0; row < block.rows; ++row) extend(extent, to_float(x[row * job.columns + column]));
  const Group described = describe(finished(extent), job.bits, T{});
  u32 edges = 0;
  LaneNoise noise(job.seed);
  for (int row = 0; row < block.rows; ++row) {
    const i64 element = row * job.columns + column;
    i32 scaled;
    const u32 code = code_of(to_float(x[element]), described, job.bits, noise.of(block.start + element), &scaled);
    edges += edge_of(scaled);
    u8* byte = job.planes + plane_byte(block.start + element, job.bits, job.group_size);
    const int bit = static_cast<int>((block.start + element) % 8);
    for (int plane = 0; plane < job.bits; ++plane, byte += job.group_size / 8) {
      *byte = static_cast<u8>((*byte & ~(1u << bit)) | ((code >> plane) & 1u) << bit);
    }
  }
  const bool dithered = described.may_dither && dither_pays(edges, block.rows);
  job.scales[group] = described.stored_scale | (dithered ? kDitherFlag : 0);
  job.offsets[group] = static_cast<u16>(described.grid.stored_offset);
}

// Fewer than 64 elements at the end of a tensor, whose planes are zeros so far.
template <class T, int BITS>
void quantise_rest(const PackJob& job, i64 element, i64 column, ColumnArrays& arrays) {
  constexpr i32 kLimit = ((1 << BITS) - 1) << 16;
  LaneNoise noise(job.seed);
  for (; element < job.numel; ++element, ++column) {
    const float value = to_float(static_cast<const T*>(job.x)[element]);
    const i32 scaled = scaled_value(value, arrays.offset()[column], arrays.inverse()[column], kLimit);
    arrays.edges()[column] = static_cast<u16>(arrays.edges()[column] + edge_of(scaled));
    const u32 code = (static_cast<u32>(scaled) + noise.of(element)) >> 16;
    u8* byte = job.planes + plane_byte(element, BITS, job.group_size);
    for (int plane = 0; plane < BITS; ++plane, byte += job.group_size / 8) {
      *byte |= static_cast<u8>(((code >> plane) & 1u) << (element % 8));
    }
  }
}

// Sums of elements past the end of a row belong to the first columns.
inline void fold_edges(u16* edges, i64 columns) {
  for (int i = 0; i < kChunk; ++i) {
    const u32 sum = u32{edges[i % columns]} + edges[columns + i];
    edges[i % columns] = static_cast<u16>(sum < 0xFFFFu ? sum : 0xFFFFu);
  }
}

template <class Isa, class T, int BITS>
void quantise_columns(const PackJob& job, UnitNoise<Isa>& noise, const Block& block, ColumnArrays& arrays) {
  const T* x = static_cast<const T*>(job.x) + block.start;
  // Copies, because a store through a u8* might alias any of these as far as the compiler knows.
  const float* offsets = arrays.offset();
  const float* inverses = arrays.inverse();
  u16* edges = arrays.edges();
  u8* planes = job.planes;
  const i64 columns = job.columns;
  const int group_size = job.group_size;
  std::memset(edges, 0, (columns + kChunk) * sizeof(u16));
  i64 i = 0, column = 0;
  for (; i + kChunk <= block.numel; i += kChunk) {
    const i64 element = block.start + i;
    prefetch(x + block.numel + i, kChunk * sizeof(T));  // the same place in the next block, whose range comes next
    Isa::template quantise_columns<T, BITS>(x + i, offsets + column, inverses + column, noise.of(element)[0],
                                            edges + column, planes + plane_byte(element, BITS, group_size),
                                            group_size / 8);
    column += kChunk;
    while (column >= columns) column -= columns;
  }
  if (i < block.numel) quantise_rest<T, BITS>(job, block.start + i, column, arrays);
  fold_edges(edges, job.columns);
}

template <class Isa, class T, int BITS>
void pack_block_of_columns(const PackJob& job, UnitNoise<Isa>& noise, i64 index, ColumnArrays& arrays) {
  const Block block = block_at(index, job.numel, job.group_size, job.columns);
  const i64 first_group = index * job.columns;
  column_ranges(static_cast<const T*>(job.x) + block.start, block.rows, job.columns, arrays);
  describe_columns<T>(job, first_group, arrays);
  quantise_columns<Isa, T, BITS>(job, noise, block, arrays);
  i32 any_slow = 0;
  for (i64 c = 0; c < job.columns; ++c) {
    const bool dithered = arrays.may_dither()[c] && dither_pays(arrays.edges()[c], block.rows);
    job.scales[first_group + c] = static_cast<u16>((bits_of(arrays.scale()[c]) >> 16) | (dithered ? kDitherFlag : 0));
    any_slow |= arrays.slow()[c];
  }
  if (!any_slow) return;
  for (i64 c = 0; c < job.columns; ++c) {
    if (arrays.slow()[c]) pack_column<T>(job, block, first_group + c, c);
  }
}

template <class Isa, class T, int BITS>
void pack_blocks(const PackJob& job, i64 first, i64 last, float* scratch) {
  const StandardFloatMode standard;
  UnitNoise<Isa> noise(job.seed);
  ColumnArrays arrays(scratch, job.columns);
  const i64 blocks = (job.numel / job.columns + job.group_size - 1) / job.group_size;
  if (last == blocks && job.numel % job.group_size != 0) {  // zeros beyond the end
    std::memset(job.planes + plane_byte(job.numel / job.group_size * job.group_size, BITS, job.group_size), 0,
                BITS * job.group_size / 8);
  }
  for (i64 index = first; index < last; ++index) pack_block_of_columns<Isa, T, BITS>(job, noise, index, arrays);
}

// ---- unpack

struct Flags {
  bool special, dithered;  // whether any column of the block is
};

template <class T>
Flags read_columns(const UnpackJob& job, i64 first_group, ColumnArrays& arrays) {
  const u16* scales = job.scales + first_group;
  const u16* offsets = job.offsets + first_group;
  float* __restrict units = arrays.unit();
  float* __restrict bases = arrays.base();
  u32* __restrict masks = arrays.mask();
  u32 any = 0;
  for (i64 c = 0; c < job.columns; ++c) {
    const u32 stored = scales[c];
    const float step = float_of((stored & 0x7FFEu) << 16);
    const float unit = step * kDitherUnit;
    const float offset = offset_value(offsets[c], step, T{});
    units[c] = unit;
    bases[c] = (stored & kDitherFlag) != 0 ? dithered_base(offset, unit) : offset;
    masks[c] = (stored & kDitherFlag) != 0 ? 0xFFFFu : 0u;
    any |= stored;
  }
  repeat_start(units, job.columns);
  repeat_start(bases, job.columns);
  repeat_start(masks, job.columns);
  return Flags{(any & kSpecialFlag) != 0, (any & kDitherFlag) != 0};
}

template <class T>
void unpack_column(const UnpackJob& job, const Block& block, i64 group, i64 column) {
  const u16 scale = job.scales[group];
  const float offset = offset_value(job.offsets[group], step_of(scale), T{});
  for (int row = 0; row < block.rows; ++row) {
    const i64 element = block.start + row * job.columns + column;
    const u8* byte = job.planes + plane_byte(element, job.bits, job.group_size);
    u32 code = 0;
    for (int plane = 0; plane < job.bits; ++plane, byte += job.group_size / 8) {
      code |= static_cast<u32>((*byte >> (element % 8)) & 1) << plane;
    }
    from_float(decode(code, scale, offset, job.bits, 0u), static_cast<T*>(job.out) + element);
  }
}

template <class Isa, class T, int BITS>
void decode_block(const UnpackJob& job, UnitNoise<Isa>& noise, const Block& block, bool dithered, ColumnArrays& arrays,
                  bool stream) {
  alignas(kCacheLine) static constexpr u32 kNoNoise[16] = {};
  T* out = static_cast<T*>(job.out) + block.start;
  i64 column = 0;
  for (i64 i = 0; i < block.numel; i += kChunk) {
    const i64 element = block.start + i;
    const bool whole = i + kChunk <= block.numel;
    T rest[kChunk];
    Isa::template decode_columns<T, BITS>(job.planes + plane_byte(element, BITS, job.group_size), job.group_size / 8,
                                          arrays.unit() + column, arrays.base() + column, arrays.mask() + column,
                                          dithered ? noise.of(element)[0] : kNoNoise, whole ? out + i : rest,
                                          whole && stream);
    if (!whole) std::memcpy(out + i, rest, (block.numel - i) * sizeof(T));
    column += kChunk;
    while (column >= job.columns) column -= job.columns;
  }
}

template <class Isa, class T, int BITS>
void unpack_blocks(const UnpackJob& job, i64 first, i64 last, float* scratch) {
  const StandardFloatMode standard;
  UnitNoise<Isa> noise(job.seed);
  ColumnArrays arrays(scratch, job.columns);
  const bool stream = job.stream && reinterpret_cast<u64>(job.out) % kCacheLine == 0;
  for (i64 index = first; index < last; ++index) {
    const Block block = block_at(index, job.numel, job.group_size, job.columns);
    const i64 first_group = index * job.columns;
    const Flags flags = read_columns<T>(job, first_group, arrays);
    decode_block<Isa, T, BITS>(job, noise, block, flags.dithered, arrays, stream);
    if (!flags.special) continue;
    for (i64 c = 0; c < job.columns; ++c) {
      if (job.scales[first_group + c] & kSpecialFlag) unpack_column<T>(job, block, first_group + c, c);
    }
  }
#if defined(__x86_64__)
  if (stream) _mm_sfence();
#endif
}

}  // namespace
}  // namespace gact
