// CPU kernels of the gact_dist operators, registered through torch's stable ABI. Schemas are defined in ops.py.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "common/sampled.h"
#include "cpu/kernels.h"
#include "cpu/plain.h"

namespace gact {
namespace {

// Looked for by gact_dist/_sources.py.
[[gnu::used]] const char kSources[] = GACT_DIST_SOURCES;

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Elements that justify another thread; output bytes above which stores bypass the cache.
constexpr int64_t kGrainElements = 32768;
constexpr int64_t kStreamBytes = int64_t{16} << 20;
// As PART_ELEMENTS in gact_dist/codec/format.py.
constexpr int64_t kPartElements = 8192;

const Kernels* best_kernels() {
  if (const Kernels* kernels = avx512_kernels()) return kernels;
  if (const Kernels* kernels = avx2_kernels()) return kernels;
  return scalar_kernels();
}

const Kernels*& active_kernels() {
  static const Kernels* active = best_kernels();
  return active;
}

int64_t units_of(int64_t numel) { return (numel + kUnitElements - 1) / kUnitElements; }

Element element_of(ScalarType dtype) {
  STD_TORCH_CHECK(dtype == ScalarType::Float || dtype == ScalarType::Half || dtype == ScalarType::BFloat16,
                  "gact_dist packs float32, float16 and bfloat16; codec.pack handles the other dtypes");
  if (dtype == ScalarType::Float) return Element::kFloat;
  return dtype == ScalarType::Half ? Element::kHalf : Element::kBfloat;
}

void check_flat(const Tensor& tensor, const char* name) {
  STD_TORCH_CHECK(tensor.dim() == 1 && tensor.is_contiguous(), "gact_dist: ", name,
                  " must be one-dimensional and contiguous; codec.pack takes any shape and strides");
}

void check_format(int64_t bits, int64_t group_size) {
  STD_TORCH_CHECK(bits >= 1 && bits <= 8, "gact_dist: bits is ", bits, ", expected 1 to 8");
  STD_TORCH_CHECK(group_size == 64 || group_size == 128 || group_size == 256 || group_size == 512,
                  "gact_dist: group_size is ", group_size, ", expected 64, 128, 256 or 512");
}

void check_columns(int64_t numel, int64_t columns) {
  STD_TORCH_CHECK(columns >= 1 && numel % columns == 0 && (columns == 1 || columns % 32 == 0), "gact_dist: columns is ",
                  columns, ", expected a multiple of 32 that divides the ", numel,
                  " elements, or 1 for groups in memory order");
}

void check_buffer(const Tensor& buffer, int64_t expected_bytes) {
  check_flat(buffer, "buffer");
  STD_TORCH_CHECK(buffer.scalar_type() == ScalarType::Byte && buffer.numel() == expected_bytes,
                  "gact_dist: buffer has ", buffer.numel(), " elements, expected ", expected_bytes,
                  " of uint8; give bits, group_size, numel and dtype of the tensor that was packed");
}

// Byte positions of the sections of a packed buffer, as in sections() of gact_dist/codec/format.py.
struct Sections {
  int64_t scale_start, offset_start, total;
};

Sections sections(int64_t numel, int64_t bits, int64_t group_size, int64_t columns) {
  const int64_t groups = (numel / columns + group_size - 1) / group_size * columns;
  const int64_t width = columns > 1 ? columns : kRowElements, rows = (numel + width - 1) / width;
  int64_t word_rows_in_all = rows / kTileRows * bits;
  for (int field = 8; field > 0; field /= 2) {
    if (bits & field) word_rows_in_all += word_rows(static_cast<int>(rows % kTileRows), field);
  }
  const int64_t scale_start = word_rows_in_all * width * static_cast<int64_t>(sizeof(u32));
  return Sections{scale_start, scale_start + 2 * groups, scale_start + 4 * groups};
}

// Asks for huge pages for a large new tensor: page faults on small pages would cost more than the kernel that fills it.
void advise_huge_pages(const void* memory, int64_t nbytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kHugePage = uintptr_t{2} << 20;
  const uintptr_t start = reinterpret_cast<uintptr_t>(memory), end = start + static_cast<uintptr_t>(nbytes);
  const uintptr_t first = (start + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t last = end / kHugePage * kHugePage;
  // Only a hint: a system without huge pages ignores it.
  if (first < last && last - first >= kStreamBytes)
    madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

// On the CPU, where all kernels of this file run. torch::stable::new_empty would call an operator by its boxed name:
// that takes longer than the kernel of a small tensor.
Tensor new_flat(int64_t numel, ScalarType dtype) {
  constexpr int64_t kStride = 1;
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      1, &numel, &kStride, torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype)),
      aoti_torch_device_type_cpu(), 0, &handle));
  Tensor tensor(handle);
  advise_huge_pages(tensor.data_ptr(), numel * static_cast<int64_t>(tensor.element_size()));
  return tensor;
}

