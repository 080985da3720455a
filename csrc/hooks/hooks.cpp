// The short ways of the pack and unpack hooks. What is compared, and what may go the short way, is said in
// [Note: settled] in gact_dist/hooks/settled.py; classes of gact_dist/hooks inherit from those of this module.
//
// Between two operators of a job the processor's caches hold the job, not the interpreter, and a comparison in Python
// takes microseconds. Here it takes few instructions and touches little memory. It sees tensors, nodes and frames as
// Python does, by their attributes.
#include "hooks/handles.h"
#include "hooks/objects.h"
#include "hooks/packer.h"
#include "hooks/pattern.h"

namespace gact {
namespace {

// Looked for by gact_dist/_sources.py.
[[gnu::used]] const char kSources[] = GACT_DIST_SOURCES;

// Of Settled in settled.py.
struct Save {
  static constexpr int kObjects = 16;
  static constexpr bool kHasWeakReferences = false;
  PyObject_HEAD PyObject *frames, *innermost, *layer, *is_like, *node_type, *base_type, *below, *evidence, *again,
      *name, *role, *series, *span, *mark, *empty, *next;
  long long number, base_numel, occurrence;
  char has_graph, is_alias, is_attention, is_part, is_relu, is_sign;
};
static_assert(offsetof(Save, number) == sizeof(PyObject) + Save::kObjects * sizeof(PyObject*));

PyMemberDef save_members[] = {OBJECT(Save, frames),     OBJECT(Save, innermost),
                              OBJECT(Save, layer),      OBJECT(Save, is_like),
                              OBJECT(Save, node_type),  OBJECT(Save, base_type),
                              OBJECT(Save, below),      OBJECT(Save, evidence),
                              OBJECT(Save, again),      OBJECT(Save, name),
                              OBJECT(Save, role),       OBJECT(Save, series),
                              OBJECT(Save, span),       OBJECT(Save, mark),
                              OBJECT(Save, empty),      OBJECT(Save, next),
                              NUMBER(Save, number),     NUMBER(Save, base_numel),
                              NUMBER(Save, occurrence), FLAG(Save, has_graph),
                              FLAG(Save, is_alias),     FLAG(Save, is_attention),
                              FLAG(Save, is_part),      FLAG(Save, is_relu),
                              FLAG(Save, is_sign),      END};

// A step's saves are a chain: without the trashcan, which the stable ABI has not, freeing one would free the next
// within it, and so on. So the chain is taken apart first.
void dealloc_save(PyObject* self) {
  Ref next(std::exchange(reinterpret_cast<Save*>(self)->next, nullptr));
  dealloc<Save>(self);
  while (next && !next.is_none() && Py_REFCNT(next.get()) == 1)
    next = Ref(std::exchange(reinterpret_cast<Save*>(next.get())->next, nullptr));
}

// Of StorageRecord in aliases.py.
struct Record {
  static constexpr int kObjects = 6;
  static constexpr bool kHasWeakReferences = false;
  PyObject_HEAD PyObject *weak, *stored, *cells, *relu_versions, *first_partial, *bypassing;
  long long partial_numel, seen_bytes;
  char aliased;
};
static_assert(offsetof(Record, partial_numel) == sizeof(PyObject) + Record::kObjects * sizeof(PyObject*));

PyMemberDef record_members[] = {OBJECT(Record, weak),          OBJECT(Record, stored),
                                OBJECT(Record, cells),         OBJECT(Record, relu_versions),
                                OBJECT(Record, first_partial), OBJECT(Record, bypassing),
                                NUMBER(Record, partial_numel), NUMBER(Record, seen_bytes),
                                FLAG(Record, aliased),         END};

// A weak reference to a storage: as long as it lives no other storage can take the place of that one.
struct Pin {
  static constexpr int kObjects = 1;
  static constexpr bool kHasWeakReferences = false;
  PyObject_HEAD PyObject* unpin;  // a function of torch
  long long number;
};
static_assert(offsetof(Pin, number) == sizeof(PyObject) + Pin::kObjects * sizeof(PyObject*));

PyMemberDef pin_members[] = {OBJECT(Pin, unpin), NUMBER(Pin, number), END};

void dealloc_pin(PyObject* self) {
  const Pin* pin = reinterpret_cast<Pin*>(self);
  if (is_set(pin->unpin)) {
    PyObject *kind, *value, *trace;
    PyErr_Fetch(&kind, &value, &trace);  // of the code in which it is freed
    const Ref number(PyLong_FromLongLong(pin->number));
    if (!number || !call(pin->unpin, number.get())) PyErr_WriteUnraisable(pin->unpin);
    PyErr_Restore(kind, value, trace);
  }
  dealloc<Pin>(self);
}

// -- looks ----------------------------------------------------------------------------------------------------------

// Whether frames, from this one up, are where an earlier save's were. last: the outermost of them.
Answer in_frames(PyObject* frames, PyObject* first, Ref* last) {
  Ref frame = Ref::shared(first);
  const Py_ssize_t count = PyTuple_Size(frames);
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* expected = PyTuple_GetItem(frames, i);
    if (i > 0) {
      frame = get(last->get(), names.f_back);
      if (!frame) return Answer::kError;
    }
    if (frame.is_none()) return Answer::kNo;
    const Ref code(reinterpret_cast<PyObject*>(PyFrame_GetCode(reinterpret_cast<PyFrameObject*>(frame.get()))));
    if (code.get() != PyTuple_GetItem(expected, 0)) return Answer::kNo;
    const Ref instruction = get(frame.get(), names.f_lasti);
    if (!instruction) return Answer::kError;
    const long at = PyLong_AsLong(instruction.get()), known = PyLong_AsLong(PyTuple_GetItem(expected, 1));
    if (PyErr_Occurred() != nullptr) return Answer::kError;
    if (at != known) return Answer::kNo;
    *last = std::move(frame);
  }
  return Answer::kYes;
}

// The node behind an edge of a node; None where there is no graph.
Ref behind(PyObject* node, Py_ssize_t number) {
  const Ref edges = get(node, names.next_functions);
  if (!edges) return Ref();
  PyObject* edge = PyTuple_GetItem(edges.get(), number);
  return edge == nullptr ? Ref() : Ref::shared(PyTuple_GetItem(edge, 0));
}

// Whether a node is as a Way says. number: of the node on it, the first 0.
Answer fits_way(PyObject* node, PyObject* type, PyObject* blanks, Py_ssize_t number) {
  if (reinterpret_cast<PyObject*>(Py_TYPE(node)) != type) return Answer::kNo;
  const Py_ssize_t count = PyTuple_Size(blanks);
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* blank = PyTuple_GetItem(blanks, i);
    if (PyLong_AsSsize_t(PyTuple_GetItem(blank, 0)) != number) continue;
    const Ref notes = get(node, names.metadata);
    const int is_noted = notes ? PyDict_Contains(notes.get(), PyTuple_GetItem(blank, 1)) : -1;
    if (is_noted != 0) return is_noted < 0 ? Answer::kError : Answer::kNo;
  }
  return Answer::kYes;
}

