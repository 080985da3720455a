// The loops of pack_mask, unpack_mask and binary_value, which dispatch.h includes in each kernels_*.cpp; compilers
// vectorise all but Isa::byte_bits and Isa::bit_bytes.
#pragma once

#include "cpu/kernels.h"

namespace gact {
namespace {

template <class Isa, class Word>
void pack_mask_words(const MaskJob& job, i64 begin, i64 end) {
  const Word* x = static_cast<const Word*>(job.elements);
  const Word pattern = static_cast<Word>(job.pattern);
  i64 i = begin;
  for (; i + 64 <= end; i += 64) {
    alignas(64) u8 bytes[64];
    for (int j = 0; j < 64; ++j) bytes[j] = (x[i + j] & pattern) != 0 ? 1 : 0;
    const u64 mask = Isa::byte_bits(bytes);
    for (int byte = 0; byte < 8; ++byte) job.packed[i / 8 + byte] = static_cast<u8>(mask >> (8 * byte));
  }
  for (; i < end; i += 8) {
    u8 byte = 0;
    for (int bit = 0; bit < 8 && i + bit < end; ++bit) byte |= static_cast<u8>((x[i + bit] & pattern) != 0) << bit;
    job.packed[i / 8] = byte;
  }
}

template <class Isa, class Word>
void unpack_mask_words(const MaskJob& job, i64 begin, i64 end) {
  Word* out = static_cast<Word*>(job.elements);
  const Word one = static_cast<Word>(job.pattern);
  i64 i = begin;
  for (; i + 64 <= end; i += 64) {
    u64 mask = 0;
    for (int byte = 0; byte < 8; ++byte) mask |= static_cast<u64>(job.packed[i / 8 + byte]) << (8 * byte);
    alignas(64) u8 bytes[64];
    Isa::bit_bytes(mask, bytes);
    for (int j = 0; j < 64; ++j) out[i + j] = static_cast<Word>(-static_cast<Word>(bytes[j])) & one;
  }
  for (; i < end; ++i) out[i] = (job.packed[i / 8] >> (i % 8)) & 1 ? one : Word{0};
}

// Whether every word is zero or job.pattern.
template <class Word>
bool has_two_values(const MaskJob& job, i64 begin, i64 end) {
  constexpr i64 kChecked = 1024;
  const Word* x = static_cast<const Word*>(job.elements);
  const Word pattern = static_cast<Word>(job.pattern);
  for (i64 i = begin; i < end; i += kChecked) {
    const i64 last = i + kChecked < end ? i + kChecked : end;
    Word other = 0;
    for (i64 j = i; j < last; ++j) other |= static_cast<Word>(x[j] != 0) & static_cast<Word>(x[j] != pattern);
    if (other != 0) return false;
  }
  return true;
}

template <class Isa>
bool has_two_values_units(const MaskJob& job, i64 first, i64 last) {
  const i64 begin = first * kUnitElements;
  const i64 end = last * kUnitElements < job.numel ? last * kUnitElements : job.numel;
  if (job.width_bytes == 2) return has_two_values<u16>(job, begin, end);
  if (job.width_bytes == 4) return has_two_values<u32>(job, begin, end);
  return has_two_values<u64>(job, begin, end);
}

template <class Isa>
void pack_mask_units(const MaskJob& job, i64 first, i64 last) {
  const i64 begin = first * kUnitElements;
  const i64 end = last * kUnitElements < job.numel ? last * kUnitElements : job.numel;
  if (job.width_bytes == 1) pack_mask_words<Isa, u8>(job, begin, end);
  if (job.width_bytes == 2) pack_mask_words<Isa, u16>(job, begin, end);
  if (job.width_bytes == 4) pack_mask_words<Isa, u32>(job, begin, end);
  if (job.width_bytes == 8) pack_mask_words<Isa, u64>(job, begin, end);
}

template <class Isa>
void unpack_mask_units(const MaskJob& job, i64 first, i64 last) {
  const i64 begin = first * kUnitElements;
  const i64 end = last * kUnitElements < job.numel ? last * kUnitElements : job.numel;
  if (job.width_bytes == 1) unpack_mask_words<Isa, u8>(job, begin, end);
  if (job.width_bytes == 2) unpack_mask_words<Isa, u16>(job, begin, end);
  if (job.width_bytes == 4) unpack_mask_words<Isa, u32>(job, begin, end);
  if (job.width_bytes == 8) unpack_mask_words<Isa, u64>(job, begin, end);
}

}  // namespace
}  // namespace gact
