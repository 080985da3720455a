"""A way through the graph that each step makes anew: how to get from one node to another, if the graph is as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

_MOST_NODES = 64


class Way(NamedTuple):
    """From a node to what is behind it."""

    steps: tuple[tuple[Any, int], ...]
    """(type of a node, number of the edge to follow)"""
    last: Any
    """the type of the node where it ends; that of None if it ends where there is no graph"""
    blanks: tuple[tuple[int, Any], ...] = ()
    """(number of a node on it, the first 0; a key that its metadata must not have)"""

    def follow(self, node: Any) -> list[Any] | None:
        """The nodes on it, the one where it ends last; None if they are others."""
        nodes = [node]
        for kind, number in self.steps:
            if type(nodes[-1]) is not kind:
                return None
            nodes.append(nodes[-1].next_functions[number][0])
        return nodes if type(nodes[-1]) is self.last else None


def find_way(node: Any, is_end: Callable[[Any], bool], behind: Callable[[Any], list[Any]] | None = None) -> Way | None:
    """The shortest way from a node to one that is_end() accepts, which may be None: no graph. None if there is none.

    behind: of a node, those whose edges may be followed; else all.
    """
    pending: list[tuple[Any, tuple[tuple[Any, int], ...]]] = [(node, ())]
    for found, steps in pending:
        if is_end(found):
            return Way(steps, type(found))
        if found is None or len(pending) > _MOST_NODES:
            continue
        allowed = None if behind is None else behind(found)
        for number, (below, _) in enumerate(found.next_functions):
            if allowed is None or any(below is one for one in allowed):
                pending.append((below, (*steps, (type(found), number))))
    return None
