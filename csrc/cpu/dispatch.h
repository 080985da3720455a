// The table of functions of one instruction set: from run-time bits and element type to the templates of columns.h,
// memory_order.h, masks.h, sampled.h and variance.h.
#pragma once

#include <type_traits>

#include "cpu/functions.h"
#include "cpu/masks.h"
#include "cpu/memory_order.h"
#include "cpu/sampled.h"
#include "cpu/variance.h"

namespace gact {
namespace {

// Calls run with the width as a compile-time constant.
template <class Run>
void with_bits(int bits, Run&& run) {
  switch (bits) {
    case 1:
      return run(std::integral_constant<int, 1>{});
    case 2:
      return run(std::integral_constant<int, 2>{});
    case 3:
      return run(std::integral_constant<int, 3>{});
    case 4:
      return run(std::integral_constant<int, 4>{});
    case 5:
      return run(std::integral_constant<int, 5>{});
    case 6:
      return run(std::integral_constant<int, 6>{});
    case 7:
      return run(std::integral_constant<int, 7>{});
    default:
      return run(std::integral_constant<int, 8>{});
  }
}

// Calls run with a value of the element type.
template <class Run>
void with_element(Element element, Run&& run) {
  if (element == Element::kFloat) return run(float{});
  if (element == Element::kHalf) return run(Half{});
  return run(Bfloat{});
}

template <class Isa>
void pack_any(const PackJob& job, i64 first, i64 last) {
  with_element(job.element, [&](auto element) {
    with_bits(job.bits,
              [&](auto bits) { pack_units<Isa, decltype(element), decltype(bits)::value>(job, first, last); });
  });
}

template <class Isa>
void unpack_any(const UnpackJob& job, i64 first, i64 last) {
  with_element(job.element, [&](auto element) {
    with_bits(job.bits,
              [&](auto bits) { unpack_units<Isa, decltype(element), decltype(bits)::value>(job, first, last); });
  });
}

template <class Isa>
void pack_columns_any(const PackJob& job, i64 first, i64 last) {
  with_element(job.element, [&](auto element) {
    with_bits(job.bits,
              [&](auto bits) { pack_panels<Isa, decltype(element), decltype(bits)::value>(job, first, last); });
  });
}

template <class Isa>
void unpack_columns_any(const UnpackJob& job, i64 first, i64 last) {
  with_element(job.element, [&](auto element) {
    with_bits(job.bits,
              [&](auto bits) { unpack_panels<Isa, decltype(element), decltype(bits)::value>(job, first, last); });
  });
}

template <class Isa>
constexpr Kernels make_kernels() {
  return Kernels{pack_any<Isa>,           unpack_any<Isa>,          pack_columns_any<Isa>,     unpack_columns_any<Isa>,
                 pack_mask_units<Isa>,    unpack_mask_units<Isa>,   has_two_values_units<Isa>, apply_any<Isa>,
                 mask_product_units<Isa>, normalise_any<Isa>,       sample_any<Isa>,           sampled_words_any<Isa>,
                 variance_any<Isa>,       variance_columns_any<Isa>};
}

}  // namespace
}  // namespace gact
