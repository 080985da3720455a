// CUDA kernels pack and unpack, one module for an element type, a group size and a width: compile with
// -DGACT_ELEMENT=float, Half or Bfloat, -DGACT_GROUP=64, 128, 256 or 512 and -DGACT_BITS=1 to 8, with -fmad=false
// -ftz=false -prec-div=true. A warp takes a tile, or one group of what is left after the last whole tile.
#include "cuda/fast_path.h"
#include "cuda/group.h"

namespace gact {

// ---- ranges of the groups of a tile

template <class Shape>
GACT_FN Ends ends_of_owned_group(const Vector tile[], float) {
  u32 lows[Shape::kSlots], highs[Shape::kSlots];
  constexpr int kWords = 4 * Shape::kVectors * Shape::kChunksOfSlot;
#pragma unroll
  for (int slot = 0; slot < Shape::kSlots; ++slot) {
    float low = float_of(tile[slot * kWords / 4].words[0]), high = low;
#pragma unroll
    for (int i = 1; i < kWords; ++i) {
      const float value = float_of(tile[(slot * kWords + i) / 4].words[i % 4]);
      low = smaller(low, value);
      high = larger(high, value);
    }
    lows[slot] = bits_of(low);
    highs[slot] = bits_of(high);
  }
  const u32 low = reduce_slots<Shape>(lows, [](u32 a, u32 b) { return bits_of(smaller(float_of(a), float_of(b))); });
  const u32 high = reduce_slots<Shape>(highs, [](u32 a, u32 b) { return bits_of(larger(float_of(a), float_of(b))); });
  return Ends{float_of(low), float_of(high)};
}

// The lowest element and the highest, negated, are reduced side by side.
template <class Shape, class T>
GACT_FN Ends ends_of_owned_group(const Vector tile[], T type) {
  u32 ends[Shape::kSlots];
  constexpr int kWords = 4 * Shape::kChunksOfSlot;
#pragma unroll
  for (int slot = 0; slot < Shape::kSlots; ++slot) {
    u32 low = tile[slot * kWords / 4].words[0], high = low;
#pragma unroll
    for (int i = 1; i < kWords; ++i) {
      const u32 pair = tile[(slot * kWords + i) / 4].words[i % 4];
      low = smaller_pair(low, pair, type);
      high = larger_pair(high, pair, type);
    }
    high ^= 0x80008000u;
    ends[slot] = smaller_pair(select_bytes(low, high, 0x5410u), select_bytes(low, high, 0x7632u), type);
  }
  const u32 both = reduce_slots<Shape>(ends, [](u32 a, u32 b) { return smaller_pair(a, b, T{}); });
  Ends result;
  widen_pair(both, type, &result.low, &result.high);
  result.high = -result.high;
  return result;
}

// ---- pack

template <class T, int BITS, int GROUP>
GACT_FN void pack_tile(const T* x, i64 numel, u64 seed, const Buffer& buffer, i64 index, u32* noise) {
  using Shape = Tile<T, GROUP>;
  const i64 first_group = index * Shape::kGroups;
  u8* planes = buffer.planes + first_group * (BITS * GROUP / 8) + first_plane_position<BITS, GROUP>();
  Vector tile[Shape::kChunks * Shape::kVectors];
  load_tile<T, Shape>(x + index * Shape::kElements, tile);
  make_noise<Shape>(index * Shape::kChunks, seed, false, noise);
  const Ends ends = ends_of_owned_group<Shape>(tile, T{});
  constexpr float kLevels = (1 << BITS) - 1;
  const Grid grid = finest_grid(ends.low + 0.0f, ends.high, kLevels, T{});  // + 0.0 turns -0.0 into 0.0
  const PlainGroup owned = plain_group(grid, ends.low, ends.high, kLevels, T{});
  const u32 selectors[2] = {noise_selector(), noise_selector()};
  u32 edges[Shape::kSlots], joined[2] = {0u, 0u};
#pragma unroll
  for (int slot = 0; slot < Shape::kSlots; ++slot) {
    const u32 owner = owner_of_slot<Shape>(slot);
    const float offset = float_of(shuffle(bits_of(owned.grid.offset), owner));
    const float inverse = float_of(shuffle(bits_of(owned.grid.inverse), owner));
    edges[slot] = 0;
#pragma unroll
    for (int chunk = slot * Shape::kChunksOfSlot; chunk < (slot + 1) * Shape::kChunksOfSlot; ++chunk) {
      float values[kLaneElements];
      u32 words[kLaneElements], codes[2];
      widen(tile + chunk * Shape::kVectors, T{}, values);
      load_noise<T>(noise, chunk, words);
      edges[slot] = quantise<BITS>(values, offset, inverse, words, selectors, edges[slot], codes);
      // Masked, so that codes of a slow group do not spill into the groups that share its set.
      constexpr u32 kMask = BITS < 3 ? ((1u << BITS) - 1u) * 0x01010101u : ~0u;
      const int place = chunk % kJoinedChunks<BITS>;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const u32 placed = (codes[half] & kMask) << (place * BITS);
        joined[half] = place == 0 ? placed : joined[half] | placed;
      }
      if (place == kJoinedChunks<BITS> - 1) store_planes<T, BITS, GROUP>(joined, chunk - place, planes);
    }
  }
  const u32 edges_of_owned = reduce_slots<Shape>(edges, [](u32 a, u32 b) { return a + b; });
  if (lane_id() % Shape::kSegment < Shape::kSlots) {
    const bool dithered = owned.may_dither && dither_pays(edges_of_owned, GROUP);
    const i64 group = first_group + owned_group<Shape>();
    buffer.scales[group] = static_cast<u16>((bits_of(owned.grid.scale) >> 16) | (dithered ? kDitherFlag : 0));
    buffer.offsets[group] = static_cast<u16>(owned.grid.stored_offset);
  }
  if (!any_lane(owned.slow)) return;
  sync_warp();  // orders this after the writes above for these groups
#pragma unroll 1
  for (int group = 0; group < Shape::kGroups; ++group) {
    if (shuffle(owned.slow ? 1u : 0u, owner_of_group<Shape>(group)) != 0u) {
      pack_group<T, BITS, GROUP>(x, numel, seed, buffer, first_group + group);
    }
  }
}

