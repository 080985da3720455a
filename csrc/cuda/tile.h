// How a warp holds a tile of elements, its noise and its bit planes.
//
// A tile is kChunks chunks of 256 elements. In a chunk a lane has 8 elements: of 16-bit types 8 in a row; of float two
// lanes share 16 in a row and alternate every 4, so that one instruction touches whole sectors of memory. A segment is
// the lanes that have elements of the same group in a chunk; a slot is one of the groups that a lane has elements of.
// Lane l of a segment owns the group in slot l % kSlots: it holds the parameters of that group.
#pragma once

#include "cuda/warp.h"

namespace gact {

constexpr int kWarpLanes = 32;
constexpr int kBlockWarps = 4;
constexpr int kBlockThreads = kBlockWarps * kWarpLanes;
constexpr int kChunkElements = kPhiloxBlock;
constexpr int kLaneElements = 8;
constexpr int kNoiseRow = 80;  // words of a chunk: 64 of noise, and padding so that two chunks use different banks

struct alignas(16) Vector {
  u32 words[4];
};

template <class T, int GROUP>
struct Tile {
  static constexpr int kVectors = sizeof(T) / 2;  // of a lane in a chunk
  static constexpr int kChunks = 8 / kVectors;
  static constexpr int kElements = kChunks * kChunkElements;
  static constexpr int kGroups = kElements / GROUP;
  static constexpr int kSlots = GROUP > kChunkElements ? kGroups : kChunks;
  static constexpr int kChunksOfSlot = kChunks / kSlots;
  static constexpr int kSegment = GROUP < kChunkElements ? GROUP / kLaneElements : kWarpLanes;
  static constexpr int kSegments = kWarpLanes / kSegment;
  static constexpr int kNoiseVectors = kChunks * kNoiseRow / 4;
};

GACT_FN u32 lane_id() { return thread_of_block() % kWarpLanes; }

GACT_FN i64 warp_of_grid() { return static_cast<i64>(block_of_grid()) * kBlockWarps + warp_of_block(); }

// Number, in the tile, of the group that this lane owns.
template <class Shape>
GACT_FN int owned_group() {
  return static_cast<int>(lane_id()) % Shape::kSlots * Shape::kSegments + static_cast<int>(lane_id()) / Shape::kSegment;
}

// One of the lanes that own a group: the one that writes its scale and offset.
template <class Shape>
GACT_FN u32 owner_of_group(int group) {
  return static_cast<u32>(group % Shape::kSegments * Shape::kSegment + group / Shape::kSegments);
}

// The owner of the group that this lane has in a slot.
template <class Shape>
GACT_FN u32 owner_of_slot(int slot) {
  return lane_id() / Shape::kSegment * Shape::kSegment + static_cast<u32>(slot);
}

// Joins the values of the lanes of a segment, slot by slot; each lane gets the result of the slot whose group it owns.
template <class Shape, class Join>
GACT_FN u32 reduce_slots(u32 values[Shape::kSlots], Join join) {
#pragma unroll
  for (int mask = 1; mask < Shape::kSegment; mask *= 2) {
    if (mask >= Shape::kSlots) {
      values[0] = join(values[0], shuffle_xor(values[0], static_cast<u32>(mask)));
      continue;
    }
    const bool odd = (lane_id() & static_cast<u32>(mask)) != 0;
#pragma unroll
    for (int i = 0; i < Shape::kSlots / (2 * mask); ++i) {
      const u32 kept = odd ? values[2 * i + 1] : values[2 * i];
      const u32 sent = odd ? values[2 * i] : values[2 * i + 1];
      values[i] = join(kept, shuffle_xor(sent, static_cast<u32>(mask)));
    }
  }
  return values[0];
}

// ---- elements

// First element, in its chunk, of a vector of this lane.
template <class T>
GACT_FN int vector_start(int vector) {
  const int lane = static_cast<int>(lane_id());
  return sizeof(T) == 2 ? lane * kLaneElements : lane / 2 * 16 + lane % 2 * 4 + vector * 8;
}

// Whether vectors can be read and written whole; otherwise elements are, one at a time.
template <class T>
GACT_FN bool is_aligned(const T* x) {
  return reinterpret_cast<u64>(x) % sizeof(Vector) == 0;
}

GACT_FN u32 load_word(const float* x) { return bits_of(*x); }

template <class T>
GACT_FN u32 load_word(const T* x) {
  return x[0].bits | static_cast<u32>(x[1].bits) << 16;
}

GACT_FN void store_word(u32 word, float* out) { *out = float_of(word); }

template <class T>
GACT_FN void store_word(u32 word, T* out) {
  out[0].bits = static_cast<u16>(word);
  out[1].bits = static_cast<u16>(word >> 16);
}

template <class T, class Shape>
GACT_FN void load_tile(const T* x, Vector tile[Shape::kChunks * Shape::kVectors]) {
  constexpr int kWordElements = 4 / sizeof(T);
  if (is_aligned(x)) {
#pragma unroll
    for (int i = 0; i < Shape::kChunks * Shape::kVectors; ++i) {
      const T* source = x + i / Shape::kVectors * kChunkElements + vector_start<T>(i % Shape::kVectors);
      tile[i] = *reinterpret_cast<const Vector*>(source);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < Shape::kChunks * Shape::kVectors; ++i) {
    const T* source = x + i / Shape::kVectors * kChunkElements + vector_start<T>(i % Shape::kVectors);
    for (int word = 0; word < 4; ++word) tile[i].words[word] = load_word(source + word * kWordElements);
  }
}

// The 8 elements that a lane has in a chunk, in float.
GACT_FN void widen(const Vector vectors[2], float, float values[kLaneElements]) {
#pragma unroll
  for (int i = 0; i < kLaneElements; ++i) values[i] = float_of(vectors[i / 4].words[i % 4]);
}

template <class T>
GACT_FN void widen(const Vector vectors[1], T type, float values[kLaneElements]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) widen_pair(vectors[0].words[i], type, values + 2 * i, values + 2 * i + 1);
}

GACT_FN void narrow(const float values[kLaneElements], float, Vector vectors[2]) {
#pragma unroll
  for (int i = 0; i < kLaneElements; ++i) vectors[i / 4].words[i % 4] = bits_of(values[i]);
}

template <class T>
GACT_FN void narrow(const float values[kLaneElements], T type, Vector vectors[1]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) vectors[0].words[i] = narrow_pair(values[2 * i], values[2 * i + 1], type);
}

