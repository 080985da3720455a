// The ranges of groups, of which several threads have a part.
#pragma once

#include "cuda/tile.h"

namespace gact {

// The range of the elements of a group that a thread has; of 16-bit types the lowest element and the highest, negated.
template <class T>
struct Ends {
  u32 pair;
};

template <>
struct alignas(8) Ends<float> {
  float low, high;
};

GACT_FN Ends<float> no_ends(float) { return Ends<float>{float_of(kInfinityBits), -float_of(kInfinityBits)}; }

GACT_FN Ends<Bfloat> no_ends(Bfloat) { return Ends<Bfloat>{0x7F807F80u}; }

GACT_FN Ends<Half> no_ends(Half) { return Ends<Half>{0x7C007C00u}; }

GACT_FN Ends<float> joined(Ends<float> a, Ends<float> b) {
  return Ends<float>{smaller(a.low, b.low), larger(a.high, b.high)};
}

template <class T>
GACT_FN Ends<T> joined(Ends<T> a, Ends<T> b) {
  return Ends<T>{smaller_pair(a.pair, b.pair, T{})};
}

GACT_FN void widen(Ends<float> ends, float* low, float* high) {
  *low = ends.low;
  *high = ends.high;
}

template <class T>
GACT_FN void widen(Ends<T> ends, float* low, float* high) {
  *low = value_of(Row<T>{ends.pair}, 0);
  *high = -value_of(Row<T>{ends.pair}, 1);
}

GACT_FN Ends<float> ends_of(float value) { return Ends<float>{value, value}; }

template <class T>
GACT_FN Ends<T> ends_of(T value) {
  return Ends<T>{value.bits | static_cast<u32>(value.bits ^ 0x8000u) << 16};
}

// Of rows first .. last - 1, each column for itself.
GACT_FN void ends_of_rows(const Row<float>* rows, int first, int last, Ends<float> ends[2]) {
#pragma unroll
  for (int column = 0; column < 2; ++column) {
    ends[column] = ends_of(rows[first].values[column]);
#pragma unroll
    for (int i = first + 1; i < last; ++i) ends[column] = joined(ends[column], ends_of(rows[i].values[column]));
  }
}

template <class T>
GACT_FN void ends_of_rows(const Row<T>* rows, int first, int last, Ends<T> ends[2]) {
  u32 low = rows[first].pair, high = rows[first].pair;
#pragma unroll
  for (int i = first + 1; i < last; ++i) {
    low = smaller_pair(low, rows[i].pair, T{});
    high = larger_pair(high, rows[i].pair, T{});
  }
  high ^= 0x80008000u;
  ends[0] = Ends<T>{select_bytes(low, high, 0x5410u)};
  ends[1] = Ends<T>{select_bytes(low, high, 0x7632u)};
}

template <class T, int GROUP>
GACT_FN void ends_of_tile(const Row<T>* rows, ByColumn<GROUP>, Ends<T> ends[2]) {
  ends_of_rows(rows, 0, kTileRows, ends);
}

template <class T, int GROUP>
GACT_FN void ends_of_tile(const Row<T>* rows, InMemoryOrder<GROUP>, Ends<T>* ends) {
  constexpr int kRows = GROUP / 16;
#pragma unroll
  for (int group = 0; group < static_cast<int>(kTileRows) / kRows; ++group) {
    Ends<T> both[2];
    ends_of_rows(rows, group * kRows, (group + 1) * kRows, both);
    ends[group] = joined(both[0], both[1]);
  }
}

}  // namespace gact