// Runs `in_order` on the units of elements start .. end - 1, or `by_column` on their panels.
template <class Function, class Job>
void run(Function in_order, Function by_column, const Job& job, int element_bytes, int64_t start, int64_t end) {
  const bool in_columns = job.columns > 1;
  const auto units_to = [&](int64_t numel) {
    return in_columns ? panel_count(numel, job.group_size, job.columns, element_bytes) : units_of(numel);
  };
  const int64_t panel = in_columns ? panel_width(job.columns, job.group_size, element_bytes) * job.group_size : 0;
  const int64_t grain = in_columns ? std::max<int64_t>(1, kGrainElements / panel) : kGrainElements / kUnitElements;
  const Function function = in_columns ? by_column : in_order;
  torch::stable::parallel_for(units_to(start), units_to(end), grain,
                              [&](int64_t first, int64_t last) { function(job, first, last); });
}

int bytes_of(Element element) { return element == Element::kFloat ? 4 : 2; }

void run_pack(const PlainForm& form, const void* elements, u8* bytes, int64_t seed, bool stream) {
  const Sections where = sections(form.numel, form.bits, form.group_size, form.columns);
  const PackJob job{elements,
                    static_cast<Element>(form.element),
                    form.numel,
                    static_cast<int>(form.bits),
                    static_cast<int>(form.group_size),
                    form.columns,
                    static_cast<u64>(seed),
                    reinterpret_cast<u32*>(bytes),
                    reinterpret_cast<u16*>(bytes + where.scale_start),
                    reinterpret_cast<u16*>(bytes + where.offset_start),
                    stream};
  const Kernels* kernels = active_kernels();
  run(kernels->pack, kernels->pack_columns, job, bytes_of(job.element), 0, form.numel);
}

// elements: where the first of all is written.
UnpackJob unpack_job(const PlainForm& form, const u8* bytes, u8* elements, int64_t seed, bool stream) {
  const Sections where = sections(form.numel, form.bits, form.group_size, form.columns);
  return UnpackJob{reinterpret_cast<const u32*>(bytes),
                   reinterpret_cast<const u16*>(bytes + where.scale_start),
                   reinterpret_cast<const u16*>(bytes + where.offset_start),
                   static_cast<Element>(form.element),
                   form.numel,
                   static_cast<int>(form.bits),
                   static_cast<int>(form.group_size),
                   form.columns,
                   static_cast<u64>(seed),
                   elements,
                   stream};
}

// Elements first .. last - 1, of which `elements` is the first.
void run_unpack(const PlainForm& form, const u8* bytes, u8* elements, int64_t seed, bool stream, int64_t first,
                int64_t last) {
  if (first == last) return;  // of nothing there may be no address either
  const int element_bytes = bytes_of(static_cast<Element>(form.element));
  const UnpackJob job = unpack_job(form, bytes, elements - first * element_bytes, seed, stream);
  const Kernels* kernels = active_kernels();
  run(kernels->unpack, kernels->unpack_columns, job, element_bytes, first, last);
}