// Whether the nodes of a Way are behind a node. end: the last one.
Answer follow(PyObject* way, PyObject* from, Ref* end) {
  PyObject *steps = PyTuple_GetItem(way, 0), *last = PyTuple_GetItem(way, 1), *blanks = PyTuple_GetItem(way, 2);
  Ref node = Ref::shared(from);
  const Py_ssize_t count = PyTuple_Size(steps);
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* step = PyTuple_GetItem(steps, i);
    const Answer found = fits_way(node.get(), PyTuple_GetItem(step, 0), blanks, i);
    if (found != Answer::kYes) return found;
    node = behind(node.get(), PyLong_AsSsize_t(PyTuple_GetItem(step, 1)));
    if (!node) return Answer::kError;
  }
  const Answer found = fits_way(node.get(), last, blanks, count);
  *end = std::move(node);
  return found;
}

// Whether a node has for a factor what is stored, of several elements and without a graph. slot: in which it is saved.
// edge: number of the factor's. handle_type: of what is stored.
Answer has_stored_factor(PyObject* node, PyObject* slot, PyObject* edge, PyObject* handle_type) {
  const Ref below = behind(node, PyLong_AsSsize_t(edge));
  if (!below) return Answer::kError;
  if (!below.is_none()) return Answer::kNo;
  const Ref saved = get(node, slot), handle = saved ? get(saved.get(), names.data) : Ref();
  if (!handle) {  // it was freed by a backward
    if (!PyErr_ExceptionMatches(PyExc_RuntimeError)) return Answer::kError;
    PyErr_Clear();
    return Answer::kNo;
  }
  if (reinterpret_cast<PyObject*>(handle.type()) != handle_type) return Answer::kNo;
  const Ref shape = get(reinterpret_cast<Handle*>(handle.get())->payload, names.shape);
  long long numel;
  if (!shape || !to_integer(call_method(shape.get(), names.numel), &numel)) return Answer::kError;
  return answer(numel > 1);
}

// Whether Evidence of parameters.py is there, that something is not made from parameters alone. Notes it for what is
// computed from the node. from_activations: the key of the notes. handle_type: of what is stored.
Answer is_evident(PyObject* evidence, PyObject* node, PyObject* from_activations, PyObject* handle_type) {
  PyObject *way = PyTuple_GetItem(evidence, 0), *slot = PyTuple_GetItem(evidence, 2);
  const bool by_type = PyTuple_GetItem(evidence, 1) == Py_True;
  const bool is_there = PyTuple_Size(PyTuple_GetItem(way, 0)) == 0;
  Ref end;
  const Answer found = follow(way, node, &end);
  if (found != Answer::kYes) return found;
  if (slot != Py_None) {
    const Answer has = has_stored_factor(end.get(), slot, PyTuple_GetItem(evidence, 3), handle_type);
    if (has != Answer::kYes) return has;
  } else if (!by_type) {
    const Ref notes = get(end.get(), names.metadata);
    if (!notes) return Answer::kError;
    const int noted = PyDict_Contains(notes.get(), from_activations);
    if (noted != 1) return static_cast<Answer>(noted);
  }
  if (is_there && slot == Py_None) return Answer::kYes;
  const Ref notes = get(node, names.metadata);
  if (!notes || PyDict_SetItem(notes.get(), from_activations, Py_True) < 0) return Answer::kError;
  return Answer::kYes;
}

// -- a job's saves --------------------------------------------------------------------------------------------------

