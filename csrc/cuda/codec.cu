// CUDA kernels pack and unpack, one module for an element type, a group size, a width and a layout: compile with
// -DGACT_ELEMENT=float, Half or Bfloat, -DGACT_GROUP=64, 128, 256 or 512, -DGACT_BITS=1 to 8 and -DGACT_LAYOUT=ByColumn
// or InMemoryOrder, with -fmad=false -ftz=false -prec-div=true. A thread takes a tile (tile.h), whole ones without rare
// values in straight code, all others by the definitions of group_codec.h.
#include "cuda/ranges.h"

namespace gact {

// ---- what the threads of a block exchange

// What rounding an element needs of its group.
struct alignas(8) Steps {
  float offset, inverse;
};

// Flags above the limit of a group: rare values, for which the definitions are needed; Group::special and dead.
constexpr u32 kSlow = 1u << 29, kSpecial = 1u << 30, kDead = 1u << 31;
constexpr u32 kLimit = kSlow - 1u;

template <class T, class Layout>
struct alignas(16) Memory {
  // Four words more than groups, so that threads that write different parts use different banks.
  Ends<T> ends[Layout::kParts][Layout::kGroups + 4];
  u32 edges[Layout::kParts][Layout::kGroups + 4];
  Steps steps[Layout::kGroups];
  u32 limits[Layout::kGroups];
  u32 scales[Layout::kGroups];  // as stored, without the flag of dithering, and above it whether that may be set
};

// ---- the description of a group, by one thread

constexpr u32 kMayDither = 1u << 16;

template <class T>
GACT_FN Extent extent_of_group(const T* x, const GroupPlace& place) {
  Extent extent = no_extent();
#pragma unroll 1
  for (int i = 0; i < place.count; ++i) {
    extend(extent, to_float(x[place.first + wide_product(static_cast<u32>(i), place.stride)]));
  }
  return finished(extent);
}

template <class T, int BITS, class Layout>
GACT_FN void describe_group(const T* x, const GroupPlace& place, u32 index, const Buffer& buffer,
                            Memory<T, Layout>& memory) {
  Ends<T> ends = memory.ends[0][index];
#pragma unroll
  for (u32 part = 1; part < Layout::kParts; ++part) ends = joined(ends, memory.ends[part][index]);
  float low, high;
  widen(ends, &low, &high);
  constexpr u32 kTop = (1u << BITS) - 1u;
  constexpr float kLevels = static_cast<float>(kTop);
  const PlainGroup plain = plain_group(finest_grid(low + 0.0f, high, kLevels, T{}), low, high, kLevels, T{});
  Grid grid = plain.grid;
  u32 limit = kTop << 8;
  u32 scale = bits_of(grid.scale) >> 16 | (plain.may_dither ? kMayDither : 0u);
  if (place.count == 0) return;
  if (plain.slow) {
    const Group group = describe(extent_of_group(x, place), BITS, T{});
    grid = group.grid;
    limit = static_cast<u32>(group.limit) | kSlow | (group.special ? kSpecial : 0u) | (group.dead ? kDead : 0u);
    scale = group.stored_scale | (group.may_dither ? kMayDither : 0u);
  }
  memory.steps[index] = Steps{grid.offset, grid.inverse};
  memory.limits[index] = limit;
  memory.scales[index] = scale;
  buffer.offsets[place.number] = static_cast<u16>(grid.stored_offset);
}

// ---- words of codes

// The bits of a field at the lowest place in each of four bytes.
GACT_FN constexpr u32 field_mask(int bits) { return ((1u << bits) - 1u) * 0x01010101u; }

// The words of a pair of columns in one row of words; `wide` where the buffer is aligned to both of them.
GACT_FN void store_words(const u32 words[2], u32* target, bool wide) {
  if (wide) {
    *reinterpret_cast<u64*>(target) = words[0] | static_cast<u64>(words[1]) << 32;
  } else {
    target[0] = words[0];
    target[1] = words[1];
  }
}

GACT_FN void load_words(const u32* source, bool wide, u32 words[2]) {
  if (wide) {
    const u64 both = *reinterpret_cast<const u64*>(source);
    words[0] = static_cast<u32>(both);
    words[1] = static_cast<u32>(both >> 32);
  } else {
    words[0] = source[0];
    words[1] = source[1];
  }
}

GACT_FN bool is_wide(const u32* words) { return reinterpret_cast<u64>(words) % 8 == 0; }

// Adds the codes of four rows to the words of their fields, and stores those that are full.
template <int BITS>
GACT_FN void join_codes(const u32 codes[2], int quad, u32 width, u32 words[kFields][2], u32* target, bool wide) {
#pragma unroll
  for (int field = 0; field < kFields; ++field) {
    const int bits = field_bits(field), quads = 8 / bits, start = field_start(BITS, bits);
    if ((BITS & bits) == 0) continue;
#pragma unroll
    for (int column = 0; column < 2; ++column) {
      const u32 part = BITS == bits ? codes[column] : codes[column] >> start & field_mask(bits);
      words[field][column] = quad % quads == 0 ? part : words[field][column] | part << field_shift(4 * quad, bits);
    }
    if (quad % quads != quads - 1) continue;
    store_words(words[field], rows_after(target, static_cast<u32>(start + quad / quads), width), wide);
  }
}

// The codes of four rows of a column in the bytes of a word, from all words of the tile.
template <int BITS>
GACT_FN u32 codes_of(const u32 words[BITS][2], int quad, int column) {
  u32 codes = 0;
#pragma unroll
  for (int field = 0; field < kFields; ++field) {
    const int bits = field_bits(field), start = field_start(BITS, bits);
    if ((BITS & bits) == 0) continue;
    const u32 word = words[start + quad * bits / 8][column];
    codes |= (word >> field_shift(4 * quad, bits) & field_mask(bits)) << start;
  }
  return codes;
}

// The place of the word that has a field of a row, of a tile that may be short, from the first word of the tile on.
GACT_FN u64 word_of(int bits, int field, int row, const Place& place) {
  const int word_row = first_word_row(bits, field, place.tile_rows) + row * field / 32;
  return wide_product(static_cast<u32>(word_row), place.width);
}

// ---- noise

GACT_FN PhiloxPair pair_of(const Place& place, u64 seed) {
  return philox_pair(place.pair, high_half(first_block(place)), seed);
}

// That of eight rows, the first of which are in `quad`.
GACT_FN void make_noise(const PhiloxPair& pair, const Place& place, int quad, u64 seed, u32 words[4]) {
  const u32 block = low_half(first_block(place)) | static_cast<u32>(quad / 2);  // a multiple of 4, and at most 3
  philox(pair, philox_block(block, seed), seed, words);
}

// That of one element. Not indexed, as the words would have to be in memory for that.
GACT_FN u32 noise_at(const Place& place, int row, int column, u64 seed) {
  u32 words[4];
  make_noise(pair_of(place, seed), place, row / 4, seed, words);
  const u32 first = column == 0 ? words[0] : words[1], second = column == 0 ? words[2] : words[3];
  return (row / 4 % 2 == 0 ? first : second) >> (8 * (row % 4)) & 0xFFu;
}

// ---- pack

// Whether one of the groups of a thread has rare values.
template <class T, class Layout>
GACT_FN bool is_slow(const Place& place, const Memory<T, Layout>& memory) {
  u32 limits = 0;
#pragma unroll
  for (u32 i = 0; i < Layout::kThreadGroups; ++i) limits |= memory.limits[place.group + i];
  return (limits & kSlow) != 0;
}

// A group as the definitions take it.
template <class T, class Layout>
GACT_FN Group group_in(const Memory<T, Layout>& memory, u32 index) {
  const u32 limit = memory.limits[index];
  Group group{};
  group.grid.offset = memory.steps[index].offset;
  group.grid.inverse = memory.steps[index].inverse;
  group.limit = static_cast<i32>(limit & kLimit);
  group.special = (limit & kSpecial) != 0;
  group.dead = (limit & kDead) != 0;
  return group;
}

// Rounds four elements of a column that follow each other; their codes in the bytes of a word. The lower halves of the
// sums with kMagic are what is to be rounded, 8 bits above the noise: two of them take theirs in one addition.
GACT_FN u32 quantise(const float values[4], const Steps& steps, u32 noise, u32* edges) {
  u32 scaled[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) scaled[i] = bits_of(fused(values[i] - steps.offset, steps.inverse, kMagic));
  const u32 first = select_bytes(scaled[0], scaled[1], 0x5410u), second = select_bytes(scaled[2], scaled[3], 0x5410u);
  *edges = add_byte_distances(select_bytes(first, second, 0x6420u), 0x80808080u, *edges);
  const u32 first_noise = select_bytes(noise, 0u, 0x4140u), second_noise = select_bytes(noise, 0u, 0x4342u);
  return select_bytes(first + first_noise, second + second_noise, 0x7531u);
}

// A whole tile of groups without rare values. Leaves its edges in shared memory.
template <class T, int BITS, class Layout>
GACT_FN void pack_whole_tile(const Row<T> rows[kTileRows], const Place& place, u64 seed, u32* target,
                             Memory<T, Layout>& memory) {
  const bool wide = is_wide(target);
  const PhiloxPair pair = pair_of(place, seed);
  Steps steps[Layout::kThreadGroups];
  u32 edges[Layout::kThreadGroups], words[kFields][2], noise[4];
#pragma unroll
  for (int quad = 0; quad < kQuads; ++quad) {
    u32 codes[2];
    if (quad % 2 == 0) make_noise(pair, place, quad, seed, noise);
#pragma unroll
    for (int column = 0; column < 2; ++column) {
      const u32 group = Layout::group_of(quad, column);
      if (Layout::begins(quad, column)) {
        steps[group] = memory.steps[place.group + group];
        edges[group] = 0;
      }
      float values[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) values[i] = value_of(rows[4 * quad + i], column);
      codes[column] = quantise(values, steps[group], noise[2 * (quad % 2) + column], &edges[group]);
      if (Layout::ends(quad, column)) memory.edges[place.part][place.group + group] = edges[group];
    }
    join_codes<BITS>(codes, quad, place.width, words, target, wide);
  }
}

// Any tile, by the definitions. Leaves its edges in shared memory.
template <class T, int BITS, class Layout>
GACT_FN void pack_any_tile(const T* x, const Place& place, u64 seed, u32* target, Memory<T, Layout>& memory) {
  for (u32 i = 0; i < Layout::kThreadGroups; ++i) memory.edges[place.part][place.group + i] = 0;
#pragma unroll 1
  for (int column = 0; column < 2; ++column) {
    u32 words[kFields] = {};
#pragma unroll 1
    for (int row = 0; row < place.tile_rows; ++row) {
      u32 code = 0;
      if (row < (column == 0 ? place.rows : place.second_rows)) {
        const u32 index = place.group + Layout::group_of(row / 4, column);
        const float value =
            to_float(x[first_element(place) + wide_product(static_cast<u32>(row), place.pitch) + column]);
        i32 scaled;
        code = code_of(value, group_in(memory, index), BITS, noise_at(place, row, column, seed), &scaled);
        memory.edges[place.part][index] += edge_of(scaled);
      }
#pragma unroll
      for (int field = 0; field < kFields; ++field) {
        const int bits = field_bits(field);
        if ((BITS & bits) == 0) continue;
        words[field] |= (code >> field_start(BITS, bits) & ((1u << bits) - 1u)) << field_shift(row, bits);
        if ((row + 1) * bits % 32 != 0 && row + 1 != place.tile_rows) continue;
        target[word_of(BITS, bits, row, place) + column] = words[field];
        words[field] = 0;
      }
    }
  }
}

// The ranges of a tile that is not whole.
template <class T, class Layout>
GACT_FN void ends_of_any_tile(const T* x, const Place& place, Memory<T, Layout>& memory) {
  Ends<T>* ends = memory.ends[place.part] + place.group;
  for (u32 group = 0; group < Layout::kThreadGroups; ++group) ends[group] = no_ends(T{});
#pragma unroll 1
  for (int column = 0; column < 2; ++column) {
#pragma unroll 1
    for (int row = 0; row < (column == 0 ? place.rows : place.second_rows); ++row) {
      const u32 group = Layout::group_of(row / 4, column);
      const T value = x[first_element(place) + wide_product(static_cast<u32>(row), place.pitch) + column];
      ends[group] = joined(ends[group], ends_of(value));
    }
  }
}

// A whole tile and the ranges of its groups.
template <class T, class Layout>
GACT_FN void load_tile(const T* x, const Place& place, Row<T> rows[kTileRows], Memory<T, Layout>& memory) {
  const T* source = x + first_element(place);
#pragma unroll
  for (int i = 0; i < kTileRows; ++i) {
    rows[i] = *reinterpret_cast<const Row<T>*>(source);
    source = rows_after(source, 1u, place.pitch);
  }
  Ends<T> ends[Layout::kThreadGroups];
  ends_of_tile(rows, Layout{}, ends);
#pragma unroll
  for (u32 i = 0; i < Layout::kThreadGroups; ++i) memory.ends[place.part][place.group + i] = ends[i];
}

template <class T, int BITS, class Layout>
GACT_FN void pack_block(const T* x, u64 length, u32 columns, u32 pitch, u64 seed, const Buffer& buffer,
                        Memory<T, Layout>& memory) {
  const Place place = place_of_thread(Layout{}, length, columns, pitch);
  Row<T> rows[kTileRows];
  if (is_whole(place)) {
    load_tile(x, place, rows, memory);
  } else {
    ends_of_any_tile(x, place, memory);
  }
  sync_block();
  const u32 index = thread_of_block();
  if (index < Layout::kGroups) {
    describe_group<T, BITS>(x, place_of_group(Layout{}, index, length, columns, pitch), index, buffer, memory);
  }
  sync_block();
  u32* target = buffer.words + place_of_rows(place, BITS);
  if (is_whole(place) && !is_slow(place, memory)) {
    pack_whole_tile<T, BITS>(rows, place, seed, target, memory);
  } else {
    pack_any_tile<T, BITS>(x, place, seed, target, memory);
  }
  sync_block();
  if (index >= Layout::kGroups) return;
  const GroupPlace group = place_of_group(Layout{}, index, length, columns, pitch);
  if (group.count == 0) return;
  u32 edges = 0;
#pragma unroll
  for (u32 part = 0; part < Layout::kParts; ++part) edges += memory.edges[part][index];
  const u32 scale = memory.scales[index];
  const bool dithered = (scale & kMayDither) != 0 && dither_pays(edges, group.count);
  buffer.scales[group.number] = static_cast<u16>(scale | (dithered ? kDitherFlag : 0));
}

// ---- unpack

// What decoding the elements of a group needs: a value is base + units * unit, with noise among the units where the
// mask lets it through.
struct Decoder {
  float base, unit;
  u32 mask;
};

template <class T>
GACT_FN Decoder decoder_of(u16 stored, u16 stored_offset, T type) {
  const float step = step_of(stored), unit = step * kUnit;
  const float offset = offset_value(stored_offset, step, type);
  const bool dithered = (stored & kDitherFlag) != 0;
  return Decoder{dithered ? dithered_base(offset, unit) : offset, unit, dithered ? ~0u : 0u};
}

constexpr u32 kMagicBits = 0x4B000000u;

// decode() of four elements of a column that follow each other, in a group that is not special.
GACT_FN void decode_plain(u32 codes, u32 noise, const Decoder& decoder, float values[4]) {
  const u32 added = ~noise & decoder.mask;
  const u32 first = select_bytes(added, codes, 0x5140u), second = select_bytes(added, codes, 0x7362u);
  const u32 units[4] = {select_bytes(first, kMagicBits, 0x7610u), select_bytes(first, kMagicBits, 0x7632u),
                        select_bytes(second, kMagicBits, 0x7610u), select_bytes(second, kMagicBits, 0x7632u)};
#pragma unroll
  for (int i = 0; i < 4; ++i) values[i] = fused(float_of(units[i]) - kMagic, decoder.unit, decoder.base);
}

template <class T, int BITS, class Layout>
GACT_FN void unpack_whole_tile(const u32 words[BITS][2], const Decoder* decoders, const Place& place, u64 seed,
                               T* out) {
  const PhiloxPair pair = pair_of(place, seed);
  T* target = out + first_element(place);
  u32 noise[4];
#pragma unroll
  for (int quad = 0; quad < kQuads; ++quad) {
    if (quad % 2 == 0) make_noise(pair, place, quad, seed, noise);
    float values[2][4];
#pragma unroll
    for (int column = 0; column < 2; ++column) {
      decode_plain(codes_of<BITS>(words, quad, column), noise[2 * (quad % 2) + column],
                   decoders[Layout::group_of(quad, column)], values[column]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      *reinterpret_cast<Row<T>*>(target) = row_of(values[0][i], values[1][i], T{});
      target = rows_after(target, 1u, place.width);
    }
  }
}

// Any tile, by the definitions. `first_group` is the number of its first group.
template <class T, int BITS, class Layout>
GACT_FN void unpack_any_tile(const Buffer& buffer, const Place& place, u64 first_group, u64 seed, T* out) {
  const u32* source = buffer.words + place_of_rows(place, BITS);
#pragma unroll 1
  for (int column = 0; column < 2; ++column) {
#pragma unroll 1
    for (int row = 0; row < (column == 0 ? place.rows : place.second_rows); ++row) {
      u32 code = 0;
#pragma unroll
      for (int field = 0; field < kFields; ++field) {
        const int bits = field_bits(field);
        if ((BITS & bits) == 0) continue;
        const u32 word = source[word_of(BITS, bits, row, place) + column];
        code |= (word >> field_shift(row, bits) & ((1u << bits) - 1u)) << field_start(BITS, bits);
      }
      const u64 group = first_group + Layout::group_of(row / 4, column);
      const u16 stored = buffer.scales[group];
      const float offset = offset_value(buffer.offsets[group], step_of(stored), T{});
      const float value = decode(code, stored, offset, BITS, noise_at(place, row, column, seed));
      from_float(value, out + (first_element(place) + wide_product(static_cast<u32>(row), place.width) + column));
    }
  }
}

template <class T, int BITS, class Layout>
GACT_FN void unpack_block(const Buffer& buffer, u64 length, u32 columns, u64 seed, T* out) {
  const Place place = place_of_thread(Layout{}, length, columns, columns);
  const u64 first_group = first_group_of(Layout{}, place);
  u32 words[BITS][2], scales = 0;
  Decoder decoders[Layout::kThreadGroups];
  if (is_whole(place)) {
    const u32* source = buffer.words + place_of_rows(place, BITS);
    const bool wide = is_wide(source);
#pragma unroll
    for (int i = 0; i < BITS; ++i) {
      load_words(source, wide, words[i]);
      source = rows_after(source, 1u, place.width);
    }
#pragma unroll
    for (u32 i = 0; i < Layout::kThreadGroups; ++i) {
      const u16 stored = buffer.scales[first_group + i];
      decoders[i] = decoder_of(stored, buffer.offsets[first_group + i], T{});
      scales |= stored;
    }
  }
  if (is_whole(place) && (scales & kSpecialFlag) == 0) {
    unpack_whole_tile<T, BITS, Layout>(words, decoders, place, seed, out);
  } else {
    unpack_any_tile<T, BITS, Layout>(buffer, place, first_group, seed, out);
  }
}

using Stored = GACT_ELEMENT;
using Layout = GACT_LAYOUT<GACT_GROUP>;

// Blocks that should fit on a multiprocessor, which limits registers: pack holds 128 bytes of 16-bit elements a thread
// or 256 of float, unpack what is stored of them.
constexpr int kPackBlocks = (sizeof(Stored) == 2 ? 768 : 512) / Layout::kThreads;
constexpr int kUnpackBlocks = 768 / Layout::kThreads;

}  // namespace gact

// length: elements in memory order, rows where groups are columns. columns: of a row, there only. pitch: from one row
// to the next, an even number; `columns` where they lie close together.
GACT_KERNEL(gact::Layout::kThreads, gact::kPackBlocks)
pack(const gact::Stored* x, gact::u64 length, gact::u64 columns, gact::u64 pitch, gact::u64 seed, gact::u8* buffer,
     gact::i64 scale_start, gact::i64 offset_start) {
  using namespace gact;
  GACT_SHARED Memory<Stored, Layout> memory;
  pack_block<Stored, GACT_BITS>(x, length, static_cast<u32>(columns), static_cast<u32>(pitch), seed,
                                sections_of(buffer, scale_start, offset_start), memory);
}

GACT_KERNEL(gact::Layout::kThreads, gact::kUnpackBlocks)
unpack(gact::u8* buffer, gact::u64 length, gact::u64 columns, gact::u64 seed, gact::Stored* out, gact::i64 scale_start,
       gact::i64 offset_start) {
  using namespace gact;
  unpack_block<Stored, GACT_BITS, Layout>(sections_of(buffer, scale_start, offset_start), length,
                                          static_cast<u32>(columns), seed, out);
}