PlainForm form_of(int64_t numel, ScalarType dtype, int64_t bits, int64_t group_size, int64_t columns) {
  return PlainForm{numel, static_cast<long long>(element_of(dtype)), bits, group_size, columns};
}

void pack_into(const Tensor& x, int64_t bits, int64_t group_size, int64_t seed, const Tensor& buffer, bool stream,
               int64_t columns) {
  check_format(bits, group_size);
  STD_TORCH_CHECK(x.is_contiguous(), "gact_dist: x has gaps or another order, expected a contiguous tensor");
  check_columns(x.numel(), columns);
  check_buffer(buffer, sections(x.numel(), bits, group_size, columns).total);
  run_pack(form_of(x.numel(), x.scalar_type(), bits, group_size, columns), x.const_data_ptr(),
           static_cast<u8*>(buffer.mutable_data_ptr()), seed, stream);
}

// As unpack_out.
void pack_out(const Tensor& x, int64_t bits, int64_t group_size, int64_t seed, Tensor buffer, int64_t columns) {
  pack_into(x, bits, group_size, seed, buffer, buffer.numel() >= kStreamBytes, columns);
}

Tensor pack(const Tensor& x, int64_t bits, int64_t group_size, int64_t seed, int64_t columns) {
  check_format(bits, group_size);
  check_columns(x.numel(), columns);
  Tensor buffer = new_flat(sections(x.numel(), bits, group_size, columns).total, ScalarType::Byte);
  pack_into(x, bits, group_size, seed, buffer, false, columns);
  return buffer;
}

// The form of what is packed in a buffer.
PlainForm form_in(const Tensor& buffer, int64_t bits, int64_t group_size, int64_t numel, ScalarType dtype,
                  int64_t columns) {
  check_format(bits, group_size);
  check_columns(numel, columns);
  check_buffer(buffer, sections(numel, bits, group_size, columns).total);
  return form_of(numel, dtype, bits, group_size, columns);
}

void unpack_into(const Tensor& buffer, int64_t bits, int64_t group_size, int64_t numel, ScalarType dtype, int64_t seed,
                 const Tensor& out, bool stream, int64_t columns) {
  const PlainForm form = form_in(buffer, bits, group_size, numel, dtype, columns);
  check_flat(out, "out");
  run_unpack(form, static_cast<const u8*>(buffer.const_data_ptr()), static_cast<u8*>(out.mutable_data_ptr()), seed,
             stream, 0, out.numel());
}

void check_out(const Tensor& out, int64_t numel, ScalarType dtype, const char* name = "out") {
  STD_TORCH_CHECK(out.numel() == numel && out.scalar_type() == dtype, "gact_dist: ", name, " has ", out.numel(),
                  " elements, expected ", numel, " of the packed dtype");
}

// Memory that is in use already: stores bypass the cache when the output is too large for it.
void unpack_out(const Tensor& buffer, int64_t bits, int64_t group_size, int64_t numel, ScalarType dtype, int64_t seed,
                Tensor out, int64_t columns) {
  check_out(out, numel, dtype);
  const bool stream = numel * static_cast<int64_t>(out.element_size()) >= kStreamBytes;
  unpack_into(buffer, bits, group_size, numel, dtype, seed, out, stream, columns);
}

// The form of what is packed, of which `out` is to be the elements from `first` on.
PlainForm form_of_part(const Tensor& buffer, int64_t bits, int64_t group_size, int64_t numel, ScalarType dtype,
                       const Tensor& out, int64_t columns, int64_t first) {
  const PlainForm form = form_in(buffer, bits, group_size, numel, dtype, columns);
  check_flat(out, "out");
  const int64_t unit = columns > 1 ? group_size * columns : kPartElements, last = first + out.numel();
  STD_TORCH_CHECK(first >= 0 && first % unit == 0 && last <= numel && (last % unit == 0 || last == numel),
                  "gact_dist: the part is elements ", first, " to ", last, " of ", numel, ", expected multiples of ",
                  unit, " or the end");
  check_out(out, last - first, dtype);
  return form;
}

