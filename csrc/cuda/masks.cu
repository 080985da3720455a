// CUDA kernels pack_mask and unpack_mask, named by the bytes of an element. A thread takes 16 bytes of elements.
#include "cuda/blocks.h"

namespace gact {

template <class Word>
struct alignas(16) MaskVector {
  static constexpr int kElements = 16 / sizeof(Word);
  Word elements[kElements];
};

// Whether vectors can be read and written whole; otherwise elements are, one at a time.
template <class Word>
GACT_FN bool is_aligned(const Word* x) {
  return reinterpret_cast<u64>(x) % 16 == 0;
}

template <class Word>
GACT_FN i64 first_element_of_thread() {
  return (static_cast<i64>(block_of_grid()) * kBlockThreads + thread_of_block()) * MaskVector<Word>::kElements;
}

// Bits are set where an element has one of the bits of `pattern`. All lanes of a warp have to call this.
template <class Word>
GACT_FN void pack_mask(const Word* x, i64 numel, u64 pattern, u8* packed) {
  constexpr int kElements = MaskVector<Word>::kElements;
  const i64 first = first_element_of_thread<Word>();
  MaskVector<Word> vector{};
  if (first + kElements <= numel && is_aligned(x)) {
    vector = *reinterpret_cast<const MaskVector<Word>*>(x + first);
  } else {
    for (int i = 0; i < kElements && first + i < numel; ++i) vector.elements[i] = x[first + i];
  }
  u32 bits = 0;
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    bits |= ((vector.elements[i] & static_cast<Word>(pattern)) != 0 ? 1u : 0u) << i;
  }
  // Threads with fewer than 8 elements join theirs in the first of those that share a byte.
#pragma unroll
  for (int joined = kElements; joined < 8; joined *= 2) {
    bits |= shuffle_xor(bits, static_cast<u32>(joined / kElements)) << joined;
  }
  if (first % 8 != 0 || first >= numel) return;
  packed[first / 8] = static_cast<u8>(bits);
  if (kElements == 16 && first + 8 < numel) packed[first / 8 + 1] = static_cast<u8>(bits >> 8);
}

// Elements are `one` where their bit is set, otherwise 0.
template <class Word>
GACT_FN void unpack_mask(const u8* packed, i64 numel, u64 one, Word* out) {
  constexpr int kElements = MaskVector<Word>::kElements;
  const i64 first = first_element_of_thread<Word>();
  if (first >= numel) return;
  u32 bits = packed[first / 8] >> (first % 8);
  if (kElements == 16 && first + 8 < numel) bits |= static_cast<u32>(packed[first / 8 + 1]) << 8;
  MaskVector<Word> vector;
#pragma unroll
  for (int i = 0; i < kElements; ++i) vector.elements[i] = (bits >> i & 1u) != 0 ? static_cast<Word>(one) : Word{0};
  if (first + kElements <= numel && is_aligned(out)) {
    *reinterpret_cast<MaskVector<Word>*>(out + first) = vector;
    return;
  }
  for (int i = 0; i < kElements && first + i < numel; ++i) out[first + i] = vector.elements[i];
}

}  // namespace gact

#define GACT_MASK_KERNELS(BYTES, WORD)                                                     \
  GACT_KERNEL(gact::kBlockThreads)                                                         \
  pack_mask_##BYTES(const WORD* x, gact::i64 numel, gact::u64 pattern, gact::u8* packed) { \
    gact::pack_mask(x, numel, pattern, packed);                                            \
  }                                                                                        \
  GACT_KERNEL(gact::kBlockThreads)                                                         \
  unpack_mask_##BYTES(const gact::u8* packed, gact::i64 numel, gact::u64 one, WORD* out) { \
    gact::unpack_mask(packed, numel, one, out);                                            \
  }

GACT_MASK_KERNELS(1, gact::u8)
GACT_MASK_KERNELS(2, gact::u16)
GACT_MASK_KERNELS(4, gact::u32)
GACT_MASK_KERNELS(8, gact::u64)
