// A prototype for kernel_cost.py: groups of 64 with a byte for the scale and one for the offset (formats.SCALE_E4M3 and
// OFFSET_BYTE). Nothing launches it. What quantises and decodes a tile is that of cuda/codec.cu, which is included
// whole; groups are described, stored and read in another way. Infinities, NaN and ranges at the limits of a type are
// not handled, beyond the test for them.
//
// A scale counts from the largest exponent among many groups. `pack_by_block` takes that of the groups of a block of
// threads, 8,192 elements, which costs one more barrier; `pack_by_tensor` has to be told, by `find_top`, which reads
// the whole tensor first.
#include "cuda/codec.cu"

namespace gact {

constexpr u32 kMantissaStep = 1u << 20;  // between scales of three bits of mantissa
constexpr u32 kExponents = 15;           // below the largest one
constexpr u32 kConstant = 0u;            // stored for a scale of 0
constexpr u32 kOffsetsOfRange = 64;

struct ByteSections {
  u32* words;
  u8 *scales, *offsets, *tops;
};

GACT_FN ByteSections byte_sections_of(u8* buffer, i64 scale_start, i64 offset_start, i64 top_start) {
  return ByteSections{reinterpret_cast<u32*>(buffer), buffer + scale_start, buffer + offset_start, buffer + top_start};
}

// Rounded up to three bits of mantissa.
GACT_FN float short_scale(float step) {
  return float_of((bits_of(step) + (kMantissaStep - 1u)) & ~(kMantissaStep - 1u));
}

// The largest whole number of units that is not above `low`, from about as many.
GACT_FN float floor_units(float units, float unit, float low) {
  const float nearest = static_cast<float>(__float2int_rn(units));
  return nearest * unit > low ? nearest - 1.0f : nearest;
}

template <int BITS>
struct ByteGrid {
  static constexpr float kLevels = static_cast<float>((1u << BITS) - 1u);
  static constexpr float kOffsetSteps = static_cast<float>(1u << BITS) / kOffsetsOfRange;  // that an offset counts

  // A scale for which the offset, rounded down, leaves no element beyond the last level.
  GACT_FN float covering(float low, float high) {
    const float size = low < 0.0f ? -low : low;
    const float by_range = (high - low) * (1.0000152587890625f / (kLevels - kOffsetSteps));
    const float by_low = size * (1.0000152587890625f / (127.0f * kOffsetSteps));
    return by_range > by_low ? by_range : by_low;
  }

