// Packing and unpacking of tensors of one form by one call of a kernel: on a CPU a function of csrc/cpu, on a GPU a
// launch by the driver. What Python has to find out once for a form is in the object; what differs are two addresses
// and the seed. Whatever is not as it is expected goes the long way, through gact_dist/codec.
#pragma once

#include "cpu/plain.h"
#include "hooks/objects.h"

namespace gact {
namespace {

// As cuLaunchKernel in cuda.h.
using Launch = int (*)(void* function, unsigned int blocks, unsigned int, unsigned int, unsigned int threads,
                       unsigned int, unsigned int, unsigned int shared_bytes, void* stream, void** parameters,
                       void** extra);

// Of Packer in codec/packed.py, which says what the members are.
struct Packer {
  static constexpr int kObjects = 15;
  static constexpr bool kHasWeakReferences = false;
  PyObject_HEAD PyObject *packed_type, *fields, *tensor_type, *empty, *empty_strided, *of_memory, *of_buffer,
      *of_tensor, *options, *buffer_options, *modes, *transform, *current_device, *current_stream, *driver;
  PlainForm form;
  long long device, pitch, scale_start, offset_start, buffer_bytes, alignment, blocks, threads;
  // addresses, 0 for none
  long long pack_function, unpack_function, launch;
};
static_assert(offsetof(Packer, form) == sizeof(PyObject) + Packer::kObjects * sizeof(PyObject*));

#define FORM_NUMBER(field) {#field, T_LONGLONG, offsetof(Packer, form) + offsetof(PlainForm, field), 0, nullptr}

PyMemberDef packer_members[] = {OBJECT(Packer, packed_type),    OBJECT(Packer, fields),
                                OBJECT(Packer, tensor_type),    OBJECT(Packer, empty),
                                OBJECT(Packer, empty_strided),  OBJECT(Packer, of_memory),
                                OBJECT(Packer, of_buffer),      OBJECT(Packer, of_tensor),
                                OBJECT(Packer, options),        OBJECT(Packer, buffer_options),
                                OBJECT(Packer, modes),          OBJECT(Packer, transform),
                                OBJECT(Packer, current_device), OBJECT(Packer, current_stream),
                                OBJECT(Packer, driver),         FORM_NUMBER(numel),
                                FORM_NUMBER(element),           FORM_NUMBER(bits),
                                FORM_NUMBER(group_size),        FORM_NUMBER(columns),
                                NUMBER(Packer, device),         NUMBER(Packer, pitch),
                                NUMBER(Packer, scale_start),    NUMBER(Packer, offset_start),
                                NUMBER(Packer, buffer_bytes),   NUMBER(Packer, alignment),
                                NUMBER(Packer, blocks),         NUMBER(Packer, threads),
                                NUMBER(Packer, pack_function),  NUMBER(Packer, unpack_function),
                                NUMBER(Packer, launch),         END};

// Whether a kernel may be called here and now: no mode or transform is to see an operator, and the device is the
// current one.
Answer may_call(const Packer* packer, Ref* stream) {
  long long number;
  if (!to_integer(Ref(PyObject_CallFunctionObjArgs(packer->modes, nullptr)), &number)) return Answer::kError;
  if (number != 0) return Answer::kNo;
  const Ref transform(PyObject_CallFunctionObjArgs(packer->transform, nullptr));
  if (!transform) return Answer::kError;
  if (!transform.is_none()) return Answer::kNo;
  if (packer->launch == 0) return Answer::kYes;
  if (!to_integer(Ref(PyObject_CallFunctionObjArgs(packer->current_device, nullptr)), &number)) return Answer::kError;
  if (number != packer->device) return Answer::kNo;
  const Ref index(PyLong_FromLongLong(number));
  if (!index) return Answer::kError;
  static thread_local bool has_context = false;
  if (!has_context && !Ref(PyObject_CallMethodObjArgs(packer->driver, names.enter_context, index.get(), nullptr)))
    return Answer::kError;
  has_context = true;
  *stream = call(packer->current_stream, index.get());
  return *stream ? Answer::kYes : Answer::kError;
}

// Starts a kernel, without waiting for it. False with an error set where the driver refuses.
bool launch(const Packer* packer, long long function, const Ref& stream, void** parameters) {
  const unsigned long long number = PyLong_AsUnsignedLongLong(stream.get());
  if (PyErr_Occurred() != nullptr) return false;
  const int status = reinterpret_cast<Launch>(packer->launch)(
      reinterpret_cast<void*>(function), static_cast<unsigned int>(packer->blocks), 1, 1,
      static_cast<unsigned int>(packer->threads), 1, 1, 0, reinterpret_cast<void*>(number), parameters, nullptr);
  if (status == 0) return true;
  Ref(PyObject_CallMethod(packer->driver, "refuse", "si", "cuLaunchKernel", status));
  return false;
}

// Calls a function of csrc/cpu, which other threads of Python need not wait for.
void call_plain(const Packer* packer, long long function, long long from, long long to, long long seed) {
  const PlainForm form = packer->form;
  PyThreadState* thread = PyEval_SaveThread();
  reinterpret_cast<PlainCall>(function)(&form, reinterpret_cast<const void*>(from), reinterpret_cast<void*>(to), seed);
  PyEval_RestoreThread(thread);
}

bool run_pack(const Packer* packer, const Ref& stream, long long elements, long long bytes, long long seed) {
  if (packer->launch == 0) {
    call_plain(packer, packer->pack_function, elements, bytes, seed);
    return true;
  }
  long long rows = packer->form.numel / packer->form.columns, columns = packer->form.columns, pitch = packer->pitch,
            scale_start = packer->scale_start, offset_start = packer->offset_start;
  void* parameters[] = {&elements, &rows, &columns, &pitch, &seed, &bytes, &scale_start, &offset_start};
  return launch(packer, packer->pack_function, stream, parameters);
}

bool run_unpack(const Packer* packer, const Ref& stream, long long bytes, long long elements, long long seed) {
  if (packer->launch == 0) {
    call_plain(packer, packer->unpack_function, bytes, elements, seed);
    return true;
  }
  long long rows = packer->form.numel / packer->form.columns, columns = packer->form.columns,
            scale_start = packer->scale_start, offset_start = packer->offset_start;
  void* parameters[] = {&bytes, &rows, &columns, &seed, &elements, &scale_start, &offset_start};
  return launch(packer, packer->unpack_function, stream, parameters);
}

// A Packed with a payload; all else but the seed is the packer's.
Ref new_packed(Packer* packer, const Ref& payload, long long seed) {
  Ref packed(PyType_GenericAlloc(reinterpret_cast<PyTypeObject*>(packer->packed_type), 0));
  const Ref number(PyLong_FromLongLong(seed));
  if (!packed || !number) return Ref();
  const Py_ssize_t count = PyTuple_Size(packer->fields);
  for (Py_ssize_t i = 0; i + 1 < count; i += 2) {
    PyObject *name = PyTuple_GetItem(packer->fields, i), *value = PyTuple_GetItem(packer->fields, i + 1);
    if (PyObject_SetAttr(packed.get(), name, value) < 0) return Ref();
  }
  if (PyObject_SetAttr(packed.get(), names.payload, payload.get()) < 0) return Ref();
  if (PyObject_SetAttr(packed.get(), names.seed, number.get()) < 0) return Ref();
  if (PyObject_SetAttr(packed.get(), names.packer, reinterpret_cast<PyObject*>(packer)) < 0) return Ref();
  return packed;
}

// The elements of a tensor in the order of its memory, without the gaps between them.
Ref without_gaps(const Packer* packer, PyObject* tensor) {
  const Ref own = call_method(tensor, names.detach);
  if (!own) return Ref();
  PyObject *sizes = PyTuple_GetItem(packer->of_memory, 0), *strides = PyTuple_GetItem(packer->of_memory, 1);
  const Ref rows(PyObject_CallMethodObjArgs(own.get(), names.as_strided, sizes, strides, nullptr));
  return rows ? call_method(rows.get(), names.contiguous) : Ref();
}

// A tensor of the packer's form as a Packed; None for the long way.
Ref pack_by(Packer* packer, PyObject* tensor, long long seed) {
  if (packer->pack_function == 0) return Ref::shared(Py_None);
  Ref stream;
  const Answer may = may_call(packer, &stream);
  if (may != Answer::kYes) return may == Answer::kError ? Ref() : Ref::shared(Py_None);
  const Ref memory = is_set(packer->of_memory) ? without_gaps(packer, tensor) : Ref::shared(tensor);
  long long elements, bytes;
  if (!memory || !to_integer(call_method(memory.get(), names.data_ptr), &elements)) return Ref();
  if (elements % packer->alignment != 0) return Ref::shared(Py_None);
  const Ref buffer(PyObject_Call(packer->empty, packer->of_buffer, packer->buffer_options));
  if (!buffer || !to_integer(call_method(buffer.get(), names.data_ptr), &bytes)) return Ref();
  return run_pack(packer, stream, elements, bytes, seed) ? new_packed(packer, buffer, seed) : Ref();
}

// The tensor that a Packed stands for, without gaps between its elements; None for the long way. packer: its own.
Ref unpack_by(const Packer* packer, PyObject* packed) {
  if (packer->unpack_function == 0) return Ref::shared(Py_None);
  const Ref ready = get(packed, names.ready), payload = get(packed, names.payload);
  if (!ready || !payload) return Ref();
  if (!ready.is_none() || reinterpret_cast<PyObject*>(payload.type()) != packer->tensor_type)
    return Ref::shared(Py_None);
  long long bytes, count, elements, seed;
  if (!to_integer(call_method(payload.get(), names.numel), &count)) return Ref();
  if (!to_integer(call_method(payload.get(), names.data_ptr), &bytes)) return Ref();
  if (count != packer->buffer_bytes || (packer->launch != 0 && bytes % 4 != 0)) return Ref::shared(Py_None);
  Ref stream;
  const Answer may = may_call(packer, &stream);
  if (may != Answer::kYes) return may == Answer::kError ? Ref() : Ref::shared(Py_None);
  if (!to_integer(get(packed, names.seed), &seed)) return Ref();
  Ref made(PyObject_Call(packer->empty_strided, packer->of_tensor, packer->options));
  if (!made || !to_integer(call_method(made.get(), names.data_ptr), &elements)) return Ref();
  return run_unpack(packer, stream, bytes, elements, seed) ? std::move(made) : Ref();
}

PyObject* packer_packed(PyObject* self, PyObject* arguments) {
  PyObject* tensor;
  long long seed;
  if (!PyArg_ParseTuple(arguments, "OL", &tensor, &seed)) return nullptr;
  return pack_by(reinterpret_cast<Packer*>(self), tensor, seed).release();
}

PyObject* packer_unpacked(PyObject* self, PyObject* packed) {
  return unpack_by(reinterpret_cast<Packer*>(self), packed).release();
}

PyMethodDef packer_methods[] = {
    {"packed", packer_packed, METH_VARARGS, "(tensor of the form, seed) -> a Packed, None for the long way."},
    {"unpacked", packer_unpacked, METH_O, "A Packed that it made -> the tensor without gaps, None for the long way."},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace
}  // namespace gact
