// What a graph must have for a recipe to come out as it did: see [Note: recipes again] in recipes_again.py.
#pragma once

#include "hooks/handles.h"

namespace gact {
namespace {

// Of RecipeAgain, which says what the members are.
struct GraphPattern {
  static constexpr int kObjects = 10;
  static constexpr bool kHasWeakReferences = false;
  PyObject_HEAD PyObject *kinds, *edges, *constants, *reads, *handle_type, *view_type, *kept_type, *packed_type,
      *recipe_type, *looks_of;
};
static_assert(sizeof(GraphPattern) == sizeof(PyObject) + GraphPattern::kObjects * sizeof(PyObject*));

PyMemberDef pattern_members[] = {OBJECT(GraphPattern, kinds),
                                 OBJECT(GraphPattern, edges),
                                 OBJECT(GraphPattern, constants),
                                 OBJECT(GraphPattern, reads),
                                 OBJECT(GraphPattern, handle_type),
                                 OBJECT(GraphPattern, view_type),
                                 OBJECT(GraphPattern, kept_type),
                                 OBJECT(GraphPattern, packed_type),
                                 OBJECT(GraphPattern, recipe_type),
                                 OBJECT(GraphPattern, looks_of),
                                 END};

constexpr int kNoGraph = -2;  // behind an edge: _NONE of recipes_again.py

// Adds the nodes that are behind the first, where they are of the same kinds with the same edges between them.
Answer add_nodes(const GraphPattern* pattern, PyObject* nodes) {
  char* bytes;
  Py_ssize_t size, at = 0;
  if (PyBytes_AsStringAndSize(pattern->edges, &bytes, &size) < 0) return Answer::kError;
  const auto next = [&] {
    int number;
    std::memcpy(&number, bytes + at, sizeof number);
    at += sizeof number;
    return number;
  };
  const Py_ssize_t count = PyTuple_Size(pattern->kinds);
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* node = PyList_GetItem(nodes, i);  // each but the first is behind one before it
    if (node == nullptr) return Answer::kError;
    if (reinterpret_cast<PyObject*>(Py_TYPE(node)) != PyTuple_GetItem(pattern->kinds, i)) return Answer::kNo;
    const Ref below = get(node, names.next_functions);
    if (!below) return Answer::kError;
    const int edges = next();
    if (PyTuple_Size(below.get()) != edges) return Answer::kNo;
    for (int e = 0; e < edges; ++e) {
      const int number = next(), output = next();
      PyObject *edge = PyTuple_GetItem(below.get(), e), *found = PyTuple_GetItem(edge, 0);
      if (number < 0) {
        if ((found == Py_None) != (number == kNoGraph)) return Answer::kNo;
        continue;
      }
      if (PyLong_AsLong(PyTuple_GetItem(edge, 1)) != output) return Answer::kNo;
      if (number < PyList_Size(nodes)) {
        if (PyList_GetItem(nodes, number) != found) return Answer::kNo;
      } else if (PyList_Append(nodes, found) < 0) {  // they are numbered in this order
        return Answer::kError;
      }
    }
  }
  return Answer::kYes;
}

// Whether nodes have the constants of their operators.
Answer has_constants(const GraphPattern* pattern, PyObject* nodes) {
  const Py_ssize_t count = PyTuple_Size(pattern->constants);
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* known = PyTuple_GetItem(pattern->constants, i);  // (number of the node, name, value)
    PyObject* node = PyList_GetItem(nodes, PyLong_AsSsize_t(PyTuple_GetItem(known, 0)));
    const Ref value = get(node, PyTuple_GetItem(known, 1));
    const Answer is_same = value ? equal(value.get(), PyTuple_GetItem(known, 2)) : Answer::kError;
    if (is_same != Answer::kYes) return is_same;
  }
  return Answer::kYes;
}

// An attribute; None where there is none.
Ref get_or_none(PyObject* object, PyObject* name) {
  Ref found = get(object, name);
  if (found || !PyErr_ExceptionMatches(PyExc_AttributeError)) return found;
  PyErr_Clear();
  return Ref::shared(Py_None);
}

// What the graph holds of a tensor that a node saved: as saved_handle() in _torch_internals.py. slot: the attribute.
Ref held_by(PyObject* node, PyObject* slot) {
  const Ref saved = get_or_none(node, slot);
  return saved ? get_or_none(saved.get(), names.data) : Ref();
}

// What it holds of one of a node's results: as saved_at() in saved_edges.py. mark: of the result.
Ref held_at(const GraphPattern* pattern, PyObject* node, PyObject* mark) {
  const Ref notes = get_or_none(node, names.metadata);
  if (!notes || notes.is_none()) return Ref::shared(notes.get());
  PyObject* reference = PyDict_GetItemWithError(notes.get(), mark);
  if (reference == nullptr) return PyErr_Occurred() == nullptr ? Ref::shared(Py_None) : Ref();
  Ref handle(PyObject_CallFunctionObjArgs(reference, nullptr));
  if (!handle) return Ref();
  const Ref base = reinterpret_cast<PyObject*>(handle.type()) == pattern->view_type ? get(handle.get(), names.of_view)
                                                                                    : Ref::shared(handle.get());
  if (!base || reinterpret_cast<PyObject*>(base.type()) != pattern->handle_type)
    return base ? std::move(handle) : Ref();
  const Handle* stored = reinterpret_cast<const Handle*>(base.get());
  long long version;
  if (!to_integer(get(stored->witness, names.version), &version)) return Ref();
  return version == stored->version ? std::move(handle) : Ref::shared(Py_None);
}

