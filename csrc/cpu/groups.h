// Groups of a tensor whose codes are a matrix (docs/codec.md): their parameters, many at a time, and whole groups with
// rare values, an element at a time by the definitions of group_codec.h.
#pragma once

#include "cpu/float_mode.h"
#include "cpu/kernels.h"

namespace gact {
namespace {

// ---- parameters of groups without rare values

// Most groups that are described at once.
constexpr int kMostGroups = 1024;

// What quantise needs of some groups; plain_group says what `slow` means.
struct GroupArrays {
  float low[kMostGroups], high[kMostGroups], offset[kMostGroups], scale[kMostGroups], inverse[kMostGroups];
  u32 stored_offset[kMostGroups];
  i32 slow[kMostGroups], may_dither[kMostGroups];
};

template <class T>
void set_group(GroupArrays& groups, int g, const Grid& grid, float low, float high, float levels) {
  const PlainGroup group = plain_group(grid, low, high, levels, T{});
  groups.offset[g] = group.slow ? 0.0f : grid.offset;  // so that what fills up a tile has codes of zero
  groups.scale[g] = grid.scale;
  groups.inverse[g] = group.slow ? 0.0f : grid.inverse;
  groups.stored_offset[g] = grid.stored_offset;
  groups.slow[g] = group.slow;
  groups.may_dither[g] = group.may_dither;
}

// Not inlined: few groups need it, and it would be computed for all of them if it became part of a vectorised loop.
template <class T>
__attribute__((noinline)) void widen_group(GroupArrays& groups, int g, float levels) {
  const float low = groups.low[g], high = groups.high[g];
  set_group<T>(groups, g, grid_at(wide_scale(low, high, levels), low, T{}), low, high, levels);
}

// All but the ranges, from the ranges; writes the stored offsets.
template <class T>
void describe_groups(GroupArrays& groups, int count, int bits, u16* stored_offsets) {
  const float levels = static_cast<float>((1 << bits) - 1);
  i32 covered[kMostGroups];
  for (int g = 0; g < count; ++g) {
    const float low = groups.low[g] + 0.0f, high = groups.high[g];  // + 0.0 turns -0.0 into 0.0
    groups.low[g] = low;
    const Grid grid = grid_at(tight_scale(low, high, levels, T{}), low, T{});
    covered[g] = covers(grid, low, high, levels, T{});
    set_group<T>(groups, g, grid, low, high, levels);
  }
  for (int g = 0; g < count; ++g) {
    if (!covered[g]) widen_group<T>(groups, g, levels);
  }
  for (int g = 0; g < count; ++g) stored_offsets[g] = static_cast<u16>(groups.stored_offset[g]);
}

inline u16 stored_scale(const GroupArrays& groups, int g, u32 edges, int count) {
  const bool dithered = groups.may_dither[g] && dither_pays(edges, count);
  return static_cast<u16>((bits_of(groups.scale[g]) >> 16) | (dithered ? kDitherFlag : 0));
}

// ---- single elements

// The matrix of codes.
struct Shape {
  i64 rows, width;
  int bits;
};

inline Shape shape_of(i64 numel, i64 columns, int bits) {
  const i64 width = columns > 1 ? columns : kRowElements;
  return Shape{(numel + width - 1) / width, width, bits};
}

// Words of a tile are shape.bits * shape.width; only the last tile has fewer.
inline i64 first_word(const Shape& shape, i64 tile) { return tile * shape.bits * shape.width; }

// Calls use(index of the word, where the field begins in it, field, where the field begins in the code).
template <class Use>
void for_fields(const Shape& shape, i64 row, i64 column, Use&& use) {
  const i64 tile = row / kTileRows, left = shape.rows - tile * kTileRows;
  const int rows = static_cast<int>(left < kTileRows ? left : kTileRows), in_tile = static_cast<int>(row % kTileRows);
  for (int field = 8; field > 0; field /= 2) {
    if ((shape.bits & field) == 0) continue;
    const int word_row = first_word_row(shape.bits, field, rows) + in_tile * field / kTileRows;
    use(first_word(shape, tile) + word_row * shape.width + column, field_shift(in_tile, field), field,
        field_start(shape.bits, field));
  }
}

inline void set_code(u32* words, const Shape& shape, i64 row, i64 column, u32 code) {
  for_fields(shape, row, column, [&](i64 word, int shift, int field, int start) {
    const u32 mask = (1u << field) - 1u;
    words[word] = (words[word] & ~(mask << shift)) | ((code >> start) & mask) << shift;
  });
}

inline u32 code_at(const u32* words, const Shape& shape, i64 row, i64 column) {
  u32 code = 0;
  for_fields(shape, row, column, [&](i64 word, int shift, int field, int start) {
    code |= ((words[word] >> shift) & ((1u << field) - 1u)) << start;
  });
  return code;
}

// The noise of single elements, cheap for those of a pair of columns in 8 rows in a row.
class ElementNoise {
 public:
  explicit ElementNoise(u64 seed) : seed_(seed) {}

