// Packing and unpacking as plain calls on memory, for csrc/hooks: of arguments that are known to be right, without
// torch's dispatcher, which takes longer than the kernel of a small tensor.
#pragma once

namespace gact {

// How the elements of a tensor lie in its packed buffer. element: an Element of kernels.h.
struct PlainForm {
  long long numel, element, bits, group_size, columns;
};

// From elements to bytes, or from bytes to elements; both are the form's.
using PlainCall = void (*)(const PlainForm* form, const void* from, void* to, long long seed);

}  // namespace gact
