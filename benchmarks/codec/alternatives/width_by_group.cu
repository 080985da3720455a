// A prototype for kernel_cost.py: a width for each group by column, beside its scale and offset of two bytes. Nothing
// launches it. What quantises and decodes is that of cuda/codec.cu, which is included whole; the codes of a group lie
// together, from a word on that depends on the widths of all groups before it. Rare values and tiles that are not whole
// are not handled, beyond the test for them.
//
// Three steps pack: `find_ranges` reads the tensor, something ranks the groups by their ranges and adds up their
// widths (not here), and `pack_widths` reads the tensor again. GACT_WIDTHS are the widths that the groups of a warp
// have; a warp executes what stores or loads a group once for each of them.
#include "cuda/codec.cu"

namespace gact {

// Keeps the compiler from seeing that a group has one of the widths only: lanes of a warp have several.
GACT_FN void forget(u32& value) { asm volatile("" : "+r"(value)); }

struct WidthSections {
  u32* words;
  u16 *scales, *offsets;
  const u8* widths;
  const u32* starts;  // of each group, in words
};

// The codes of 32 rows of one column as words, one after the other.
template <int BITS>
GACT_FN void store_column(const u32 codes[kQuads], u32* target) {
#pragma unroll
  for (int field = 0; field < kFields; ++field) {
    const int bits = field_bits(field), quads = 8 / bits, start = field_start(BITS, bits);
    if ((BITS & bits) == 0) continue;
    u32 word = 0;
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      const u32 part = BITS == bits ? codes[quad] : codes[quad] >> start & field_mask(bits);
      word = quad % quads == 0 ? part : word | part << field_shift(4 * quad, bits);
      if (quad % quads == quads - 1) target[start + quad / quads] = word;
    }
  }
}

template <int BITS>
GACT_FN void load_column(const u32* source, u32 codes[kQuads]) {
  u32 words[BITS][2];
#pragma unroll
  for (int i = 0; i < BITS; ++i) words[i][0] = source[i];
#pragma unroll
  for (int quad = 0; quad < kQuads; ++quad) codes[quad] = codes_of<BITS>(words, quad, 0);
}

template <int BITS>
GACT_FN void store_if(u32& width, const u32 codes[kQuads], u32* target) {
  if (width == BITS) store_column<BITS>(codes, target);
  forget(width);
}

template <int BITS>
GACT_FN void load_if(u32& width, const u32* source, u32 codes[kQuads]) {
  if (width == BITS) load_column<BITS>(source, codes);
  forget(width);
}

template <int... BITS>
struct Widths {
  GACT_FN void store(u32 width, const u32 codes[kQuads], u32* target) { (store_if<BITS>(width, codes, target), ...); }
  GACT_FN void load(u32 width, const u32* source, u32 codes[kQuads]) { (load_if<BITS>(width, source, codes), ...); }
};

template <class T, class Layout>
GACT_FN void describe_at_width(u32 width, const GroupPlace& place, u32 index, const WidthSections& buffer,
                               Memory<T, Layout>& memory) {
  Ends<T> ends = memory.ends[0][index];
#pragma unroll
  for (u32 part = 1; part < Layout::kParts; ++part) ends = joined(ends, memory.ends[part][index]);
  float low, high;
  widen(ends, &low, &high);
  const u32 top = (1u << width) - 1u;
  const float levels = static_cast<float>(top);
  const PlainGroup plain = plain_group(finest_grid(low + 0.0f, high, levels, T{}), low, high, levels, T{});
  memory.steps[index] = Steps{plain.grid.offset, plain.grid.inverse};
  memory.limits[index] = top << 8 | (plain.slow ? kSlow : 0u);
  memory.scales[index] = bits_of(plain.grid.scale) >> 16 | (plain.may_dither ? kMayDither : 0u);
  buffer.offsets[place.number] = static_cast<u16>(plain.grid.stored_offset);
}

template <class T, class Layout>
GACT_FN void codes_of_tile(const Row<T> rows[kTileRows], const Place& place, u64 seed, Memory<T, Layout>& memory,
                           u32 codes[2][kQuads]) {
  const PhiloxPair pair = pair_of(place, seed);
  u32 noise[4], edges[2] = {0, 0};
  const Steps steps[2] = {memory.steps[place.group], memory.steps[place.group + 1]};
#pragma unroll
  for (int quad = 0; quad < kQuads; ++quad) {
    if (quad % 2 == 0) make_noise(pair, place, quad, seed, noise);
#pragma unroll
    for (int column = 0; column < 2; ++column) {
      float values[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) values[i] = value_of(rows[4 * quad + i], column);
      codes[column][quad] = quantise(values, steps[column], noise[2 * (quad % 2) + column], &edges[column]);
    }
  }
#pragma unroll
  for (int column = 0; column < 2; ++column) memory.edges[place.part][place.group + column] = edges[column];
}

