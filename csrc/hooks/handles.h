// What the graph holds in place of tensors.
#pragma once

#include "hooks/objects.h"

namespace gact {
namespace {

// Of Stored in handles.py.
struct Handle {
  static constexpr int kObjects = 6;
  static constexpr bool kHasWeakReferences = true;
  PyObject_HEAD PyObject *name, *payload, *witness, *offloaded, *on_restore, *made;
  PyObject* weak_references;
  long long version, readers, left;
  char keeps_gaps;
};
static_assert(offsetof(Handle, weak_references) == sizeof(PyObject) + Handle::kObjects * sizeof(PyObject*));

PyMemberDef handle_members[] = {
    OBJECT(Handle, name),
    OBJECT(Handle, payload),
    OBJECT(Handle, witness),
    OBJECT(Handle, offloaded),
    OBJECT(Handle, on_restore),
    PRIVATE_OBJECT(Handle, made),
    NUMBER(Handle, version),
    NUMBER(Handle, readers),
    PRIVATE_NUMBER(Handle, left),
    FLAG(Handle, keeps_gaps),
    {"__weaklistoffset__", T_PYSSIZET, offsetof(Handle, weak_references), READONLY, nullptr},
    END};

// Of Kept in handles.py.
struct Kept {
  static constexpr int kObjects = 2;
  static constexpr bool kHasWeakReferences = false;
  PyObject_HEAD PyObject *tensor, *vector;
  long long version;
  char of_model, is_buffer;
};
static_assert(offsetof(Kept, version) == sizeof(PyObject) + Kept::kObjects * sizeof(PyObject*));

PyMemberDef kept_members[] = {OBJECT(Kept, tensor), OBJECT(Kept, vector),  NUMBER(Kept, version),
                              FLAG(Kept, of_model), FLAG(Kept, is_buffer), END};

}  // namespace
}  // namespace gact