  // The finest scale that covers the range; 0 for zeros alone.
  GACT_FN float scale_of(float low, float high) {
    const float tight = short_scale((high - low) * (1.0f / kLevels));
    const float unit = tight * kOffsetSteps;
    const float start = floor_units(low / unit, unit, low) * unit;
    const bool fits = (high - start <= tight * kLevels) & (start >= -128.0f * unit) & (start <= 127.0f * unit);
    return fits & (high > low) ? tight : short_scale(covering(low, high));
  }
};

// Exponent of the least scale beside this largest one, in the place of three bits of mantissa.
GACT_FN u32 least_of(u32 top) { return (top > kExponents ? top - kExponents : 1u) << 3; }

GACT_FN u32 largest_of_warp(u32 value) {
#ifdef GACT_SHUFFLES  // for tools/ptx/machine.cpp, which has no reduction
#pragma unroll
  for (u32 mask = 16; mask > 0; mask /= 2) {
    const u32 other = shuffle_xor(value, mask);
    value = other > value ? other : value;
  }
  return value;
#else
  return __reduce_max_sync(kAllLanes, value);
#endif
}

// The largest exponent of a block: each thread gives the scale of one group.
GACT_FN u32 top_of_block(float scale, u32* tops, u32 warps) {
  const u32 found = largest_of_warp(bits_of(scale));
  if (thread_of_block() % 32 == 0) tops[thread_of_block() / 32] = found;
  sync_block();
  u32 top = tops[0];
#pragma unroll
  for (u32 warp = 1; warp < 4; ++warp) top = warp < warps && tops[warp] > top ? tops[warp] : top;
  return top >> 23;
}

template <class T, class Layout>
GACT_FN void ends_of_group(const Memory<T, Layout>& memory, u32 index, float* low, float* high) {
  Ends<T> ends = memory.ends[0][index];
#pragma unroll
  for (u32 part = 1; part < Layout::kParts; ++part) ends = joined(ends, memory.ends[part][index]);
  widen(ends, low, high);
}

template <class T, int BITS, class Layout>
GACT_FN void describe_in_bytes(float low, float high, float scale, u32 least, const GroupPlace& place, u32 index,
                               const ByteSections& buffer, Memory<T, Layout>& memory) {
  using Bytes = ByteGrid<BITS>;
  const u32 code = (bits_of(scale) >> 20) > least ? (bits_of(scale) >> 20) - least : 1u;  // 0 is that of constants
  const float step = scale > 0.0f ? float_of((code + least) << 20) : 0.0f;
  const float unit = step * Bytes::kOffsetSteps;
  const float inverse = step > 0.0f ? 256.0f / step : 0.0f;
  const float units = floor_units(low * inverse * (1.0f / (256.0f * Bytes::kOffsetSteps)), unit, low);
  const float stored = units < -128.0f ? -128.0f : (units > 127.0f ? 127.0f : units);
  const float offset = step > 0.0f ? stored * unit : 0.0f;
  const Grid grid{offset, step, inverse, static_cast<u32>(static_cast<i32>(stored)) & 0xFFu};
  const PlainGroup plain = plain_group(grid, low, high, Bytes::kLevels, T{});
  memory.steps[index] = Steps{grid.offset, grid.inverse};
  memory.limits[index] = ((1u << BITS) - 1u) << 8 | (plain.slow ? kSlow : 0u);
  memory.scales[index] = (step > 0.0f ? code << 1 : kConstant) | (plain.may_dither ? kMayDither : 0u);
  buffer.offsets[place.number] = static_cast<u8>(grid.stored_offset);
}

// What pack_block does, with the largest exponent of the block, or of the tensor, which is at `known_top`.
template <class T, int BITS, bool BY_TENSOR, class Layout>
GACT_FN void pack_in_bytes(const T* x, u64 length, u32 columns, u32 pitch, u64 seed, const ByteSections& buffer,
                           const u32* known_top, Memory<T, Layout>& memory, u32* tops) {
  const Place place = place_of_thread(Layout{}, length, columns, pitch);
  Row<T> rows[kTileRows];
  if (is_whole(place)) {
    load_tile(x, place, rows, memory);
  } else {
    ends_of_any_tile(x, place, memory);
  }
  sync_block();
  static_assert(Layout::kGroups == Layout::kThreads, "each thread describes a group");
  const u32 index = thread_of_block();
  const GroupPlace group = place_of_group(Layout{}, index, length, columns, pitch);
  float low, high;
  ends_of_group(memory, index, &low, &high);
  low += 0.0f;
  const float scale = group.count > 0 ? ByteGrid<BITS>::scale_of(low, high) : 0.0f;
  u32 top;
  if constexpr (BY_TENSOR) {
    top = *known_top >> 23;
  } else {
    top = top_of_block(scale, tops, Layout::kThreads / 32);
    if (index == 0) buffer.tops[block_of_grid()] = static_cast<u8>(top);
  }
  if (group.count > 0) {
    describe_in_bytes<T, BITS>(low, high, scale, least_of(top), group, index, buffer, memory);
  }
  sync_block();
  u32* target = buffer.words + place_of_rows(place, BITS);
  if (is_whole(place) && !is_slow(place, memory)) {
    pack_whole_tile<T, BITS>(rows, place, seed, target, memory);
  } else {
    pack_any_tile<T, BITS>(x, place, seed, target, memory);
  }
  sync_block();
  if (group.count == 0) return;
  u32 edges = 0;
#pragma unroll
  for (u32 part = 0; part < Layout::kParts; ++part) edges += memory.edges[part][index];
  const u32 stored = memory.scales[index];
  const bool dithered = (stored & kMayDither) != 0 && dither_pays(edges, group.count);
  buffer.scales[group.number] = static_cast<u8>(stored | (dithered ? 1u : 0u));
}

template <int BITS>
GACT_FN Decoder decoder_of_bytes(u32 stored, i32 stored_offset, u32 least) {
  const float step = stored >> 1 != kConstant ? float_of(((stored >> 1) + least) << 20) : 0.0f;
  const float unit = step * kUnit;
  const float offset = static_cast<float>(stored_offset) * (step * ByteGrid<BITS>::kOffsetSteps);
  const bool dithered = (stored & 1u) != 0;
  return Decoder{dithered ? dithered_base(offset, unit) : offset, unit, dithered ? ~0u : 0u};
}

// The bytes of all groups of a thread, 2 or 8 of them, at once.
template <class Layout>
GACT_FN u64 bytes_of_groups(const u8* bytes) {
  return Layout::kThreadGroups == 2 ? *reinterpret_cast<const u16*>(bytes) : *reinterpret_cast<const u64*>(bytes);
}

template <class T, int BITS, class Layout>
GACT_FN void unpack_in_bytes(const ByteSections& buffer, u64 length, u32 columns, u64 seed, u32 top, T* out) {
  const Place place = place_of_thread(Layout{}, length, columns, columns);
  if (!is_whole(place)) return;  // one tile in many; the way of these is not on the path that is counted
  const u64 first_group = first_group_of(Layout{}, place);
  u32 words[BITS][2];
  const u32* source = buffer.words + place_of_rows(place, BITS);
  const bool wide = is_wide(source);
#pragma unroll
  for (int i = 0; i < BITS; ++i) {
    load_words(source, wide, words[i]);
    source = rows_after(source, 1u, place.width);
  }
  const u64 scales = bytes_of_groups<Layout>(buffer.scales + first_group);
  const u64 offsets = bytes_of_groups<Layout>(buffer.offsets + first_group);
  const u32 least = least_of(top);
  Decoder decoders[Layout::kThreadGroups];
#pragma unroll
  for (u32 i = 0; i < Layout::kThreadGroups; ++i) {
    const u32 scale = static_cast<u32>(scales >> (8 * i)) & 0xFFu;
    const i32 offset = static_cast<signed char>(static_cast<u8>(offsets >> (8 * i)));
    decoders[i] = decoder_of_bytes<BITS>(scale, offset, least);
  }
  unpack_whole_tile<T, BITS, Layout>(words, decoders, place, seed, out);
}

}  // namespace gact