// For what is read at once: never past the cache.
void unpack_part(const Tensor& buffer, int64_t bits, int64_t group_size, int64_t numel, ScalarType dtype, int64_t seed,
                 Tensor out, int64_t columns, int64_t first) {
  const PlainForm form = form_of_part(buffer, bits, group_size, numel, dtype, out, columns, first);
  run_unpack(form, static_cast<const u8*>(buffer.const_data_ptr()), static_cast<u8*>(out.mutable_data_ptr()), seed,
             false, first, first + out.numel());
}

void check_function(ScalarType dtype, int64_t function) {
  STD_TORCH_CHECK(dtype == ScalarType::Float || dtype == ScalarType::BFloat16,
                  "gact_dist: functions are for float32 and bfloat16; unpack the tensor and apply torch's");
  STD_TORCH_CHECK(function == 0 || function == 1, "gact_dist: function is ", function, ", expected 0 or 1");
}

// Calls function(x, first, count) of elements first .. first + count - 1 of a part, a few at a time, after they were
// decoded to x. The part begins and ends with blocks of kPartElements, or of group_size rows.
template <class Function>
void decode_through(const UnpackJob& packed, int64_t start, int64_t end, Function&& function) {
  const int element_bytes = bytes_of(packed.element);
  const bool in_columns = packed.columns > 1;
  const int64_t block = in_columns ? packed.group_size * packed.columns : kPartElements;
  const int64_t width = in_columns ? panel_width(packed.columns, packed.group_size, element_bytes) : block;
  const int64_t row = in_columns ? packed.columns : block, panels = (row + width - 1) / width;
  const Kernels* kernels = active_kernels();
  const int64_t grain = std::max<int64_t>(1, kGrainElements / block);
  torch::stable::parallel_for(start / block, (end + block - 1) / block, grain, [&](int64_t first, int64_t last) {
    const std::unique_ptr<u8[]> memory(new u8[std::min<int64_t>(block, packed.numel) * element_bytes]);
    for (int64_t unit = first * panels; unit < last * panels; ++unit) {
      const int64_t origin = unit / panels * block, stop = std::min(origin + block, end);
      UnpackJob job = packed;
      job.out = memory.get() - origin * element_bytes;
      if (in_columns) {
        kernels->unpack_columns(job, unit, unit + 1);
      } else {
        kernels->unpack(job, origin / kUnitElements, units_of(stop));
      }
      for (int64_t at = origin + unit % panels * width; at < stop; at += row) {
        const int64_t count = std::min(width, (at / row + 1) * row - at);
        function(memory.get() + (at - origin) * element_bytes, at, std::min(count, stop - at));
      }
    }
  });
}

// function: its number in FUNCTIONS of gact_dist/codec/format.py.
void unpack_through(const Tensor& buffer, int64_t bits, int64_t group_size, int64_t numel, ScalarType dtype,
                    int64_t seed, Tensor out, int64_t columns, int64_t first, int64_t function) {
  const PlainForm form = form_of_part(buffer, bits, group_size, numel, dtype, out, columns, first);
  check_function(dtype, function);
  u8* to = static_cast<u8*>(out.mutable_data_ptr());
  const UnpackJob packed = unpack_job(form, static_cast<const u8*>(buffer.const_data_ptr()), nullptr, seed, false);
  const int element_bytes = bytes_of(packed.element);
  decode_through(packed, first, first + out.numel(), [&](const u8* x, int64_t at, int64_t count) {
    active_kernels()->function(FunctionJob{static_cast<Function>(function), packed.element, x, nullptr,
                                           to + (at - first) * element_bytes, count});
  });
}