template <class T, int BITS, int GROUP>
GACT_FN void pack_warp(const T* x, i64 numel, u64 seed, const Buffer& buffer,
                       Vector noise[][Tile<T, GROUP>::kNoiseVectors]) {
  using Shape = Tile<T, GROUP>;
  const i64 tiles = numel / Shape::kElements;
  const i64 groups = (numel + GROUP - 1) / GROUP;
  const i64 warp = warp_of_grid();
  if (warp < tiles) {
    pack_tile<T, BITS, GROUP>(x, numel, seed, buffer, warp, reinterpret_cast<u32*>(noise[warp_of_block()]));
  } else if (warp - tiles < groups - tiles * Shape::kGroups) {
    pack_group<T, BITS, GROUP>(x, numel, seed, buffer, tiles * Shape::kGroups + warp - tiles);
  }
}

// ---- unpack

template <class T, int BITS, int GROUP>
GACT_FN void unpack_tile(const Buffer& buffer, i64 numel, u64 seed, T* out, i64 index, u32* noise) {
  using Shape = Tile<T, GROUP>;
  const i64 first_group = index * Shape::kGroups;
  const u8* planes = buffer.planes + first_group * (BITS * GROUP / 8) + first_plane_position<BITS, GROUP>();
  T* target = out + index * Shape::kElements;
  const bool aligned = is_aligned(target);
  constexpr int kJoined = kJoinedChunks<BITS>;
  u32 plane_words[Shape::kChunks / kJoined][kPlaneSets<BITS>];
#pragma unroll
  for (int i = 0; i < Shape::kChunks / kJoined; ++i) load_planes<BITS, GROUP>(planes, i * kJoined, plane_words[i]);

  const i64 group = first_group + owned_group<Shape>();
  const u16 stored = buffer.scales[group];
  const bool dithered = (stored & kDitherFlag) != 0;
  const float offset = offset_value(buffer.offsets[group], step_of(stored), T{});
  const float unit = step_of(stored) * kDitherUnit;
  const float base = dithered ? dithered_base(offset, unit) : offset;
  if (any_lane(dithered)) make_noise<Shape>(index * Shape::kChunks, seed, true, noise);

  const u32 selector = noise_selector();
  u32 joined[2];
#pragma unroll
  for (int slot = 0; slot < Shape::kSlots; ++slot) {
    const u32 owner = owner_of_slot<Shape>(slot);
    const float slot_base = float_of(shuffle(bits_of(base), owner));
    const float slot_unit = float_of(shuffle(bits_of(unit), owner));
    const u32 mask = shuffle(dithered ? 0x00FFFFFFu : 0x00FF0000u, owner);
#pragma unroll
    for (int chunk = slot * Shape::kChunksOfSlot; chunk < (slot + 1) * Shape::kChunksOfSlot; ++chunk) {
      u32 words[kLaneElements], codes[2];
      float values[kLaneElements];
      load_noise<T>(noise, chunk, words);
      if (chunk % kJoined == 0) codes_of_planes<T, BITS>(plane_words[chunk / kJoined], joined);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        codes[half] = joined[half] >> (chunk % kJoined * BITS);
        if (kJoined > 1) codes[half] &= ((1u << BITS) - 1u) * 0x01010101u;
      }
#pragma unroll
      for (int i = 0; i < kLaneElements; ++i) {
        const u32 both = select_bytes(words[i], codes[i / 4], selector + (4u + static_cast<u32>(i % 4)) * 0x100u);
        values[i] = decode_plain<BITS>(both, mask, slot_base, slot_unit);
      }
      store_chunk<T, Shape>(values, aligned, target + chunk * kChunkElements);
    }
  }
  const bool special = (stored & kSpecialFlag) != 0;
  if (!any_lane(special)) return;
  sync_warp();  // orders this after the writes above for these groups