template <class T, class Layout, class Choice>
GACT_FN void pack_with_widths(const T* x, u64 rows_of_all, u32 columns, u32 pitch, u64 seed,
                              const WidthSections& buffer, Memory<T, Layout>& memory) {
  const Place place = place_of_thread(Layout{}, rows_of_all, columns, pitch);
  Row<T> rows[kTileRows];
  if (is_whole(place)) load_tile(x, place, rows, memory);
  sync_block();
  const u32 index = thread_of_block();
  const GroupPlace group = place_of_group(Layout{}, index, rows_of_all, columns, pitch);
  if (index < Layout::kGroups && group.count > 0) {
    describe_at_width(buffer.widths[group.number], group, index, buffer, memory);
  }
  sync_block();
  if (is_whole(place) && !is_slow(place, memory)) {
    u32 codes[2][kQuads];
    codes_of_tile(rows, place, seed, memory, codes);
    const u64 first = first_group_of(Layout{}, place);
#pragma unroll
    for (u32 column = 0; column < 2; ++column) {
      const u32 width = buffer.widths[first + column];
      Choice::store(width, codes[column], buffer.words + buffer.starts[first + column] + place.part * width);
    }
  }
  sync_block();
  if (index >= Layout::kGroups || group.count == 0) return;
  u32 edges = 0;
#pragma unroll
  for (u32 part = 0; part < Layout::kParts; ++part) edges += memory.edges[part][index];
  const u32 scale = memory.scales[index];
  const bool dithered = (scale & kMayDither) != 0 && dither_pays(edges, group.count);
  buffer.scales[group.number] = static_cast<u16>(scale | (dithered ? kDitherFlag : 0));
}

template <class T, class Layout, class Choice>
GACT_FN void unpack_with_widths(const WidthSections& buffer, u64 rows_of_all, u32 columns, u64 seed, T* out) {
  const Place place = place_of_thread(Layout{}, rows_of_all, columns, columns);
  if (!is_whole(place)) return;
  const u64 first = first_group_of(Layout{}, place);
  u32 codes[2][kQuads];
  Decoder decoders[2];
#pragma unroll
  for (u32 column = 0; column < 2; ++column) {
    const u32 width = buffer.widths[first + column];
    Choice::load(width, buffer.words + buffer.starts[first + column] + place.part * width, codes[column]);
    decoders[column] = decoder_of(buffer.scales[first + column], buffer.offsets[first + column], T{});
  }
  const PhiloxPair pair = pair_of(place, seed);
  T* target = out + first_element(place);
  u32 noise[4];
#pragma unroll
  for (int quad = 0; quad < kQuads; ++quad) {
    if (quad % 2 == 0) make_noise(pair, place, quad, seed, noise);
    float values[2][4];
#pragma unroll
    for (int column = 0; column < 2; ++column) {
      decode_plain(codes[column][quad], noise[2 * (quad % 2) + column], decoders[column], values[column]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      *reinterpret_cast<Row<T>*>(target) = row_of(values[0][i], values[1][i], T{});
      target = rows_after(target, 1u, place.width);
    }
  }
}

GACT_FN WidthSections width_sections_of(u8* buffer, i64 scale_start, i64 offset_start, const u8* widths,
                                        const u32* starts) {
  return WidthSections{reinterpret_cast<u32*>(buffer), reinterpret_cast<u16*>(buffer + scale_start),
                       reinterpret_cast<u16*>(buffer + offset_start), widths, starts};
}

using Choice = Widths<GACT_WIDTHS>;

}  // namespace gact

GACT_KERNEL(gact::Layout::kThreads, gact::kPackBlocks)
pack_widths(const gact::Stored* x, gact::u64 length, gact::u64 columns, gact::u64 pitch, gact::u64 seed,
            gact::u8* buffer, gact::i64 scale_start, gact::i64 offset_start, const gact::u8* widths,
            const gact::u32* starts) {
  using namespace gact;
  GACT_SHARED Memory<Stored, Layout> memory;
  pack_with_widths<Stored, Layout, Choice>(x, length, static_cast<u32>(columns), static_cast<u32>(pitch), seed,
                                           width_sections_of(buffer, scale_start, offset_start, widths, starts),
                                           memory);
}

// The range of each group, by which something else ranks them.
GACT_KERNEL(gact::Layout::kThreads, gact::kPackBlocks)
find_ranges(const gact::Stored* x, gact::u64 length, gact::u64 columns, gact::u64 pitch, float* ranges) {
  using namespace gact;
  GACT_SHARED Memory<Stored, Layout> memory;
  const u32 width = static_cast<u32>(columns), apart = static_cast<u32>(pitch), index = thread_of_block();
  const Place place = place_of_thread(Layout{}, length, width, apart);
  Row<Stored> rows[kTileRows];
  if (is_whole(place)) {
    load_tile(x, place, rows, memory);
  } else {
    ends_of_any_tile(x, place, memory);
  }
  sync_block();
  if (index >= Layout::kGroups) return;
  const GroupPlace group = place_of_group(Layout{}, index, length, width, apart);
  if (group.count == 0) return;
  Ends<Stored> ends = memory.ends[0][index];
#pragma unroll
  for (u32 part = 1; part < Layout::kParts; ++part) ends = joined(ends, memory.ends[part][index]);
  float low, high;
  widen(ends, &low, &high);
  ranges[group.number] = high - low;
}

GACT_KERNEL(gact::Layout::kThreads, gact::kUnpackBlocks)
unpack_widths(gact::u8* buffer, gact::u64 length, gact::u64 columns, gact::u64 seed, gact::Stored* out,
              gact::i64 scale_start, gact::i64 offset_start, const gact::u8* widths, const gact::u32* starts) {
  using namespace gact;
  unpack_with_widths<Stored, Layout, Choice>(width_sections_of(buffer, scale_start, offset_start, widths, starts),
                                             length, static_cast<u32>(columns), seed, out);
}
