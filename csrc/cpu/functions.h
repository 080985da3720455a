// Functions of what is decoded, a little at a time, so that what is decoded never leaves the cache: the activation
// functions that a backward computes again, and their derivatives. Compilers vectorise the loops.
//
// An activation function like GELU is x s(x), where s rises from 0 to 1 and s(x) - 1/2 is odd; its derivative is such a
// step as well. Within a bound, beyond which a float32 shows no difference from 0 and 1, that odd function is x times a
// polynomial of x * x, here of 2 (x / bound)^2 - 1. The coefficients are those of tools/fit_functions.py; the error is
// at most 5e-7, where rounding to 8 bits moves x by up to 1/255 of its group's range.
#pragma once

#include "cpu/kernels.h"

namespace gact {
namespace {

template <int COUNT>
struct Step {
  float bound;
  float coefficients[COUNT];
};

constexpr Step<14> kGelu = {
    5.25f,
    {1.346593648e-01f, -6.712665409e-02f, 4.964389652e-02f, -3.976863250e-02f, 3.206426278e-02f, -2.499493212e-02f,
     1.832599565e-02f, -1.295438316e-02f, 9.070377797e-03f, -5.119988229e-03f, 1.869442058e-03f, -1.326342346e-03f,
     1.456613420e-03f, -5.609559594e-04f}};
constexpr Step<17> kGeluSlope = {
    5.75f,
    {1.230718121e-01f, -6.228100508e-02f, 4.936930910e-02f, -4.731489345e-02f, 5.165777728e-02f, -5.921565369e-02f,
     6.718344986e-02f, -7.264220715e-02f, 6.754630059e-02f, -5.206915736e-02f, 4.741415009e-02f, -4.948905110e-02f,
     2.628080174e-02f, 2.958736732e-04f, 4.631674848e-03f, -1.274756622e-02f, 5.264952779e-03f}};
// With the approximation by tanh.
constexpr Step<14> kGeluTanh = {
    5.0f,
    {1.413784921e-01f, -7.036570460e-02f, 5.165863782e-02f, -4.054608941e-02f, 3.132811561e-02f, -2.296954766e-02f,
     1.612852886e-02f, -1.066433452e-02f, 5.601580720e-03f, -2.661092440e-03f, 2.782652620e-03f, -2.368151909e-03f,
     5.935734371e-04f, 1.033521621e-04f}};
constexpr Step<18> kGeluTanhSlope = {
    5.25f,
    {1.349840164e-01f, -6.963537633e-02f, 5.908592418e-02f, -6.272483617e-02f, 7.237965614e-02f, -8.044280857e-02f,
     8.267474920e-02f, -7.199657708e-02f, 4.188791662e-02f, -2.912345342e-02f, 6.023972481e-02f, -4.376307875e-02f,
     -3.918441385e-02f, 3.137157485e-02f, 4.651093483e-02f, -3.555956110e-02f, -1.201634016e-02f, 1.055013668e-02f}};

template <int COUNT>
inline __attribute__((always_inline)) float step_at(const Step<COUNT>& step, float x) {
  const float below = x > step.bound ? step.bound : x, inside = below < -step.bound ? -step.bound : below;
  const float s = fused(inside * inside, 2.0f / (step.bound * step.bound), -1.0f);
  float sum = step.coefficients[COUNT - 1];
#pragma GCC unroll 20
  for (int i = COUNT - 2; i >= 0; --i) sum = fused(sum, s, step.coefficients[i]);
  const float value = fused(inside, sum, 0.5f);
  return x > step.bound ? 1.0f : x < -step.bound ? 0.0f : value;
}

// The function x s(x), or where the step is its derivative the product with a gradient. T: float or Bfloat.
template <class T, int COUNT>
void apply_step(const FunctionJob& job, const Step<COUNT> step) {
  const T* __restrict x = static_cast<const T*>(job.x);
  const T* __restrict factor = static_cast<const T*>(job.grad == nullptr ? job.x : job.grad);
  T* __restrict out = static_cast<T*>(job.out);
  for (i64 i = 0; i < job.count; ++i) from_float(to_float(factor[i]) * step_at(step, to_float(x[i])), out + i);
}

template <class T>
void apply_to(const FunctionJob& job) {
  if (job.function == Function::kGelu && job.grad == nullptr) return apply_step<T>(job, kGelu);
  if (job.function == Function::kGelu) return apply_step<T>(job, kGeluSlope);
  if (job.grad == nullptr) return apply_step<T>(job, kGeluTanh);
  apply_step<T>(job, kGeluTanhSlope);
}

template <class Isa>
void apply_any(const FunctionJob& job) {
  if (job.element == Element::kFloat) return apply_to<float>(job);
  apply_to<Bfloat>(job);
}

// The product of a gradient with a mask, or the gradient where that is not zero. Word: as long as an element.
template <class Isa, class T, class Word>
void mask_product_elements(const MaskProductJob& job, i64 begin, i64 end) {
  const T* __restrict grad = static_cast<const T*>(job.grad);
  T* __restrict out = static_cast<T*>(job.out);
  for (i64 i = begin; i < end; i += 64) {
    const int count = end - i < 64 ? static_cast<int>(end - i) : 64;
    u64 mask = 0;
    for (int byte = 0; 8 * byte < count; ++byte) mask |= static_cast<u64>(job.packed[i / 8 + byte]) << (8 * byte);
    alignas(64) u8 bytes[64];
    Isa::bit_bytes(mask, bytes);
    if (job.selects) {
      const Word* __restrict from = static_cast<const Word*>(job.grad) + i;
      Word* __restrict to = static_cast<Word*>(job.out) + i;
      for (int j = 0; j < count; ++j) to[j] = from[j] & static_cast<Word>(-static_cast<Word>(bytes[j]));
      continue;
    }
    alignas(64) float factors[64];
    for (int j = 0; j < 64; ++j) factors[j] = float_of(bits_of(job.value) & -static_cast<u32>(bytes[j]));
    for (int j = 0; j < count; ++j) from_float(to_float(grad[i + j]) * factors[j], out + i + j);
  }
}

template <class Isa>
void mask_product_units(const MaskProductJob& job, i64 first, i64 last) {
  const i64 begin = first * kUnitElements;
  const i64 end = last * kUnitElements < job.numel ? last * kUnitElements : job.numel;
  if (job.element == Element::kFloat) return mask_product_elements<Isa, float, u32>(job, begin, end);
  mask_product_elements<Isa, Bfloat, u16>(job, begin, end);
}

template <class T, bool HAS_WEIGHT, bool HAS_BIAS>
void normalise_rows(const NormaliseJob& job, i64 first, i64 last) {
  const T *weight = static_cast<const T*>(job.weight), *bias = static_cast<const T*>(job.bias);
  for (i64 row = first; row < last; ++row) {
    const T* x = static_cast<const T*>(job.x) + row * job.columns;
    T* out = static_cast<T*>(job.out) + row * job.columns;
    const float centre = job.mean == nullptr ? 0.0f : job.mean[row], scale = job.rstd[row];
#pragma GCC ivdep
    for (i64 i = 0; i < job.columns; ++i) {
      float value = (to_float(x[i]) - centre) * scale;
      if constexpr (HAS_WEIGHT) value *= to_float(weight[i]);
      if constexpr (HAS_BIAS) value += to_float(bias[i]);
      from_float(value, out + i);
    }
  }
}

template <class T>
void normalise_as(const NormaliseJob& job, i64 first, i64 last) {
  if (job.weight != nullptr && job.bias != nullptr) return normalise_rows<T, true, true>(job, first, last);
  if (job.weight != nullptr) return normalise_rows<T, true, false>(job, first, last);
  if (job.bias != nullptr) return normalise_rows<T, false, true>(job, first, last);
  normalise_rows<T, false, false>(job, first, last);
}

template <class Isa>
void normalise_any(const NormaliseJob& job, i64 first, i64 last) {
  if (job.element == Element::kFloat) return normalise_as<float>(job, first, last);
  normalise_as<Bfloat>(job, first, last);
}

}  // namespace
}  // namespace gact