struct Saves {
  static constexpr int kObjects = 42;
  static constexpr bool kHasWeakReferences = false;
  PyObject_HEAD
      // the chain of the step before: its first, the latest that was met, and what is expected next
      PyObject *first,
      *latest, *expected;
  // of the step: what it is compared with and noted in
  PyObject *stack, *records, *owned, *given, *account, *recent, *keys, *remembered;
  // of the job
  PyObject *bases, *functions, *roles, *from_activations, *buffers, *vectors;
  PyObject *parameter_type, *tensor_type, *handle_type, *kept_type, *record_type, *packer_type, *nothing;
  // functions of Python's: of torch, and for what is rarer
  PyObject *graph_task_id, *function_modes, *pin_type, *unpin, *saves_own_result;
  PyObject *keep_parameter, *is_parameter, *is_part_of_a_weight, *find_stored, *alias, *payload, *store, *note_part,
      *note_part_of_base, *after, *leave, *in_modes, *long_way;
  char settles, parametrized, copies_vectors;
};
static_assert(offsetof(Saves, settles) == sizeof(PyObject) + Saves::kObjects * sizeof(PyObject*));

PyMemberDef saves_members[] = {OBJECT(Saves, first),
                               OBJECT(Saves, latest),
                               OBJECT(Saves, expected),
                               OBJECT(Saves, stack),
                               OBJECT(Saves, records),
                               OBJECT(Saves, owned),
                               OBJECT(Saves, given),
                               OBJECT(Saves, account),
                               OBJECT(Saves, recent),
                               OBJECT(Saves, keys),
                               OBJECT(Saves, remembered),
                               OBJECT(Saves, bases),
                               OBJECT(Saves, functions),
                               OBJECT(Saves, roles),
                               OBJECT(Saves, from_activations),
                               OBJECT(Saves, buffers),
                               OBJECT(Saves, vectors),
                               OBJECT(Saves, parameter_type),
                               OBJECT(Saves, tensor_type),
                               OBJECT(Saves, handle_type),
                               OBJECT(Saves, kept_type),
                               OBJECT(Saves, record_type),
                               OBJECT(Saves, packer_type),
                               OBJECT(Saves, nothing),
                               OBJECT(Saves, graph_task_id),
                               OBJECT(Saves, function_modes),
                               OBJECT(Saves, pin_type),
                               OBJECT(Saves, unpin),
                               OBJECT(Saves, saves_own_result),
                               OBJECT(Saves, keep_parameter),
                               OBJECT(Saves, is_parameter),
                               OBJECT(Saves, is_part_of_a_weight),
                               OBJECT(Saves, find_stored),
                               OBJECT(Saves, alias),
                               OBJECT(Saves, payload),
                               OBJECT(Saves, store),
                               OBJECT(Saves, note_part),
                               OBJECT(Saves, note_part_of_base),
                               OBJECT(Saves, after),
                               OBJECT(Saves, leave),
                               OBJECT(Saves, in_modes),
                               OBJECT(Saves, long_way),
                               FLAG(Saves, settles),
                               FLAG(Saves, parametrized),
                               FLAG(Saves, copies_vectors),
                               END};

// Whether a tensor is saved as an earlier one was. node, base: its grad_fn and _base.
Answer matches(const Saves* saves, const Save* save, PyObject* tensor, const Ref& node, const Ref& base,
               PyObject* frame) {
  Ref last;
  const Answer in_place = in_frames(save->frames, frame, &last);
  if (in_place != Answer::kYes) return in_place;
  const Py_ssize_t depth = PyList_Size(saves->stack);
  PyObject* innermost = depth > 0 ? PyList_GetItem(saves->stack, depth - 1) : Py_None;
  if (innermost != save->innermost) return Answer::kNo;
  const Answer is_like = truth(call(save->is_like, tensor));
  if (is_like != Answer::kYes) return is_like;
  if (reinterpret_cast<PyObject*>(node.type()) != save->node_type) return Answer::kNo;
  long long number;
  if (!to_integer(get(tensor, names.output_nr), &number)) return Answer::kError;
  if (number != save->number) return Answer::kNo;
  Ref source = Ref::shared(node.get());
  if (base.is_none()) {
    if (is_set(save->base_type)) return Answer::kNo;
  } else {
    source = get(base.get(), names.grad_fn);
    if (!source) return Answer::kError;
    if (source.is_none() || reinterpret_cast<PyObject*>(source.type()) != save->base_type) return Answer::kNo;
    long long numel;
    if (!to_integer(call_method(base.get(), names.numel), &numel)) return Answer::kError;
    if (numel != save->base_numel) return Answer::kNo;
  }
  if (is_set(save->below)) {
    const Ref below = behind(source.get(), 0);
    if (!below) return Answer::kError;
    if (reinterpret_cast<PyObject*>(below.type()) != save->below) return Answer::kNo;
  }
  if (!is_set(save->layer)) return Answer::kYes;
  const Ref locals = get(last.get(), names.f_locals);
  if (!locals) return Answer::kError;
  const Ref layer(PyObject_GetItem(locals.get(), names.self));
  if (!layer) {
    if (!PyErr_ExceptionMatches(PyExc_KeyError)) return Answer::kError;
    PyErr_Clear();
  }
  return answer(layer.get() == save->layer);
}

// Whether a tensor is a parameter, or a view of one.
Answer is_parameter_or_view(const Saves* saves, PyObject* tensor, const Ref& base) {
  const auto kind = reinterpret_cast<PyTypeObject*>(saves->parameter_type);
  if (Py_TYPE(tensor) == kind) return Answer::kYes;
  if (base.is_none() || base.type() != kind) return Answer::kNo;
  const Ref node = get(base.get(), names.grad_fn);
  return node ? answer(node.is_none()) : Answer::kError;
}

