"""What an error's text says: in a line, and whether there was too little memory.

On an accelerator torch raises OutOfMemoryError. On a CPU it is a RuntimeError like any other, and only its text tells.
"""

import torch

# the last is all that an allocation in the native library says when it fails
OUT_OF_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "bad_alloc",
    "ALLOC_FAILED",
    "MemoryError",
    '"aten::new_empty"',
)
_ENDS = "could not create a primitive"  # oneDNN has no memory for its code; with more words behind it, another fault


def first_line(error: BaseException) -> str:
    """Of an error's text."""
    return str(error).split("\n", 1)[0]


def says_out_of_memory(text: str) -> str:
    """The line of an error's text that says that there was too little memory; empty if none does."""
    lines = [line.strip() for line in text.splitlines()]
    return next(
        (line[:200] for line in lines if line.endswith(_ENDS) or any(word in line for word in OUT_OF_MEMORY)), ""
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error was raised for want of memory, on an accelerator or a CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return type(error) is RuntimeError and bool(says_out_of_memory(str(error)))
