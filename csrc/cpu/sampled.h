// The loops of sample and sampled_words, which dispatch.h includes in each kernels_*.cpp; compilers vectorise all but
// Isa::range and Isa::passes.
#pragma once

#include "common/sampled.h"
#include "cpu/float_mode.h"
#include "cpu/kernels.h"

namespace gact {
namespace {

constexpr int kSampledBlock = 32;  // groups that are worked on together, in the nearest cache

// The random numbers of some groups that follow each other.
inline void starts_of(i64 first, int count, u64 seed, u32* starts) {
  alignas(64) u32 words[kSampledBlock + 8];
  const i64 quarter = first / 4, quarters = (first + count + 3) / 4 - quarter;
  for (i64 i = 0; i < quarters; ++i) philox_of_groups(quarter + i, seed, words + 4 * i);
  for (int i = 0; i < count; ++i) starts[i] = words[first - 4 * quarter + i] >> (32 - kSampledOneBits);
}

template <class T>
inline const float* as_floats(const T* x, int count, int padded, float* values) {
  if (sizeof(T) == sizeof(float) && count == padded) return reinterpret_cast<const float*>(x);
  for (int i = 0; i < count; ++i) values[i] = to_float(x[i]);
  for (int i = count; i < padded; ++i) values[i] = -float_of(kInfinityBits);  // words of probability zero
  return values;
}

template <class Isa>
inline void sample_block(const float* values, i64 first, int count, const SampleJob& job) {
  alignas(64) i32 shares[kSampledBlock * kSampledGroup];
  alignas(64) u32 starts[kSampledBlock];
  alignas(64) float largest[kSampledBlock];
  alignas(64) i32 sums[kSampledBlock], squares[kSampledBlock];
  starts_of(job.first_group + first, count, job.seed, starts);
  for (int i = 0; i < count; ++i) {
    const float* group = values + i * kSampledGroup;
    const Range range = Isa::range(group, kSampledGroup);
    const u16 stored = half_not_below(is_nan(range.low) ? range.low : range.high);
    job.logarithms[first + i] = stored;
    largest[i] = stored_largest(stored);
    i32 sum = 0, square = 0;
    for (int j = 0; j < kSampledGroup; ++j) {
      const i32 share = share_of(group[j] - largest[i]);
      shares[i * kSampledGroup + j] = share;
      sum += share;
      square += square_of_share(share);
    }
    sums[i] = sum;
    squares[i] = square;
  }
  for (int i = 0; i < count; ++i) job.bits[first + i] = Isa::passes(shares + i * kSampledGroup, starts[i]);
  for (int i = 0; i < count; ++i) job.variance[first + i] = sampled_variance(sums[i], squares[i], largest[i]);
}

template <class Isa, class T>
void sample_rows(const SampleJob& job, i64 first, i64 last) {
  const StandardFloatMode mode;
  alignas(64) float values[kSampledBlock * kSampledGroup];
  const i64 groups = (job.words + kSampledGroup - 1) / kSampledGroup;
  for (i64 row = first; row < last; ++row) {
    const T* x = static_cast<const T*>(job.x) + row * job.words;
    for (i64 group = 0; group < groups; group += kSampledBlock) {
      const int count = static_cast<int>(groups - group < kSampledBlock ? groups - group : kSampledBlock);
      const i64 begin = group * kSampledGroup, left = job.words - begin;
      const int padded = count * kSampledGroup, present = static_cast<int>(left < padded ? left : padded);
      sample_block<Isa>(as_floats(x + begin, present, padded, values), row * groups + group, count, job);
    }
  }
}

template <class Isa>
void sample_any(const SampleJob& job, i64 first, i64 last) {
  if (job.element == Element::kFloat) return sample_rows<Isa, float>(job, first, last);
  if (job.element == Element::kHalf) return sample_rows<Isa, Half>(job, first, last);
  sample_rows<Isa, Bfloat>(job, first, last);
}

// Word: of the bits of an element, T its type.
template <class T, class Word>
void sampled_words_rows(const SampledWordsJob& job, i64 first, i64 last) {
  const i64 groups = (job.words + kSampledGroup - 1) / kSampledGroup;
  for (i64 row = first; row < last; ++row) {
    Word* out = static_cast<Word*>(job.out) + row * job.words;
    for (i64 group = 0; group < groups; ++group, out += kSampledGroup) {
      const u32 chosen = job.bits[row * groups + group];
      const float largest = stored_largest(job.logarithms[row * groups + group]);
      T ends[2];
      from_float(is_nan(largest) ? largest : -float_of(kInfinityBits), ends);
      from_float(largest, ends + 1);
      Word words[2];
      std::memcpy(words, ends, sizeof(words));
      const Word apart = words[0] ^ words[1];
      const i64 left = job.words - group * kSampledGroup;
      if (left >= kSampledGroup) {
        for (int j = 0; j < kSampledGroup; ++j)
          out[j] = words[0] ^ (apart & static_cast<Word>(0u - ((chosen >> j) & 1u)));
      } else {
        for (int j = 0; j < left; ++j) out[j] = words[(chosen >> j) & 1u];
      }
    }
  }
}

template <class Isa>
void sampled_words_any(const SampledWordsJob& job, i64 first, i64 last) {
  const StandardFloatMode mode;
  if (job.element == Element::kFloat) return sampled_words_rows<float, u32>(job, first, last);
  if (job.element == Element::kHalf) return sampled_words_rows<Half, u16>(job, first, last);
  sampled_words_rows<Bfloat, u16>(job, first, last);
}

}  // namespace
}  // namespace gact