Tensor unpack_gradient(const Tensor& buffer, int64_t bits, int64_t group_size, int64_t numel, ScalarType dtype,
                       int64_t seed, const Tensor& grad, int64_t columns, int64_t function) {
  const PlainForm form = form_in(buffer, bits, group_size, numel, dtype, columns);
  check_flat(grad, "grad");
  check_out(grad, numel, dtype, "grad");
  check_function(dtype, function);
  Tensor out = new_flat(grad.numel(), dtype);
  const u8* of = static_cast<const u8*>(grad.const_data_ptr());
  u8* to = static_cast<u8*>(out.mutable_data_ptr());
  const UnpackJob packed = unpack_job(form, static_cast<const u8*>(buffer.const_data_ptr()), nullptr, seed, false);
  const int element_bytes = bytes_of(packed.element);
  decode_through(packed, 0, numel, [&](const u8* x, int64_t at, int64_t count) {
    active_kernels()->function(FunctionJob{static_cast<Function>(function), packed.element, x, of + at * element_bytes,
                                           to + at * element_bytes, count});
  });
  return out;
}

// A large new tensor: the operating system has just zeroed its pages, so they are in the cache.
Tensor unpack(const Tensor& buffer, int64_t bits, int64_t group_size, int64_t numel, ScalarType dtype, int64_t seed,
              int64_t columns) {
  Tensor out = new_flat(numel, dtype);
  unpack_into(buffer, bits, group_size, numel, dtype, seed, out, false, columns);
  return out;
}

// What a mask kernel needs to know of a dtype: the bits that make an element non-zero, the element 1, and infinity.
struct MaskType {
  int width_bytes;
  u64 nonzero;
  u64 one;
  u64 infinity;
};

MaskType mask_type(ScalarType dtype) {
  if (dtype == ScalarType::Bool || dtype == ScalarType::Byte) return {1, 0xFF, 1, 0};
  if (dtype == ScalarType::Half) return {2, 0x7FFF, 0x3C00, 0x7C00};
  if (dtype == ScalarType::BFloat16) return {2, 0x7FFF, 0x3F80, 0x7F80};
  if (dtype == ScalarType::Float) return {4, 0x7FFFFFFF, 0x3F800000, 0x7F800000};
  STD_TORCH_CHECK(dtype == ScalarType::Double,
                  "gact_dist: a mask must be bool, uint8 or a float type; convert it with .to(bool)");
  return {8, 0x7FFFFFFFFFFFFFFF, 0x3FF0000000000000, 0x7FF0000000000000};
}

MaskType binary_type(ScalarType dtype) {
  const MaskType type = mask_type(dtype);
  STD_TORCH_CHECK(type.width_bytes > 1, "gact_dist: a binary tensor must be of a float type; pack_mask is for bool");
  return type;
}

// The bits of an element, whatever its type; little endian.
u64 word_at(const void* elements, int64_t index, int width_bytes) {
  u64 word = 0;
  std::memcpy(&word, static_cast<const u8*>(elements) + index * width_bytes, width_bytes);
  return word;
}

Tensor pack_mask(const Tensor& x) {
  check_flat(x, "x");
  const MaskType type = mask_type(x.scalar_type());
  Tensor buffer = new_flat((x.numel() + 7) / 8, ScalarType::Byte);
  const MaskJob job{const_cast<void*>(x.const_data_ptr()), static_cast<u8*>(buffer.mutable_data_ptr()), x.numel(),
                    type.width_bytes, type.nonzero};
  const Kernels* kernels = active_kernels();
  torch::stable::parallel_for(0, units_of(x.numel()), kGrainElements / kUnitElements,
                              [&](int64_t first, int64_t last) { kernels->pack_mask(job, first, last); });
  return buffer;
}

