"""Attributes of other libraries' classes and objects, replaced within a context and never longer."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    """Within the context an attribute of a class or of an object is replaced.

    Of a wrapper's class, as one instance may be inside another.
    """
    own = name in vars(owner)
    original = vars(owner).get(name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)


class SharedPatch:
    """A method that is replaced while any thread has a listener for it.

    Listeners are counted, not nested: the contexts of two threads may end in any order.
    """

    def __init__(self, name: str, replacement: Callable[[Callable[..., Any], list[Any]], Any]) -> None:
        """replacement(method, listeners): returns the replacement; listeners is kept current, the latest one last."""
        self._name, self._replacement = name, replacement
        self._listeners: list[Any] = []
        self._lock = threading.Lock()
        self._made: tuple[Any, Any] | None = None  # the original and what replaces it, always the same for the compiler

    @contextmanager
    def listening(self, owner: Any, listener: Any) -> Iterator[None]:
        """Within the context the owner's method, or a module's function, is replaced for this listener among others."""
        with self._lock:
            if not self._listeners:
                original = vars(owner)[self._name]
                if self._made is None or self._made[0] is not original:
                    self._made = original, self._replacement(getattr(owner, self._name), self._listeners)
                setattr(owner, self._name, self._made[1])
            self._listeners.append(listener)
        try:
            yield
        finally:
            with self._lock:
                self._listeners.remove(listener)
                if not self._listeners and self._made is not None:
                    setattr(owner, self._name, self._made[0])
