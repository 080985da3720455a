// CUDA kernel normalise: the result of a norm over rows made again from its statistics, in one pass over memory.
// Compile with -DGACT_ELEMENT=float, Half or Bfloat, with -fmad=false. A thread takes 16 bytes of elements.
#include "cuda/blocks.h"

namespace gact {

using Stored = GACT_ELEMENT;

struct alignas(16) Elements {
  static constexpr u32 kCount = 16 / sizeof(Stored);
  Stored values[kCount];
};

}  // namespace gact

// out = (x - mean) * rstd * weight + bias in float32, rounded once. x, out: [rows, columns], aligned to 16 bytes; they
// may be the same. vectors: 16 bytes each, fewer than 2^32; row_vectors: of a row. mean: of each row, null for 0.
// weight, bias: [columns], aligned to 16 bytes, null for 1 and 0.
GACT_KERNEL(gact::kBlockThreads)
normalise(const gact::Elements* x, gact::u64 vectors, gact::u64 row_vectors, const float* mean, const float* rstd,
          const gact::Elements* weight, const gact::Elements* bias, gact::Elements* out) {
  using namespace gact;
  const u32 index = block_of_grid() * static_cast<u32>(kBlockThreads) + thread_of_block();
  if (index >= vectors) return;
  const u32 row = index / static_cast<u32>(row_vectors), place = index - row * static_cast<u32>(row_vectors);
  Elements elements = x[index];
  const float centre = mean == nullptr ? 0.0f : mean[row], scale = rstd[row];
  const Elements none{};
  const Elements factors = weight == nullptr ? none : weight[place], terms = bias == nullptr ? none : bias[place];
#pragma unroll
  for (u32 i = 0; i < Elements::kCount; ++i) {
    float value = (to_float(elements.values[i]) - centre) * scale;
    if (weight != nullptr) value *= to_float(factors.values[i]);
    if (bias != nullptr) value += to_float(terms.values[i]);
    from_float(value, &elements.values[i]);
  }
  out[index] = elements;
}