// A new tensor of zeros, and of another element where a bit is set.
Tensor unpack_bits(const Tensor& buffer, int64_t numel, ScalarType dtype, int width_bytes, u64 element) {
  check_buffer(buffer, (numel + 7) / 8);
  Tensor out = new_flat(numel, dtype);
  const MaskJob job{out.mutable_data_ptr(), static_cast<u8*>(const_cast<void*>(buffer.const_data_ptr())), numel,
                    width_bytes, element};
  const Kernels* kernels = active_kernels();
  torch::stable::parallel_for(0, units_of(numel), kGrainElements / kUnitElements,
                              [&](int64_t first, int64_t last) { kernels->unpack_mask(job, first, last); });
  return out;
}

Tensor unpack_mask(const Tensor& buffer, int64_t numel, ScalarType dtype) {
  const MaskType type = mask_type(dtype);
  return unpack_bits(buffer, numel, dtype, type.width_bytes, type.one);
}

Tensor unpack_binary(const Tensor& buffer, int64_t numel, const Tensor& value) {
  STD_TORCH_CHECK(value.numel() == 1, "gact_dist: value has ", value.numel(), " elements, expected 1");
  const MaskType type = binary_type(value.scalar_type());
  return unpack_bits(buffer, numel, value.scalar_type(), type.width_bytes,
                     word_at(value.const_data_ptr(), 0, type.width_bytes));
}

Tensor mask_product(const Tensor& buffer, const Tensor& grad, const Tensor& value, bool selects) {
  check_flat(grad, "grad");
  check_buffer(buffer, (grad.numel() + 7) / 8);
  check_function(grad.scalar_type(), 0);
  STD_TORCH_CHECK(value.numel() == 1 && value.scalar_type() == grad.scalar_type(), "gact_dist: value has ",
                  value.numel(), " elements, expected 1 of grad's dtype");
  Tensor out = new_flat(grad.numel(), grad.scalar_type());
  const Element element = element_of(grad.scalar_type());
  const u64 word = word_at(value.const_data_ptr(), 0, bytes_of(element));
  const float as_float =
      element == Element::kFloat ? float_of(static_cast<u32>(word)) : to_float(Bfloat{static_cast<u16>(word)});
  const MaskProductJob job{static_cast<const u8*>(buffer.const_data_ptr()),
                           element,
                           grad.const_data_ptr(),
                           out.mutable_data_ptr(),
                           grad.numel(),
                           as_float,
                           selects};
  const Kernels* kernels = active_kernels();
  torch::stable::parallel_for(0, units_of(job.numel), kGrainElements / kUnitElements,
                              [&](int64_t first, int64_t last) { kernels->mask_product(job, first, last); });
  return out;
}

void check_groups(const Tensor& x, const Tensor& bits, const Tensor& logarithms, const char* name) {
  STD_TORCH_CHECK(x.dim() == 2 && x.is_contiguous() && x.numel() > 0, "gact_dist: ", name,
                  " must be contiguous rows of words; codec.pack_log_probabilities takes any shape");
  const int64_t groups = x.size(0) * ((x.size(1) + kSampledGroup - 1) / kSampledGroup);
  STD_TORCH_CHECK(bits.scalar_type() == ScalarType::Int && bits.is_contiguous() && bits.numel() == groups &&
                      logarithms.scalar_type() == ScalarType::Half && logarithms.is_contiguous() &&
                      logarithms.numel() == groups,
                  "gact_dist: bits and logarithms have ", bits.numel(), " and ", logarithms.numel(),
                  " elements, expected ", groups, " of int32 and float16");
}