// Whether a shape is that of a vector, perhaps with dimensions of size 1.
Answer is_vector(const Ref& shape) {
  if (!shape) return Answer::kError;
  long longest = 1, numel = 1;
  const Py_ssize_t dimensions = PyTuple_Size(shape.get());
  for (Py_ssize_t i = 0; i < dimensions; ++i) {
    const long size = PyLong_AsLong(PyTuple_GetItem(shape.get(), i));
    if (size == -1 && PyErr_Occurred() != nullptr) return Answer::kError;
    longest = size > longest || i == 0 ? size : longest;
    numel *= size;
  }
  return answer(numel == longest);
}

// Whether a tensor's memory is that of a buffer.
Answer is_buffer(const Saves* saves, PyObject* tensor) {
  const Ref storage = call_method(tensor, names.untyped_storage),
            key = storage ? get(storage.get(), names.cdata) : Ref();
  return key ? static_cast<Answer>(PySet_Contains(saves->buffers, key.get())) : Answer::kError;
}

// What the graph is to hold of a parameter or a view of one, of no other class: as _kept_of_model() in engine.py.
Ref keep_of_model(const Saves* saves, PyObject* tensor) {
  const bool is_parameter = reinterpret_cast<PyObject*>(Py_TYPE(tensor)) == saves->parameter_type;
  Ref made(reinterpret_cast<PyObject*>(make<Kept>(saves->kept_type)));
  if (!made) return Ref();
  Kept* kept = reinterpret_cast<Kept*>(made.get());
  kept->of_model = 1;
  kept->tensor = is_parameter ? Ref::shared(tensor).release() : call_method(tensor, names.detach).release();
  if (kept->tensor == nullptr || !to_integer(get(tensor, names.version), &kept->version)) return Ref();
  if (!saves->copies_vectors) return made;
  const Answer copies = is_vector(get(tensor, names.shape));
  const Answer of_buffer = is_parameter ? Answer::kNo : is_buffer(saves, tensor);
  if (copies == Answer::kError || of_buffer == Answer::kError) return Ref();
  kept->is_buffer = of_buffer == Answer::kYes;
  if (copies == Answer::kNo) return made;
  const Ref own = call_method(tensor, names.detach);
  kept->vector = own ? call_method(own.get(), names.clone).release() : nullptr;
  if (kept->vector == nullptr || PyList_Append(saves->vectors, made.get()) < 0) return Ref();
  return made;
}

// Whether what backward reads may be the model's own, or the batch's, after all. key: of its storage.
Answer is_others(const Saves* saves, const Save* save, PyObject* tensor, const Ref& node, const Ref& key) {
  if (!save->has_graph) {
    const Answer is_owned = static_cast<Answer>(PySet_Contains(saves->owned, key.get()));
    if (is_owned != Answer::kNo) return is_owned;
    for (Py_ssize_t i = 0; i < PyTuple_Size(saves->given); ++i) {
      const Answer is_given = static_cast<Answer>(PyDict_Contains(PyTuple_GetItem(saves->given, i), key.get()));
      if (is_given != Answer::kNo) return is_given;
    }
  } else {
    const Answer known = is_set(save->evidence)
                             ? is_evident(save->evidence, node.get(), saves->from_activations, saves->handle_type)
                             : Answer::kNo;
    if (known == Answer::kError) return known;
    if (known == Answer::kNo) {
      const Ref found(PyObject_CallFunctionObjArgs(saves->is_parameter, tensor, Py_None, nullptr));
      const Answer is_made = truth(found);
      if (is_made != Answer::kNo) return is_made;
    }
  }
  return saves->parametrized ? truth(call(saves->is_part_of_a_weight, tensor)) : Answer::kNo;
}

// Whether it is relu's own result that relu saves, for the first time. record: of its memory, or nothing.
Answer is_own_result(const Saves* saves, PyObject* tensor, const Ref& node, PyObject* record) {
  const Answer saves_it = truth(call(saves->saves_own_result, node.get()));
  if (saves_it != Answer::kYes || record == nullptr) return saves_it;
  const Ref version = get(tensor, names.version);
  if (!version) return Answer::kError;
  const int is_known = PySet_Contains(reinterpret_cast<Record*>(record)->relu_versions, version.get());
  return is_known < 0 ? Answer::kError : answer(is_known == 0);
}

// Whether the same becomes of a tensor as of the one before, whatever else is saved: see Again in sinks.py.
Answer fits(const Save* save, const Ref& node, const Ref& storage, const Ref& record) {
  if (!is_set(save->again)) return Answer::kNo;
  PyObject *packer = PyTuple_GetItem(save->again, 1), *bytes = PyTuple_GetItem(save->again, 3),
           *way = PyTuple_GetItem(save->again, 4), *after_alias = PyTuple_GetItem(save->again, 5);
  if (packer == Py_None) {
    PyObject* is_after = !record ? Py_None : reinterpret_cast<Record*>(record.get())->aliased ? Py_True : Py_False;
    if (is_after != after_alias) return Answer::kNo;
  }
  long long nbytes;
  if (!to_integer(call_method(storage.get(), names.nbytes), &nbytes)) return Answer::kError;
  if (nbytes != PyLong_AsLongLong(bytes)) return Answer::kNo;
  Ref end;
  return way == Py_None ? Answer::kYes : follow(way, node.get(), &end);
}

