// Python's objects as the short ways see them: references, attributes by name, and classes for Python's to inherit
// from. Only Python's stable ABI is used: one build serves every version from 3.10 on.
#pragma once

#define Py_LIMITED_API 0x030A0000
#include <Python.h>
#include <structmember.h>

#include <cstddef>
#include <cstring>
#include <utility>

namespace gact {
namespace {

// An owned reference, perhaps to nothing. A function that returns nothing has set an error.
class Ref {
 public:
  Ref() = default;
  explicit Ref(PyObject* owned) : object_(owned) {}
  Ref(const Ref&) = delete;
  Ref& operator=(const Ref&) = delete;
  Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Ref& operator=(Ref&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Ref() { Py_XDECREF(object_); }

  static Ref shared(PyObject* borrowed) {
    Py_XINCREF(borrowed);
    return Ref(borrowed);
  }

  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }
  PyTypeObject* type() const { return Py_TYPE(object_); }
  bool is_none() const { return object_ == Py_None; }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_ = nullptr;
};

enum class Answer { kError = -1, kNo = 0, kYes = 1 };

Answer answer(bool condition) { return condition ? Answer::kYes : Answer::kNo; }

// The names of attributes and methods, made once.
struct Names {
  PyObject *base, *cdata, *call, *count, *detach, *exact_bytes, *f_back, *f_lasti, *f_locals, *grad_fn, *metadata,
      *nbytes, *next_functions, *numel, *output_nr, *self, *untyped_storage, *rows, *names, *latest_call, *version,
      *append, *data, *dtype, *shape, *storage_offset, *data_ptr, *enter_context, *name, *packer, *payload, *ready,
      *seed, *step_key, *weak_ref, *as_strided, *contiguous, *clone, *scheme, *work, *of_view;
};
Names names;

bool make_names() {
  const std::pair<PyObject**, const char*> all[] = {
      {&names.base, "_base"},
      {&names.cdata, "_cdata"},
      {&names.call, "_call"},
      {&names.count, "count"},
      {&names.detach, "detach"},
      {&names.exact_bytes, "exact_bytes"},
      {&names.f_back, "f_back"},
      {&names.f_lasti, "f_lasti"},
      {&names.f_locals, "f_locals"},
      {&names.grad_fn, "grad_fn"},
      {&names.metadata, "metadata"},
      {&names.nbytes, "nbytes"},
      {&names.next_functions, "next_functions"},
      {&names.numel, "numel"},
      {&names.output_nr, "output_nr"},
      {&names.self, "self"},
      {&names.untyped_storage, "untyped_storage"},
      {&names.rows, "_rows"},
      {&names.names, "names"},
      {&names.latest_call, "latest_call"},
      {&names.version, "_version"},
      {&names.append, "append"},
      {&names.data, "data"},
      {&names.dtype, "dtype"},
      {&names.shape, "shape"},
      {&names.storage_offset, "storage_offset"},
      {&names.data_ptr, "data_ptr"},
      {&names.enter_context, "enter_context"},
      {&names.name, "name"},
      {&names.packer, "packer"},
      {&names.payload, "payload"},
      {&names.ready, "ready"},
      {&names.seed, "seed"},
      {&names.step_key, "step_key"},
      {&names.weak_ref, "_weak_ref"},
      {&names.as_strided, "as_strided"},
      {&names.contiguous, "contiguous"},
      {&names.clone, "clone"},
      {&names.scheme, "scheme"},
      {&names.work, "work"},
      {&names.of_view, "base"},
  };
  for (const auto& [place, text] : all) {
    *place = PyUnicode_InternFromString(text);
    if (*place == nullptr) return false;
  }
  return true;
}

Ref get(PyObject* object, PyObject* name) { return Ref(PyObject_GetAttr(object, name)); }

Ref call(PyObject* function, PyObject* argument) {
  return Ref(PyObject_CallFunctionObjArgs(function, argument, nullptr));
}

Ref call_method(PyObject* object, PyObject* name) { return Ref(PyObject_CallMethodObjArgs(object, name, nullptr)); }

// The value of an integer that a reference holds; with an error set if it holds nothing.
bool to_integer(const Ref& number, long long* value) {
  if (!number) return false;
  *value = PyLong_AsLongLong(number.get());
  return *value != -1 || PyErr_Occurred() == nullptr;
}

Answer equal(PyObject* one, PyObject* other) {
  return static_cast<Answer>(PyObject_RichCompareBool(one, other, Py_EQ));
}

Answer truth(const Ref& found) { return found ? static_cast<Answer>(PyObject_IsTrue(found.get())) : Answer::kError; }

// Lets a place hold another object.
void set(PyObject** place, PyObject* object) {
  const Ref before(std::exchange(*place, object));
  Py_XINCREF(object);
}

bool is_set(PyObject* object) { return object != nullptr && object != Py_None; }

// -- objects --------------------------------------------------------------------------------------------------------

// Every class of this module begins with what it owns, kObjects references, of which nothing stands for None.
template <class Class>
PyObject** objects_of(PyObject* self) {
  return reinterpret_cast<PyObject**>(reinterpret_cast<char*>(self) + sizeof(PyObject));
}

template <class Class>
int traverse(PyObject* self, visitproc visit, void* arg) {
  for (int i = 0; i < Class::kObjects; ++i) Py_VISIT(objects_of<Class>(self)[i]);
  Py_VISIT(Py_TYPE(self));
  return 0;
}

template <class Class>
int clear(PyObject* self) {
  for (int i = 0; i < Class::kObjects; ++i) Py_CLEAR(objects_of<Class>(self)[i]);
  return 0;
}

template <class Class>
void dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  if constexpr (Class::kHasWeakReferences) {
    if (reinterpret_cast<Class*>(self)->weak_references != nullptr) PyObject_ClearWeakRefs(self);
  }
  clear<Class>(self);
  reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

#define OBJECT(type, field) {#field, T_OBJECT, offsetof(type, field), 0, nullptr}
#define PRIVATE_OBJECT(type, field) {"_" #field, T_OBJECT, offsetof(type, field), 0, nullptr}
#define NUMBER(type, field) {#field, T_LONGLONG, offsetof(type, field), 0, nullptr}
#define PRIVATE_NUMBER(type, field) {"_" #field, T_LONGLONG, offsetof(type, field), 0, nullptr}
#define FLAG(type, field) {#field, T_BOOL, offsetof(type, field), 0, nullptr}
#define END {nullptr, 0, 0, 0, nullptr}

// A new object of a class that inherits from one of this module.
template <class Class>
Class* make(PyObject* type) {
  return reinterpret_cast<Class*>(PyType_GenericAlloc(reinterpret_cast<PyTypeObject*>(type), 0));
}

constexpr unsigned int kFlags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC;

PyMethodDef no_methods[] = {{nullptr, nullptr, 0, nullptr}};

template <class Class>
bool add_type(PyObject* module, const char* full_name, PyMemberDef* members, PyMethodDef* methods,
              destructor destroy = dealloc<Class>) {
  PyType_Slot slots[] = {{Py_tp_members, members},
                         {Py_tp_methods, methods},
                         {Py_tp_traverse, reinterpret_cast<void*>(traverse<Class>)},
                         {Py_tp_clear, reinterpret_cast<void*>(clear<Class>)},
                         {Py_tp_dealloc, reinterpret_cast<void*>(destroy)},
                         {0, nullptr}};
  PyType_Spec spec = {full_name, sizeof(Class), 0, kFlags, slots};
  PyObject* type = PyType_FromSpec(&spec);
  const char* name = std::strrchr(full_name, '.') + 1;
  return type != nullptr && PyModule_AddObject(module, name, type) == 0;  // which keeps it
}

}  // namespace
}  // namespace gact