Tensor sample(const Tensor& x, int64_t seed, int64_t first, Tensor bits, Tensor logarithms) {
  check_groups(x, bits, logarithms, "x");
  Tensor variance = new_flat(bits.numel(), ScalarType::Float);
  const SampleJob job{x.const_data_ptr(),
                      element_of(x.scalar_type()),
                      x.size(1),
                      first,
                      static_cast<u64>(seed),
                      static_cast<u32*>(bits.mutable_data_ptr()),
                      static_cast<u16*>(logarithms.mutable_data_ptr()),
                      static_cast<float*>(variance.mutable_data_ptr())};
  const Kernels* kernels = active_kernels();
  torch::stable::parallel_for(0, x.size(0), std::max<int64_t>(1, kGrainElements / job.words),
                              [&](int64_t first, int64_t last) { kernels->sample(job, first, last); });
  return variance;
}

void sampled_words(const Tensor& bits, const Tensor& logarithms, Tensor out) {
  check_groups(out, bits, logarithms, "out");
  advise_huge_pages(out.data_ptr(), out.numel() * static_cast<int64_t>(out.element_size()));
  const SampledWordsJob job{static_cast<const u32*>(bits.const_data_ptr()),
                            static_cast<const u16*>(logarithms.const_data_ptr()), element_of(out.scalar_type()),
                            out.size(1), out.mutable_data_ptr()};
  const Kernels* kernels = active_kernels();
  torch::stable::parallel_for(0, out.size(0), std::max<int64_t>(1, kGrainElements / job.words),
                              [&](int64_t first, int64_t last) { kernels->sampled_words(job, first, last); });
}

Tensor binary_value(const Tensor& x) {
  check_flat(x, "x");
  const MaskType type = binary_type(x.scalar_type());
  const void* elements = x.const_data_ptr();
  u64 value = 0;
  for (int64_t i = 0; i < x.numel() && value == 0; ++i) value = word_at(elements, i, type.width_bytes);
  const u64 magnitude = value & type.nonzero;
  std::atomic<bool> found{value == 0 || (0 < magnitude && magnitude < type.infinity)};
  if (found) {
    const MaskJob job{const_cast<void*>(elements), nullptr, x.numel(), type.width_bytes, value};
    const Kernels* kernels = active_kernels();
    torch::stable::parallel_for(0, units_of(x.numel()), kGrainElements / kUnitElements,
                                [&](int64_t first, int64_t last) {
                                  if (found && !kernels->has_two_values(job, first, last)) found = false;
                                });
  }
  if (!found) value = type.nonzero;  // a NaN
  Tensor out = torch::stable::new_empty(x, {}, x.scalar_type());
  std::memcpy(out.mutable_data_ptr(), &value, type.width_bytes);
  return out;
}

Tensor rounding_variance(const Tensor& x, const Tensor& weight, int64_t group_size, int64_t columns) {
  check_format(1, group_size);
  check_flat(x, "x");
  check_flat(weight, "weight");
  check_columns(x.numel(), columns);
  STD_TORCH_CHECK(weight.scalar_type() == ScalarType::Float && weight.numel() == x.numel(), "gact_dist: weight has ",
                  weight.numel(), " elements, expected ", x.numel(), " of float32");
  const VarianceJob job{
      x.const_data_ptr(), element_of(x.scalar_type()),  static_cast<const float*>(weight.const_data_ptr()),
      x.numel(),          static_cast<int>(group_size), columns};
  // One partial sum for each block, or slab of units: the order of additions does not depend on the number of threads.
  const Kernels* kernels = active_kernels();
  const auto add = columns > 1 ? kernels->variance_columns : kernels->variance;
  const int64_t units = columns > 1 ? (x.numel() / columns + group_size - 1) / group_size : units_of(x.numel());
  const int64_t slab_units = columns > 1 ? 1 : kGrainElements / kUnitElements;
  std::vector<std::array<double, 8>> partial((units + slab_units - 1) / slab_units);
  torch::stable::parallel_for(0, static_cast<int64_t>(partial.size()), 1, [&](int64_t first, int64_t last) {
    for (int64_t slab = first; slab < last; ++slab) {
      add(job, slab * slab_units, std::min((slab + 1) * slab_units, units), partial[slab].data());
    }
  });
  Tensor totals = new_flat(8, ScalarType::Double);
  double* sums = static_cast<double*>(totals.mutable_data_ptr());
  std::fill(sums, sums + 8, 0.0);
  for (const auto& slab : partial) {
    for (int i = 0; i < 8; ++i) sums[i] += slab[i];
  }
  return totals;
}

}  // namespace
}  // namespace gact