Ref pin(const Saves* saves, const Ref& storage) {
  long long number;
  if (!to_integer(call_method(storage.get(), names.weak_ref), &number)) return Ref();
  Ref made(reinterpret_cast<PyObject*>(make<Pin>(saves->pin_type)));
  if (!made) return Ref();
  Pin* pin = reinterpret_cast<Pin*>(made.get());
  pin->number = number;
  set(&pin->unpin, saves->unpin);
  return made;
}

// Notes a storage that the step has not met: as StorageRecords.of() in aliases.py.
Ref new_record(const Saves* saves, const Ref& storage, const Ref& key) {
  Ref made(reinterpret_cast<PyObject*>(make<Record>(saves->record_type)));
  if (!made) return Ref();
  Record* record = reinterpret_cast<Record*>(made.get());
  record->weak = pin(saves, storage).release();
  record->stored = PyList_New(0);
  set(&record->relu_versions, saves->nothing);
  set(&record->bypassing, saves->nothing);
  record->first_partial = PyUnicode_FromStringAndSize(nullptr, 0);
  if (record->weak == nullptr || record->stored == nullptr || record->first_partial == nullptr) return Ref();
  if (PyDict_SetItem(saves->records, key.get(), made.get()) < 0) return Ref();
  return made;
}

// What the graph is to hold of a tensor: as Stored() in handles.py.
Ref new_handle(const Saves* saves, const Save* save, PyObject* tensor, const Ref& payload, bool is_alias) {
  Ref witness = is_alias ? Ref::shared(payload.get()) : call_method(tensor, names.detach);
  if (!witness || (!is_alias && PyObject_SetAttr(witness.get(), names.data, save->empty) < 0)) return Ref();
  Ref made(reinterpret_cast<PyObject*>(make<Handle>(saves->handle_type)));
  if (!made) return Ref();
  Handle* handle = reinterpret_cast<Handle*>(made.get());
  set(&handle->name, save->name);
  set(&handle->payload, payload.get());
  handle->witness = witness.release();
  handle->readers = 1;
  if (!to_integer(get(tensor, names.version), &handle->version)) return Ref();
  return made;
}

// Notes that a tensor's memory is stored: as note_part() in aliases.py, which does it where parts are many.
bool note_stored(const Saves* saves, const Save* save, PyObject* tensor, Record* record, const Ref& made) {
  constexpr Py_ssize_t kFew = 8;  // of which Python makes no table yet: at most _FEW of aliases.py
  const Py_ssize_t number = PyList_Size(record->stored);
  if (number < 0) return false;
  if (is_set(record->cells) || number >= kFew) {
    return static_cast<bool>(Ref(PyObject_CallFunctionObjArgs(
        saves->note_part, tensor, reinterpret_cast<PyObject*>(record), made.get(), save->span, nullptr)));
  }
  long long first;
  if (!to_integer(call_method(tensor, names.storage_offset), &first)) return false;
  const long long last = first + PyLong_AsLongLong(save->span);
  const Ref dtype = get(tensor, names.dtype), reference(PyWeakref_NewRef(made.get(), nullptr));
  if (!dtype || !reference) return false;
  const long long version = reinterpret_cast<Handle*>(made.get())->version;
  const Ref part(Py_BuildValue("nLLLOiO", number, first, last, version, dtype.get(), 0, reference.get()));
  return part && PyList_Append(record->stored, part.get()) == 0;
}

// Adds a row to the step's account.
bool add_to_account(const Saves* saves, PyObject* again, Record* record) {
  const Ref rows = get(saves->account, names.rows);
  if (!rows || PyList_Append(rows.get(), PyTuple_GetItem(again, 2)) < 0) return false;
  const long long bytes = PyLong_AsLongLong(PyTuple_GetItem(again, 3)), added = bytes - record->seen_bytes;
  if (added <= 0) return true;
  long long exact;
  if (!to_integer(get(saves->account, names.exact_bytes), &exact)) return false;
  const Ref sum(PyLong_FromLongLong(exact + added));
  if (!sum || PyObject_SetAttr(saves->account, names.exact_bytes, sum.get()) < 0) return false;
  record->seen_bytes = bytes;
  return true;
}

// As RoundingKeys.seed() in encoder.py. keys: those of the step. hash: of the name.
bool seed_of(PyObject* keys, PyObject* hash, long long* seed) {
  const Ref step_key = get(keys, names.step_key);
  if (!step_key) return false;
  const unsigned long long key = PyLong_AsUnsignedLongLong(step_key.get()), value = PyLong_AsUnsignedLongLong(hash);
  if (PyErr_Occurred() != nullptr) return false;
  unsigned long long mixed = key ^ value * 0x9E3779B97F4A7C15;
  mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9;
  mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB;
  mixed ^= mixed >> 31;
  *seed = static_cast<long long>(mixed ^ 1ULL << 63);
  return true;
}