template <class T, class Shape>
GACT_FN void store_chunk(const float values[kLaneElements], bool aligned, T* chunk) {
  constexpr int kWordElements = 4 / sizeof(T);
  Vector vectors[Shape::kVectors];
  narrow(values, T{}, vectors);
#pragma unroll
  for (int i = 0; i < Shape::kVectors; ++i) {
    T* target = chunk + vector_start<T>(i);
    if (aligned) {
      *reinterpret_cast<Vector*>(target) = vectors[i];
      continue;
    }
#pragma unroll
    for (int word = 0; word < 4; ++word) store_word(vectors[i].words[word], target + word * kWordElements);
  }
}

// ---- noise

// The Philox words of a tile whose first chunk has this number, with every bit inverted where `inverted`.
template <class Shape>
GACT_FN void make_noise(i64 first_chunk, u64 seed, bool inverted, u32* noise) {
  const u32 lane = lane_id();
  const u32 flip = inverted ? ~0u : 0u;
#pragma unroll
  for (int pair = 0; pair < Shape::kChunks / 2; ++pair) {
    u32 words[4];
    philox_of_lane(static_cast<u64>(first_chunk) + 2u * static_cast<u32>(pair), lane, seed, words);
    u32* row = noise + (2u * static_cast<u32>(pair) + lane / 16u) * kNoiseRow + lane % 16u;
#pragma unroll
    for (int word = 0; word < 4; ++word) row[16 * word] = words[word] ^ flip;
  }
  sync_warp();
}

// The words that hold the noise of this lane's 8 elements of a chunk.
template <class T>
GACT_FN void load_noise(const u32* noise, int chunk, u32 words[kLaneElements]) {
  const u32* row = noise + chunk * kNoiseRow + lane_id() / 8u * 16u;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Vector four =
        *reinterpret_cast<const Vector*>(row + vector_start<T>(half) % 16 + (sizeof(T) == 2 ? 4 * half : 0));
#pragma unroll
    for (int i = 0; i < 4; ++i) words[4 * half + i] = four.words[i];
  }
}

// For select_bytes(word, ..): the two bytes of a word of noise that belong to an element.
GACT_FN u32 noise_selector(u32 element) {
  const u32 first_byte = element / 16u % 4u;
  return first_byte | (first_byte + 1u) % 4u << 4;
}

// For all elements of this lane.
GACT_FN u32 noise_selector() { return noise_selector(lane_id() * kLaneElements); }

// ---- bit planes

// Exchanges the bits whose positions differ by `SHIFT` where `mask` has the lower one. Its own inverse.
template <int SHIFT>
GACT_FN u32 swap_bits(u32 word, u32 mask) {
  const u32 changed = (word ^ (word >> SHIFT)) & mask;
  return word ^ (changed * ((1u << SHIFT) + 1u));  // changed and, beside it, changed << SHIFT
}

