// CUDA kernels sample and sampled_words. Compile with -DGACT_ELEMENT=float, Half or Bfloat, with -fmad=false. A lane
// has a word of a group, a warp four groups: those of one counter of random numbers.
#include "common/sampled.h"
#include "cuda/blocks.h"

namespace gact {

using Stored = GACT_ELEMENT;
static_assert(kSampledGroup == kWarpLanes);

constexpr u32 kGroups = 4;  // of a warp

// Where a group is among rows of words.
struct Place {
  u32 of_row, in_row;  // groups
  u64 row_start;       // in words
};

// Fewer than 2^31 groups.
GACT_FN Place place_of(u32 group, u32 words) {
  const u32 of_row = (words + kSampledGroup - 1) / kSampledGroup, row = group / of_row;
  return Place{of_row, group - row * of_row, static_cast<u64>(row) * words};
}

GACT_FN void advance(Place& place, u32 words) {
  const bool ends = ++place.in_row == place.of_row;
  place.in_row = ends ? 0u : place.in_row;
  place.row_start += ends ? words : 0u;
}

// Of the lane's word in its row, which the row may not have.
GACT_FN u32 word_of(const Place& place) { return place.in_row * kSampledGroup + lane_id(); }

// Of an array in registers, by an index that is not known when this is compiled.
GACT_FN u32 chosen_of(const u32 values[kGroups], u32 index) {
  return (index & 2u) != 0 ? ((index & 1u) != 0 ? values[3] : values[2]) : ((index & 1u) != 0 ? values[1] : values[0]);
}

}  // namespace gact

// x: rows of `words`. groups: of all of them. first: the number of the first one. See sampling.py for the results.
GACT_KERNEL(gact::kBlockThreads)
sample(const gact::Stored* x, gact::u64 groups, gact::u64 words, gact::u64 seed, gact::u64 first, gact::u32* bits,
       gact::u16* logarithms, float* variance) {
  using namespace gact;
  const i64 quarter = static_cast<i64>(first / kGroups) + warp_of_grid();
  const i64 begin =
      quarter * kGroups - static_cast<i64>(first);  // the first of its groups here, which may be before all
  if (begin >= static_cast<i64>(groups)) return;
  const u32 lane = lane_id(), own = lane % kGroups;
  float values[kGroups];
  u32 most[kGroups];
  const u32 width = static_cast<u32>(words);
  Place place = place_of(begin < 0 ? 0u : static_cast<u32>(begin), width);
#pragma unroll
  for (u32 i = 0; i < kGroups; ++i) {
    const i64 group = begin + i;
    const bool is_here = group >= 0 && group < static_cast<i64>(groups);
    const u32 word = word_of(place);
    values[i] = is_here && word < width ? to_float(x[place.row_start + word]) : -float_of(kInfinityBits);
    if (group >= 0) advance(place, width);
    float largest = values[i];
#pragma unroll
    for (u32 mask = kSampledGroup / 2; mask > 0; mask /= 2) {
      largest = larger(largest, float_of(shuffle_xor(bits_of(largest), mask)));
    }
    most[i] = bits_of(largest);
  }
  const u16 stored = half_not_below(float_of(chosen_of(most, own)));
  const float own_largest = stored_largest(stored);
  u32 random[4], sums[kGroups], squares[kGroups], chosen[kGroups];
  philox_of_groups(quarter, seed, random);
#pragma unroll
  for (u32 i = 0; i < kGroups; ++i) {
    const i32 share = share_of(values[i] - float_of(shuffle(bits_of(own_largest), i)));
    u32 square = static_cast<u32>(square_of_share(share)), sum = static_cast<u32>(share);
#pragma unroll
    for (u32 step = 1; step < kSampledGroup; step *= 2) {
      square += shuffle_xor(square, step);
      const u32 before = shuffle(sum, lane - step);
      sum += lane >= step ? before : 0u;
    }
    const u32 passed = (sum + (random[i] >> (32 - kSampledOneBits))) >> kSampledOneBits;
    const u32 earlier = shuffle(passed, lane - 1);
    chosen[i] = lanes_with(passed != (lane == 0 ? 0u : earlier));
    squares[i] = square;
    sums[i] = shuffle(sum, kSampledGroup - 1);
  }
  const i64 group = begin + lane;
  if (lane >= kGroups || group < 0 || group >= static_cast<i64>(groups)) return;
  bits[group] = chosen_of(chosen, own);
  logarithms[group] = stored;
  variance[group] =
      sampled_variance(static_cast<i32>(chosen_of(sums, own)), static_cast<i32>(chosen_of(squares, own)), own_largest);
}

// out: rows of `words`. groups: of all of them.
GACT_KERNEL(gact::kBlockThreads)
sampled_words(const gact::u32* bits, const gact::u16* logarithms, gact::u64 groups, gact::u64 words,
              gact::Stored* out) {
  using namespace gact;
  const i64 begin = warp_of_grid() * kGroups;
  if (begin >= static_cast<i64>(groups)) return;
  const u32 width = static_cast<u32>(words);
  Place place = place_of(static_cast<u32>(begin), width);
#pragma unroll
  for (u32 i = 0; i < kGroups; ++i) {
    const i64 group = begin + i;
    const u32 word = word_of(place);
    if (group < static_cast<i64>(groups) && word < width) {
      const float largest = stored_largest(logarithms[group]);
      const float none = is_nan(largest) ? largest : -float_of(kInfinityBits);
      from_float((bits[group] >> lane_id() & 1u) != 0 ? largest : none, out + place.row_start + word);
    }
    advance(place, width);
  }
}