// What is kept of a tensor that is packed like that of an earlier step: as Store.payload_again() in sinks.py; None
// where it cannot be.
Ref payload_again(const Saves* saves, const Save* save, PyObject* tensor) {
  PyObject *packer = PyTuple_GetItem(save->again, 1), *hash = PyTuple_GetItem(save->again, 6);
  if (hash == Py_None) return call(packer, tensor);
  if (reinterpret_cast<PyObject*>(Py_TYPE(packer)) == saves->packer_type) {
    long long seed;
    if (!seed_of(saves->keys, hash, &seed)) return Ref();
    Ref packed = pack_by(reinterpret_cast<Packer*>(packer), tensor, seed);
    if (!packed || !packed.is_none()) return packed;
  }
  return Ref(PyObject_CallFunctionObjArgs(saves->payload, tensor, packer, save->name, nullptr));
}

// Notes that relu has saved its own result.
bool note_relu(PyObject* tensor, Record* record) {
  const Ref version = get(tensor, names.version);
  if (!version) return false;
  const Ref one(PyTuple_Pack(1, version.get())), own(one ? PySet_New(one.get()) : nullptr);
  if (!own) return false;
  const Ref all(PyNumber_Or(record->relu_versions, own.get()));
  if (!all) return false;
  set(&record->relu_versions, all.get());
  return true;
}

// Stores a tensor as one was that is like it; None if it cannot be. known: the record of its memory, if there is one.
Ref store_again(const Saves* saves, const Save* save, PyObject* tensor, const Ref& known, const Ref& storage,
                const Ref& key) {
  const bool is_alias = PyTuple_GetItem(save->again, 1) == Py_None;
  const Ref payload = is_alias ? call_method(tensor, names.detach) : payload_again(saves, save, tensor);
  if (!payload) return Ref();
  if (payload.is_none()) return Ref::shared(Py_None);
  const Ref kept = known ? Ref::shared(known.get()) : new_record(saves, storage, key);
  if (!kept) return Ref();
  if (save->is_part &&
      !Ref(PyObject_CallFunctionObjArgs(saves->note_part_of_base, tensor, save->name, kept.get(), nullptr)))
    return Ref();
  Record* record = reinterpret_cast<Record*>(kept.get());
  Ref handle = new_handle(saves, save, tensor, payload, is_alias);
  if (!handle) return Ref();
  const Ref recent(PyTuple_Pack(2, handle.get(), payload.get()));
  if (!recent || !Ref(PyObject_CallMethodObjArgs(saves->recent, names.append, recent.get(), nullptr))) return Ref();
  if (!add_to_account(saves, save->again, record)) return Ref();
  record->aliased |= is_alias;
  if (save->is_sign) return note_relu(tensor, record) ? std::move(handle) : Ref();
  if (is_set(save->span) && !note_stored(saves, save, tensor, record, handle)) return Ref();
  return handle;
}

// What is kept of a tensor whose looks are those of an earlier save; None if its memory is not as it was then.
Ref settle(Saves* saves, Save* save, PyObject* tensor, const Ref& node) {
  const Ref storage = call_method(tensor, names.untyped_storage);
  if (!storage) return Ref();
  const Ref key = get(storage.get(), names.cdata);
  if (!key) return Ref();
  const Answer others = is_others(saves, save, tensor, node, key);
  if (others != Answer::kNo) return others == Answer::kError ? Ref() : Ref::shared(Py_None);
  const Ref record = Ref::shared(PyDict_GetItemWithError(saves->records, key.get()));
  if (!record && PyErr_Occurred() != nullptr) return Ref();
  Ref found = Ref::shared(Py_None);
  if (record && PyList_Size(reinterpret_cast<Record*>(record.get())->stored) > 0) {
    found = Ref(PyObject_CallFunctionObjArgs(saves->find_stored, tensor, record.get(), nullptr));
    if (!found) return Ref();
  }
  if (save->is_relu) {
    const Answer own = is_own_result(saves, tensor, node, record.get());
    if (own == Answer::kError) return Ref();
    if ((own == Answer::kYes) != static_cast<bool>(save->is_sign)) return Ref::shared(Py_None);
  }
  Ref handle;
  if (save->is_alias) {
    if (found.is_none()) return found;
    handle = Ref(
        PyObject_CallFunctionObjArgs(saves->alias, tensor, reinterpret_cast<PyObject*>(save), found.get(), nullptr));
    if (!handle || handle.is_none()) return handle;
  } else {
    long long count;
    if (!found.is_none() && !save->is_sign) return Ref::shared(Py_None);
    if (!to_integer(get(save->series, names.count), &count)) return Ref();
    if (count != save->occurrence) return Ref::shared(Py_None);
    if (save->is_part) {
      const Ref known = get(saves->bases, names.names);
      const int is_base = known ? PySet_Contains(known.get(), save->name) : -1;
      if (is_base != 0) return is_base < 0 ? Ref() : Ref::shared(Py_None);
    }
    const Answer is_again = fits(save, node, storage, record);
    if (is_again == Answer::kError) return Ref();
    const Ref next_count(PyLong_FromLongLong(count + 1));
    if (!next_count || PyObject_SetAttr(save->series, names.count, next_count.get()) < 0) return Ref();
    handle = is_again == Answer::kYes ? store_again(saves, save, tensor, record, storage, key) : Ref::shared(Py_None);
    if (handle && handle.is_none())
      handle = Ref(PyObject_CallFunctionObjArgs(saves->store, tensor, reinterpret_cast<PyObject*>(save),
                                                record ? record.get() : Py_None, nullptr));
    if (!handle) return handle;
    if (save->is_attention && !call(saves->after, node.get())) return Ref();
  }
  const Ref running = get(saves->functions, names.call);
  if (!running || (!running.is_none() && !Ref(PyObject_CallFunctionObjArgs(saves->leave, nullptr)))) return Ref();
  if (PyObject_SetAttr(saves->roles, names.latest_call, Py_None) < 0) return Ref();
  if (is_set(save->mark) && !save->is_sign && !node.is_none()) {
    const Ref notes = get(node.get(), names.metadata), reference(PyWeakref_NewRef(handle.get(), nullptr));
    if (!notes || !reference || PyDict_SetItem(notes.get(), save->mark, reference.get()) < 0) return Ref();
  }
  set(&saves->latest, reinterpret_cast<PyObject*>(save));
  set(&saves->expected, save->next);
  return handle;
}