// From bit 8 * e + b, with 4 * e' more for the second half of the elements, to bit 8 * b + e + 4 * e', for four bits b
// of eight elements; and back.
GACT_FN u32 transpose_bits(u32 word) { return swap_bits<7>(swap_bits<14>(word, 0x0000CCCCu), 0x00AA00AAu); }

// Byte j of lane i becomes byte i of lane j, among four lanes in a row. Its own inverse.
GACT_FN u32 transpose_lanes(u32 word) {
  const u32 lane = lane_id();
  const u32 pairs = select_bytes(word, shuffle_xor(word, 1), (lane & 1u) != 0 ? 0x3715u : 0x6240u);
  return select_bytes(pairs, shuffle_xor(pairs, 2), (lane & 2u) != 0 ? 0x3276u : 0x5410u);
}

// Between the bits in the order of their elements and the order in which lanes have them. Its own inverse.
template <class T>
GACT_FN u32 reorder_elements(u32 word) {
  return sizeof(T) == 2 ? word : swap_bits<4>(word, 0x00F000F0u);
}

// Lanes read and write words of four planes at a time, a set; of chunks that have fewer, some share a set.
template <int BITS>
constexpr int kPlaneSets = (BITS + 3) / 4;
template <int BITS>
constexpr int kJoinedChunks = BITS == 1 ? 4 : (BITS == 2 ? 2 : 1);

// The word that a lane reads or writes in the first set of a tile; the others lie at fixed distances.
template <int BITS, int GROUP>
GACT_FN i64 first_plane_position() {
  const int lane = static_cast<int>(lane_id());
  const int joined = kJoinedChunks<BITS> > 1 ? lane % 4 / BITS : 0;
  const int plane = kJoinedChunks<BITS> > 1 ? lane % 4 % BITS : lane % 4;
  const int element = joined * kChunkElements + lane / 4 * 32;
  return (element / GROUP * BITS + plane) * (GROUP / 8) + element % GROUP / 8;
}

// Bytes from there to a lane's word for planes 4 * set .. 4 * set + 3 of a chunk, the first of those that share a set.
template <int BITS, int GROUP>
GACT_FN int plane_distance(int chunk, int set) {
  const int first = chunk * kChunkElements;
  return (first / GROUP * BITS + 4 * set) * (GROUP / 8) + first % GROUP / 8;
}

// Whether this lane has a plane in a set.
template <int BITS>
GACT_FN bool has_plane(int set) {
  return kJoinedChunks<BITS> > 1 || 4 * set + static_cast<int>(lane_id()) % 4 < BITS;
}

// Byte e of codes[0], and of codes[1] for the second half, holds the code of an element, with those of chunks that
// share the set above one another; stored as bits of planes. Here and in load_planes, `planes` is this lane's first
// word.
template <class T, int BITS, int GROUP>
GACT_FN void store_planes(const u32 codes[2], int chunk, u8* planes) {
#pragma unroll
  for (int set = 0; set < kPlaneSets<BITS>; ++set) {
    u32 word = codes[0] + codes[1] * 16u;
    if (BITS > 4) {
      word = set == 0 ? (codes[0] & 0x0F0F0F0Fu) | ((codes[1] << 4) & 0xF0F0F0F0u)
                      : ((codes[0] >> 4) & 0x0F0F0F0Fu) | (codes[1] & 0xF0F0F0F0u);
    }
    word = reorder_elements<T>(transpose_lanes(transpose_bits(word)));
    if (has_plane<BITS>(set)) *reinterpret_cast<u32*>(planes + plane_distance<BITS, GROUP>(chunk, set)) = word;
  }
}

// The words of planes that this lane reads for a chunk; zero where there is no plane.
template <int BITS, int GROUP>
GACT_FN void load_planes(const u8* planes, int chunk, u32 words[kPlaneSets<BITS>]) {
#pragma unroll
  for (int set = 0; set < kPlaneSets<BITS>; ++set) {
    words[set] = 0u;
    if (has_plane<BITS>(set)) {
      words[set] = *reinterpret_cast<const u32*>(planes + plane_distance<BITS, GROUP>(chunk, set));
    }
  }
}

// The inverse of store_planes, from words that load_planes read.
template <class T, int BITS>
GACT_FN void codes_of_planes(const u32 words[kPlaneSets<BITS>], u32 codes[2]) {
  const u32 low = transpose_bits(transpose_lanes(reorder_elements<T>(words[0])));
  codes[0] = low & 0x0F0F0F0Fu;
  codes[1] = (low >> 4) & 0x0F0F0F0Fu;
  if (BITS <= 4) return;
  const u32 high = transpose_bits(transpose_lanes(reorder_elements<T>(words[kPlaneSets<BITS> - 1])));
  codes[0] |= (high << 4) & 0xF0F0F0F0u;
  codes[1] |= high & 0xF0F0F0F0u;
}

}  // namespace gact