// Whether an attribute of an object is equal to an item of a tuple.
Answer has(PyObject* object, PyObject* name, PyObject* looks, Py_ssize_t item) {
  const Ref found = get(object, name);
  return found ? equal(found.get(), PyTuple_GetItem(looks, item)) : Answer::kError;
}

// Whether a parameter, or what is made of some, is as _looks_of() in recipes_again.py has told of one.
Answer has_looks_of_kept(const Kept* kept, PyObject* looks) {
  if (PyTuple_Size(looks) != 6) return Answer::kNo;
  const bool flags[] = {kept->of_model != 0, kept->is_buffer != 0, !is_set(kept->vector)};
  for (int i = 0; i < 3; ++i) {
    if ((PyTuple_GetItem(looks, 3 + i) == Py_True) != flags[i]) return Answer::kNo;
  }
  if (reinterpret_cast<PyObject*>(Py_TYPE(kept->tensor)) != PyTuple_GetItem(looks, 0)) return Answer::kNo;
  const Answer found = has(kept->tensor, names.shape, looks, 1);
  return found == Answer::kYes ? has(kept->tensor, names.dtype, looks, 2) : found;
}

// The same of any handle.
Answer has_looks(const GraphPattern* pattern, PyObject* handle, PyObject* looks) {
  PyObject* kind = reinterpret_cast<PyObject*>(Py_TYPE(handle));
  if (kind == pattern->kept_type) return has_looks_of_kept(reinterpret_cast<const Kept*>(handle), looks);
  if (kind != pattern->handle_type) {
    const Ref own = call(pattern->looks_of, handle);
    return own ? equal(own.get(), looks) : Answer::kError;
  }
  const Handle* stored = reinterpret_cast<const Handle*>(handle);
  PyObject *payload = stored->payload, *how = reinterpret_cast<PyObject*>(Py_TYPE(payload));
  const bool is_packed = how == pattern->packed_type;
  if (PyTuple_Size(looks) != (is_packed ? 3 : 4)) return Answer::kNo;
  Answer found = equal(stored->name, PyTuple_GetItem(looks, 0));
  if (found == Answer::kYes) found = has(payload, names.shape, looks, 1);
  if (found == Answer::kYes && is_packed) return has(payload, names.scheme, looks, 2);
  if (found == Answer::kYes) found = equal(how, PyTuple_GetItem(looks, 2));
  if (found == Answer::kYes && how == pattern->recipe_type) return has(payload, names.work, looks, 3);
  return found;
}

// Adds what the graph holds of the tensors that were read, where it has the same looks.
Answer add_handles(const GraphPattern* pattern, PyObject* nodes, PyObject* handles) {
  const Py_ssize_t count = PyTuple_Size(pattern->reads);
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* read = PyTuple_GetItem(pattern->reads, i);  // (number of the node, slot, looks, first of the same base)
    PyObject *node = PyList_GetItem(nodes, PyLong_AsSsize_t(PyTuple_GetItem(read, 0))),
             *slot = PyTuple_GetItem(read, 1);
    const Ref handle = PyUnicode_Check(slot) ? held_by(node, slot) : held_at(pattern, node, slot);
    if (!handle) return Answer::kError;
    const Answer is_like = has_looks(pattern, handle.get(), PyTuple_GetItem(read, 2));
    if (is_like != Answer::kYes) return is_like;
    if (PyList_Append(handles, handle.get()) < 0) return Answer::kError;
  }
  return Answer::kYes;
}

// Whether handles are parts of the same ones as before.
Answer have_same_bases(const GraphPattern* pattern, PyObject* handles) {
  const auto base_of = [&](Py_ssize_t number) {
    PyObject* handle = PyList_GetItem(handles, number);
    const bool is_view = reinterpret_cast<PyObject*>(Py_TYPE(handle)) == pattern->view_type;
    return is_view ? get(handle, names.of_view) : Ref::shared(handle);
  };
  const Py_ssize_t count = PyList_Size(handles);
  for (Py_ssize_t i = 0; i < count; ++i) {
    const Py_ssize_t first = PyLong_AsSsize_t(PyTuple_GetItem(PyTuple_GetItem(pattern->reads, i), 3));
    if (first == i) continue;
    const Ref own = base_of(i), other = base_of(first);
    if (!own || !other) return Answer::kError;
    if (own.get() != other.get()) return Answer::kNo;
  }
  return Answer::kYes;
}

// Nothing with an error set, or None where a look shows something else.
PyObject* refused(Answer found) { return found == Answer::kError ? nullptr : Ref::shared(Py_None).release(); }

PyObject* pattern_match(PyObject* self, PyObject* root) {
  const GraphPattern* pattern = reinterpret_cast<GraphPattern*>(self);
  const Ref nodes(PyList_New(0)), handles(PyList_New(0));
  if (!nodes || !handles || PyList_Append(nodes.get(), root) < 0) return nullptr;
  Answer found = add_nodes(pattern, nodes.get());
  if (found == Answer::kYes) found = has_constants(pattern, nodes.get());
  if (found == Answer::kYes) found = add_handles(pattern, nodes.get(), handles.get());
  if (found == Answer::kYes) found = have_same_bases(pattern, handles.get());
  return found == Answer::kYes ? PyTuple_Pack(2, nodes.get(), handles.get()) : refused(found);
}

PyMethodDef pattern_methods[] = {{"match", pattern_match, METH_O,
                                  "The node that made a tensor -> (nodes, handles), None where the graph is another."},
                                 {nullptr, nullptr, 0, nullptr}};

}  // namespace
}  // namespace gact