// What the graph is to hold of a tensor that is saved at a frame, None if it has to go the long way.
Ref pack_at(Saves* saves, PyObject* tensor, PyObject* frame) {
  if (!saves->settles || frame == nullptr || frame == Py_None) return Ref::shared(Py_None);
  long long task;
  if (!to_integer(Ref(PyObject_CallFunctionObjArgs(saves->graph_task_id, nullptr)), &task)) return Ref();
  if (task != -1) return Ref::shared(Py_None);  // in a backward
  const Py_ssize_t remembered = PyList_Size(saves->remembered);
  if (remembered != 0) return remembered < 0 ? Ref() : Ref::shared(Py_None);  // a custom function may be saving
  const Ref base = get(tensor, names.base);
  if (!base) return Ref();
  const Answer is_parameter = is_parameter_or_view(saves, tensor, base);
  if (is_parameter == Answer::kError) return Ref();
  if (is_parameter == Answer::kYes) {
    const auto kind = reinterpret_cast<PyObject*>(Py_TYPE(tensor));
    const bool is_plain = kind == saves->parameter_type || kind == saves->tensor_type;
    return is_plain ? keep_of_model(saves, tensor) : call(saves->keep_parameter, tensor);
  }
  if (!is_set(saves->expected)) return Ref::shared(Py_None);
  const Ref expected = Ref::shared(saves->expected), node = get(tensor, names.grad_fn);
  if (!node) {  // of a view that torch refuses to make a node for: the long way knows
    if (!PyErr_ExceptionMatches(PyExc_RuntimeError)) return Ref();
    PyErr_Clear();
    return Ref::shared(Py_None);
  }
  Save* save = reinterpret_cast<Save*>(expected.get());
  const Answer is_same = matches(saves, save, tensor, node, base, frame);
  if (is_same == Answer::kError) return Ref();
  return is_same == Answer::kYes ? settle(saves, save, tensor, node) : Ref::shared(Py_None);
}

PyObject* saves_pack_at(PyObject* self, PyObject* arguments) {
  PyObject *tensor, *frame;
  if (!PyArg_ParseTuple(arguments, "OO", &tensor, &frame)) return nullptr;
  return pack_at(reinterpret_cast<Saves*>(self), tensor, frame).release();
}

PyObject* saves_pack(PyObject* self, PyObject* tensor) {
  Saves* saves = reinterpret_cast<Saves*>(self);
  if (saves->settles) {
    long long modes;
    if (!to_integer(Ref(PyObject_CallFunctionObjArgs(saves->function_modes, nullptr)), &modes)) return nullptr;
    if (modes > 0) return call(saves->in_modes, tensor).release();
    Ref handle = pack_at(saves, tensor, reinterpret_cast<PyObject*>(PyEval_GetFrame()));
    if (!handle || !handle.is_none()) return handle.release();
  }
  return call(saves->long_way, tensor).release();
}

PyMethodDef saves_methods[] = {
    {"pack", saves_pack, METH_O, "The pack hook. A tensor -> what the graph is to hold."},
    {"pack_at", saves_pack_at, METH_VARARGS, "(tensor, frame that saves it) -> the same, None for the long way."},
    {nullptr, nullptr, 0, nullptr}};

// -- unpacking ------------------------------------------------------------------------------------------------------

// The unpack hook. It owns no more than StorageRecords.restore(), for the graph owns it.
struct Unpacker {
  static constexpr int kObjects = 11;
  static constexpr bool kHasWeakReferences = false;
  PyObject_HEAD PyObject *restore, *decode, *stream, *grad_mode, *node_in_backward, *streaming, *handle_type,
      *kept_type, *packed_type, *recipe_type, *made_for_several;
  long long large_numel;
};
static_assert(offsetof(Unpacker, large_numel) == sizeof(PyObject) + Unpacker::kObjects * sizeof(PyObject*));

PyMemberDef unpacker_members[] = {OBJECT(Unpacker, restore),
                                  OBJECT(Unpacker, decode),
                                  OBJECT(Unpacker, stream),
                                  OBJECT(Unpacker, grad_mode),
                                  OBJECT(Unpacker, node_in_backward),
                                  OBJECT(Unpacker, streaming),
                                  OBJECT(Unpacker, handle_type),
                                  OBJECT(Unpacker, kept_type),
                                  OBJECT(Unpacker, packed_type),
                                  OBJECT(Unpacker, recipe_type),
                                  OBJECT(Unpacker, made_for_several),
                                  NUMBER(Unpacker, large_numel),
                                  END};