GACT_KERNEL(gact::Layout::kThreads, gact::kPackBlocks)
pack_by_block(const gact::Stored* x, gact::u64 length, gact::u64 columns, gact::u64 pitch, gact::u64 seed,
              gact::u8* buffer, gact::i64 scale_start, gact::i64 offset_start, gact::i64 top_start) {
  using namespace gact;
  GACT_SHARED Memory<Stored, Layout> memory;
  GACT_SHARED u32 tops[4];
  pack_in_bytes<Stored, GACT_BITS, false>(x, length, static_cast<u32>(columns), static_cast<u32>(pitch), seed,
                                          byte_sections_of(buffer, scale_start, offset_start, top_start), nullptr,
                                          memory, tops);
}

GACT_KERNEL(gact::Layout::kThreads, gact::kPackBlocks)
pack_by_tensor(const gact::Stored* x, gact::u64 length, gact::u64 columns, gact::u64 pitch, gact::u64 seed,
               gact::u8* buffer, gact::i64 scale_start, gact::i64 offset_start, const gact::u32* top) {
  using namespace gact;
  GACT_SHARED Memory<Stored, Layout> memory;
  pack_in_bytes<Stored, GACT_BITS, true>(x, length, static_cast<u32>(columns), static_cast<u32>(pitch), seed,
                                         byte_sections_of(buffer, scale_start, offset_start, 0), top, memory, nullptr);
}

// The largest scale of a tensor's groups, as bits of a float: `top` begins as 0.
GACT_KERNEL(gact::Layout::kThreads, gact::kPackBlocks)
find_top(const gact::Stored* x, gact::u64 length, gact::u64 columns, gact::u64 pitch, gact::u32* top) {
  using namespace gact;
  GACT_SHARED Memory<Stored, Layout> memory;
  const u32 width = static_cast<u32>(columns), apart = static_cast<u32>(pitch);
  const Place place = place_of_thread(Layout{}, length, width, apart);
  Row<Stored> rows[kTileRows];
  if (is_whole(place)) {
    load_tile(x, place, rows, memory);
  } else {
    ends_of_any_tile(x, place, memory);
  }
  sync_block();
  float low, high;
  ends_of_group(memory, thread_of_block(), &low, &high);
  const bool counts = place_of_group(Layout{}, thread_of_block(), length, width, apart).count > 0;
  const u32 found = largest_of_warp(counts ? bits_of(ByteGrid<GACT_BITS>::scale_of(low + 0.0f, high)) : 0u);
  if (thread_of_block() % 32 == 0) atomicMax(top, found);
}

GACT_KERNEL(gact::Layout::kThreads, gact::kUnpackBlocks)
unpack_by_block(gact::u8* buffer, gact::u64 length, gact::u64 columns, gact::u64 seed, gact::Stored* out,
                gact::i64 scale_start, gact::i64 offset_start, gact::i64 top_start) {
  using namespace gact;
  const ByteSections sections = byte_sections_of(buffer, scale_start, offset_start, top_start);
  unpack_in_bytes<Stored, GACT_BITS, Layout>(sections, length, static_cast<u32>(columns), seed,
                                             sections.tops[block_of_grid()], out);
}