STABLE_TORCH_LIBRARY_IMPL(gact_dist, CPU, library) {
  library.impl("pack", TORCH_BOX(&gact::pack));
  library.impl("pack_out", TORCH_BOX(&gact::pack_out));
  library.impl("unpack", TORCH_BOX(&gact::unpack));
  library.impl("unpack_out", TORCH_BOX(&gact::unpack_out));
  library.impl("unpack_part", TORCH_BOX(&gact::unpack_part));
  library.impl("unpack_through", TORCH_BOX(&gact::unpack_through));
  library.impl("unpack_gradient", TORCH_BOX(&gact::unpack_gradient));
  library.impl("mask_product", TORCH_BOX(&gact::mask_product));
  library.impl("pack_mask", TORCH_BOX(&gact::pack_mask));
  library.impl("unpack_mask", TORCH_BOX(&gact::unpack_mask));
  library.impl("unpack_binary", TORCH_BOX(&gact::unpack_binary));
  library.impl("binary_value", TORCH_BOX(&gact::binary_value));
  library.impl("sample", TORCH_BOX(&gact::sample));
  library.impl("sampled_words", TORCH_BOX(&gact::sampled_words));
  library.impl("rounding_variance", TORCH_BOX(&gact::rounding_variance));
}

// Get and set the instruction set in use: 0 scalar, 1 AVX2, 2 AVX-512, the order of ops.ISAS.
#define GACT_EXPORT extern "C" __attribute__((visibility("default")))

GACT_EXPORT int gact_dist_isa() {
  const gact::Kernels* active = gact::active_kernels();
  if (active == gact::scalar_kernels()) return 0;
  return active == gact::avx2_kernels() ? 1 : 2;
}

GACT_EXPORT int gact_dist_set_isa(int isa) {
  const gact::Kernels* wanted = isa == 0   ? gact::scalar_kernels()
                                : isa == 1 ? gact::avx2_kernels()
                                           : gact::avx512_kernels();
  if (wanted == nullptr) return 1;
  gact::active_kernels() = wanted;
  return 0;
}

// What normalised() of gact_dist/codec/norms.py calls, with memory that it has checked: see NormaliseJob.
GACT_EXPORT void gact_dist_normalise(const void* x, int64_t rows, int64_t columns, int element, const float* mean,
                                     const float* rstd, const void* weight, const void* bias, void* out) {
  const gact::NormaliseJob job{x, static_cast<gact::Element>(element), columns, mean, rstd, weight, bias, out};
  const int64_t grain = std::max<int64_t>(1, gact::kGrainElements / columns);
  torch::stable::parallel_for(
      0, rows, grain, [&](int64_t first, int64_t last) { gact::active_kernels()->normalise(job, first, last); });
}

// See plain.h. What they write to is new.
GACT_EXPORT void gact_dist_pack(const gact::PlainForm* form, const void* from, void* to, long long seed) {
  gact::run_pack(*form, from, static_cast<gact::u8*>(to), seed, false);
}

GACT_EXPORT void gact_dist_unpack(const gact::PlainForm* form, const void* from, void* to, long long seed) {
  const int64_t elements = form->numel;
  gact::advise_huge_pages(to, elements * gact::bytes_of(static_cast<gact::Element>(form->element)));
  gact::run_unpack(*form, static_cast<const gact::u8*>(from), static_cast<gact::u8*>(to), seed, false, 0, elements);
}