  u32 of(i64 row, i64 column) {
    const u64 block = static_cast<u64>(row) / kPhiloxRows;
    const u32 pair = static_cast<u32>(column / 2);
    if (block != block_ || pair != pair_) {
      block_ = block;
      pair_ = pair;
      philox(philox_pair(pair, high_half(block), seed_), philox_block(low_half(block), seed_), seed_, words_);
    }
    return noise_of(words_, static_cast<u32>(row), static_cast<u32>(column));
  }

 private:
  u64 seed_;
  u64 block_ = ~u64{0};
  u32 pair_ = 0;
  u32 words_[4];
};

// ---- whole groups by the definitions

// A group as a part of the matrix of codes; its elements are those before `numel`.
struct Area {
  i64 first_row, last_row, first_column, last_column, width, numel;

  template <class Use>
  void for_elements(Use&& use) const {
    for (i64 column = first_column; column < last_column; ++column) {
      for (i64 row = first_row; row < last_row; ++row) {
        if (row * width + column < numel) use(row * width + column, row, column);
      }
    }
  }
};

inline Area area_of(i64 group, i64 numel, int group_size, i64 columns) {
  const Shape shape = shape_of(numel, columns, 1);
  const int rows = columns > 1 ? group_size : group_size / kRowElements;
  const i64 first = (columns > 1 ? group / columns : group) * rows;
  const i64 last = first + rows < shape.rows ? first + rows : shape.rows;
  const i64 column = columns > 1 ? group % columns : 0;
  return Area{first, last, column, columns > 1 ? column + 1 : kRowElements, shape.width, numel};
}

// One group alone; its codes are overwritten.
template <class T>
void pack_group(const PackJob& job, i64 index) {
  const T* x = static_cast<const T*>(job.x);
  const Area area = area_of(index, job.numel, job.group_size, job.columns);
  const Shape shape = shape_of(job.numel, job.columns, job.bits);
  Extent extent = no_extent();
  area.for_elements([&](i64 element, i64, i64) { extend(extent, to_float(x[element])); });
  const Group group = describe(finished(extent), job.bits, T{});
  u32 edges = 0;
  int count = 0;
  ElementNoise noise(job.seed);
  area.for_elements([&](i64 element, i64 row, i64 column) {
    i32 scaled;
    const u32 code = code_of(to_float(x[element]), group, job.bits, noise.of(row, column), &scaled);
    set_code(job.words, shape, row, column, code);
    edges += edge_of(scaled);
    ++count;
  });
  const bool dithered = group.may_dither && dither_pays(edges, count);
  job.scales[index] = group.stored_scale | (dithered ? kDitherFlag : 0);
  job.offsets[index] = static_cast<u16>(group.grid.stored_offset);
}

template <class T>
void unpack_group(const UnpackJob& job, i64 index) {
  const Shape shape = shape_of(job.numel, job.columns, job.bits);
  const u16 scale = job.scales[index];
  const float offset = offset_value(job.offsets[index], step_of(scale), T{});
  ElementNoise noise(job.seed);
  area_of(index, job.numel, job.group_size, job.columns).for_elements([&](i64 element, i64 row, i64 column) {
    const u32 subtracted = scale & kDitherFlag ? noise.of(row, column) : 0u;
    const u32 code = code_at(job.words, shape, row, column);
    from_float(decode(code, scale, offset, job.bits, subtracted), static_cast<T*>(job.out) + element);
  });
}

}  // namespace
}  // namespace gact