// The name of the node whose backward runs where it may decode as it goes on what is packed, else None: see NODES in
// streamed.py.
Ref streaming_node(const Unpacker* unpacker, const Packer* packer) {
  const Ref node(PyObject_CallFunctionObjArgs(unpacker->node_in_backward, nullptr));
  if (!node || node.is_none()) return Ref::shared(node.get());
  Ref name = call_method(node.get(), names.name);
  if (!name) return name;
  PyObject* on_devices = PyDict_GetItemWithError(unpacker->streaming, name.get());
  if (on_devices == nullptr) return PyErr_Occurred() == nullptr ? Ref::shared(Py_None) : Ref();
  return on_devices == Py_True || packer == nullptr || packer->launch == 0 ? std::move(name) : Ref::shared(Py_None);
}

// What a handle with one reader stands for, None for the long way: as Stored.unpack().
Ref unpack_stored(const Unpacker* unpacker, Handle* handle) {
  if (is_set(handle->on_restore) || is_set(handle->offloaded)) return Ref::shared(Py_None);
  long long version;
  if (!to_integer(get(handle->witness, names.version), &version)) return Ref();
  if (version != handle->version) return Ref::shared(Py_None);
  PyObject* payload = handle->payload;
  if (payload == handle->witness) return call_method(payload, names.detach);
  PyObject* kind = reinterpret_cast<PyObject*>(Py_TYPE(payload));
  if (kind != unpacker->packed_type && kind != unpacker->recipe_type) return Ref::shared(Py_None);
  if (handle->readers > 1 || handle->keeps_gaps || PyDict_Size(unpacker->made_for_several) > 0)
    return Ref::shared(Py_None);
  const Ref own = kind == unpacker->packed_type ? get(payload, names.packer) : Ref::shared(Py_None);
  const Ref shape = get(payload, names.shape);
  long long numel;
  if (!own || !shape || !to_integer(call_method(shape.get(), names.numel), &numel)) return Ref();
  const Packer* packer = own.is_none() ? nullptr : reinterpret_cast<Packer*>(own.get());
  if (numel >= unpacker->large_numel) {
    const Ref node = streaming_node(unpacker, packer);
    if (!node) return Ref();
    PyObject* streamed = reinterpret_cast<PyObject*>(handle);
    if (!node.is_none()) return Ref(PyObject_CallFunctionObjArgs(unpacker->stream, streamed, node.get(), nullptr));
  }
  Ref found = packer == nullptr ? Ref::shared(Py_None) : unpack_by(packer, payload);
  return found && found.is_none() ? call(unpacker->decode, payload) : std::move(found);
}

// A tensor that is kept as it is, None if it was modified: as Kept.restore().
Ref unpack_kept(const Kept* kept) {
  long long version;
  if (!to_integer(get(kept->tensor, names.version), &version)) return Ref();
  return Ref::shared(version == kept->version ? kept->tensor : Py_None);
}

PyObject* unpacker_unpack(PyObject* self, PyObject* handle) {
  const Unpacker* unpacker = reinterpret_cast<Unpacker*>(self);
  const Answer makes_graph = truth(Ref(PyObject_CallFunctionObjArgs(unpacker->grad_mode, nullptr)));
  if (makes_graph == Answer::kError) return nullptr;
  PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(handle));
  Ref tensor = Ref::shared(Py_None);
  if (makes_graph == Answer::kNo && type == unpacker->handle_type)
    tensor = unpack_stored(unpacker, reinterpret_cast<Handle*>(handle));
  else if (makes_graph == Answer::kNo && type == unpacker->kept_type)
    tensor = unpack_kept(reinterpret_cast<Kept*>(handle));
  if (tensor && tensor.is_none()) tensor = call(unpacker->restore, handle);
  return tensor.release();
}

PyMethodDef unpacker_methods[] = {
    {"unpack", unpacker_unpack, METH_O, "The unpack hook. What the graph holds -> a tensor."},
    {nullptr, nullptr, 0, nullptr}};

// -- the module -----------------------------------------------------------------------------------------------------

bool add_types(PyObject* module) {
  return add_type<Save>(module, "gact_dist._hooks.Save", save_members, no_methods, dealloc_save) &&
         add_type<Handle>(module, "gact_dist._hooks.Handle", handle_members, no_methods) &&
         add_type<Kept>(module, "gact_dist._hooks.Kept", kept_members, no_methods) &&
         add_type<GraphPattern>(module, "gact_dist._hooks.GraphPattern", pattern_members, pattern_methods) &&
         add_type<Pin>(module, "gact_dist._hooks.Pin", pin_members, no_methods, dealloc_pin) &&
         add_type<Record>(module, "gact_dist._hooks.Record", record_members, no_methods) &&
         add_type<Saves>(module, "gact_dist._hooks.Saves", saves_members, saves_methods) &&
         add_type<Unpacker>(module, "gact_dist._hooks.Unpacker", unpacker_members, unpacker_methods) &&
         add_type<Packer>(module, "gact_dist._hooks.Packer", packer_members, packer_methods);
}

PyModuleDef definition = {PyModuleDef_HEAD_INIT,
                          "gact_dist._hooks",
                          "The short ways of the hooks.",
                          -1,
                          nullptr,
                          nullptr,
                          nullptr,
                          nullptr,
                          nullptr};

}  // namespace
}  // namespace gact

PyMODINIT_FUNC PyInit__hooks() {
  PyObject* module = PyModule_Create(&gact::definition);
  if (module != nullptr && gact::make_names() && gact::add_types(module)) return module;
  Py_XDECREF(module);
  return nullptr;
}