#pragma unroll 1
  for (int i = 0; i < Shape::kGroups; ++i) {
    if (shuffle(special ? 1u : 0u, owner_of_group<Shape>(i)) != 0u) {
      unpack_group<T, BITS, GROUP>(buffer, numel, seed, out, first_group + i);
    }
  }
}

template <class T, int BITS, int GROUP>
GACT_FN void unpack_warp(const Buffer& buffer, i64 numel, u64 seed, T* out,
                         Vector noise[][Tile<T, GROUP>::kNoiseVectors]) {
  using Shape = Tile<T, GROUP>;
  const i64 tiles = numel / Shape::kElements;
  const i64 groups = (numel + GROUP - 1) / GROUP;
  const i64 warp = warp_of_grid();
  if (warp < tiles) {
    unpack_tile<T, BITS, GROUP>(buffer, numel, seed, out, warp, reinterpret_cast<u32*>(noise[warp_of_block()]));
  } else if (warp - tiles < groups - tiles * Shape::kGroups) {
    unpack_group<T, BITS, GROUP>(buffer, numel, seed, out, tiles * Shape::kGroups + warp - tiles);
  }
}

// The element type and the tile of this module.
using Stored = GACT_ELEMENT;
using Shape = Tile<Stored, GACT_GROUP>;

}  // namespace gact

GACT_KERNEL(gact::kBlockThreads)
pack(const gact::Stored* x, gact::i64 numel, gact::u64 seed, gact::u8* buffer, gact::i64 scale_start,
     gact::i64 offset_start) {
  using namespace gact;
  GACT_SHARED Vector noise[kBlockWarps][Shape::kNoiseVectors];
  pack_warp<Stored, GACT_BITS, GACT_GROUP>(x, numel, seed, sections_of(buffer, scale_start, offset_start), noise);
}

GACT_KERNEL(gact::kBlockThreads)
unpack(gact::u8* buffer, gact::i64 numel, gact::u64 seed, gact::Stored* out, gact::i64 scale_start,
       gact::i64 offset_start) {
  using namespace gact;
  GACT_SHARED Vector noise[kBlockWarps][Shape::kNoiseVectors];
  unpack_warp<Stored, GACT_BITS, GACT_GROUP>(sections_of(buffer, scale_start, offset_start), numel, seed, out, noise);
}
