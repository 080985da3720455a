"""Python's garbage collector while a forward is compressed.

[Note: collector] The collector runs when some hundreds of objects more than before are alive, and looks at these; now
and then it looks at all that the process has, which takes a third of a second where torch and transformers are loaded.
What a forward keeps is thousands of small objects that live until its backward, which frees them by their reference
counts (see [Note: lifetime] in handles.py). They would wake the collector several times in a step, and make every
fortieth step a slow one, for nothing. So it rests until the forward is over, and then looks at them once.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def at_rest() -> Iterator[None]:
    """Within the context the collector does not run by itself; behind it, it does if it did before."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
