"""Which operators read what a step saves, and what that decides.

[Note: readers] A pack hook is not told which operator saves. The graph shows it once the operator has run: the node of
its result holds, in each saved attribute, what the hook returned. So in an observed step a tensor whose readers are not
known is held as it is, until a node shows who reads it; then it is rounded, or kept exactly where backward_rules.py
says so, and that is remembered by its name. Nodes are reached from the results and operands of every function call
and from the tensors that are saved next, so operators inside of composites, and inside of torch.jit, are seen as well.
An operator with a pole shows only after those that compute its operand, so what these save is decided about a few
nodes later. That would make the first step of a job its worst. But a measurement comes before it, and has shown the
readers of the same operators. So what is known by then does not wait in it; what turns out to be below a pole all the
same is kept exactly in later steps.
Where torch.compile forbids to watch operators, what is left tells in backward who reads it.
Another operator may save the same memory later. Its handle is a view of what is stored; if it must not be rounded, the
memory, which is still alive at that moment, replaces what was rounded. In a step that is not observed, a view at a
place that no observed step has shown is kept exactly too, and the next step is observed. What is still unread when an
observed forward is over stays exact. The graphs of TorchScript do not show who reads what they save: it is rounded if
no operator in them has a rule.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from .._torch_internals import (
    SHOWS_SAVED,
    hides_saved,
    node_in_backward,
    node_of,
    operators_of_script,
    runs_transform,
    saved_handles,
)
from .backward_rules import (
    BESIDE,
    Rule,
    below_pole,
    has_rule,
    may_be_below_pole,
    multiplies_pole,
    rule_of,
    rule_of_any,
)
from .handles import Distributed, Stored, View, stored_of
from .known_roles import KnownRoles, Place
from .roles import Role, nodes_of
from .sinks import Captured, Sink

_NOTHING = torch.empty(0, device="cpu")
_DELAY = 8
"""nodes after which it is known what reads the result of one"""


@dataclass(eq=False)
class Saved:
    """A saved tensor whose reader is about to show."""

    handle: Any
    """what the graph holds"""
    stored: Any
    """what that is, or is a view of"""
    captured: Captured
    place: Place
    view: View | None = None
    """where it lies in what another tensor stored"""
    made_by: tuple[int, str] | None = None
    """the key of the node that made it"""
    is_known: bool = False
    """whether an earlier forward has shown that it may be rounded"""


@dataclass(eq=False)
class _Read:
    """What one node saved, and the rules for it."""

    node: Any
    saved: list[tuple[Saved, Rule | None]]
    rounded: list[Saved] = field(default_factory=list)
    """what was decided about at once, without the tensors"""


class Readers:
    """Finds the readers of what one forward saves. See [Note: readers]."""

    def __init__(self, roles: KnownRoles, sink: Sink, *, trusts_known: bool = False) -> None:
        """trusts_known: what is known to be rounded does not wait until a pole above it would show."""
        self._roles, self._sink, self._trusts_known = roles, sink, trusts_known
        self._waiting: dict[int, Saved] = {}
        self._held: set[int] = set()
        self._recent: deque[_Read] = deque()
        self._finished = False
        self._seen: set[tuple[int, str]] = set()
        self._without_rules: set[tuple[int, str]] = set()  # graphs of TorchScript
        self._without_target: dict[int, Saved] = {}  # log-softmaxes of which nothing is picked yet, by what is stored
        self._new_aliases: set[tuple[str, Place]] = set()  # that no earlier forward has shown

    def wait(self, saved: Saved, held: bool = False) -> None:
        """Decide about a saved tensor as soon as its reader shows. held: it is not encoded before."""
        if held:
            self._held.add(id(saved.stored))
        node = node_of(saved.captured.tensor)
        saved.made_by = None if node is None else _key(node)
        saved.is_known = self._trusts_known and self._may_be_rounded(saved)
        # what is recorded is settled by name when the forward is over
        self._waiting[id(_inner(saved.handle))] = _without_tensor(saved) if self._sink.records else saved

    def _may_be_rounded(self, saved: Saved) -> bool:
        """Whether that is known of a saved tensor from an earlier forward."""
        name, place = saved.captured.name, _of_any_instruction(saved.place)
        if self.holds(saved.stored) or self._roles.by_name.get(name) is not Role.ACTIVATION:
            return False
        if saved.view is None:
            return True
        if self._roles.alias_role(name, place) is None:
            self._new_aliases.add((name, place))
        return (name, place) not in self._new_aliases

    @property
    def is_done(self) -> bool:
        """Whether the forward ran operators, and to its end."""
        return self._finished and bool(self._seen)

    def holds(self, stored: Any) -> bool:
        """Whether it is not encoded yet."""
        return id(stored) in self._held

    def examine(self, value: Any) -> None:
        """Look at all nodes that made the tensors in a value, and were not looked at before. value: what a function
        has returned, which has no nodes of its own where graphs are off."""
        if torch.is_grad_enabled():
            self._examine(nodes_of(value))

    def examine_operands(self, value: Any) -> None:
        """The same for what goes into a function, except views: the node of its result leads to theirs.

        To ask a view for its node after its memory was modified has torch make that anew, earlier than it would
        otherwise: gradients would be added up in another order.
        """
        self._examine(nodes_of(value, of_views=False))

    def examine_below(self, tensor: Tensor) -> None:
        """The same while a tensor is being saved: its own node may not have saved everything yet."""
        if tensor.grad_fn is not None:
            self._examine(below for below, _ in tensor.grad_fn.next_functions if below is not None)

    def decide_all(self) -> None:
        """Before a backward: what it reads is what later ones will read."""
        while self._recent and not runs_transform():
            self._decide(self._recent.popleft())

    def _examine(self, roots: Iterable[Any]) -> None:
        if runs_transform():  # no tensor can be encoded in it
            return
        nodes = self._new_nodes(roots)
        self._note_scripts([node for node in nodes if hides_saved(node)])
        for node in nodes:
            self._note(node)
        while len(self._recent) > _DELAY:
            self._decide(self._recent.popleft())

    def _note_scripts(self, nodes: list[Any]) -> None:
        """What TorchScript's graphs save may be rounded if no operator in them has a rule."""
        operators = operators_of_script(len(nodes)) if nodes else None
        if operators is not None and not any(map(has_rule, operators)):
            self._without_rules.update(map(_key, nodes))

    def _note(self, node: Any) -> None:
        """What a node saved is decided about when the operators after it have been seen."""
        read = _Read(node, [])
        if SHOWS_SAVED:
            for slot, handle in saved_handles(node):
                saved = self._waiting.pop(id(_inner(handle)), None)
                if saved is not None:
                    read.saved.append((saved, rule_of(node, slot) or (BESIDE if multiplies_pole(node, slot) else None)))
        else:
            rule = rule_of_any(node)
            read.saved += [(saved, rule) for saved in self._waiting.values()]
            self._waiting.clear()
        if may_be_below_pole(node) or "Attention" in node.name():  # whose logsumexp is fitted after q and k are rounded
            self._decide_known(read)
            self._recent.append(read)
        else:
            self._decide(read)
        for below in below_pole(node):
            for other in self._recent:
                if other.node is below:
                    other.saved = [(saved, rule or BESIDE) for saved, rule in other.saved]
                    self._learn_late(other.rounded)

    def finish(self, learns: bool, complete: bool = True) -> None:
        """When the forward is over, what nobody was seen to read stays exact.

        learns: in later steps as well. complete: all operators were seen; if not, the backward shows who reads.
        """
        self._finished = True
        self.decide_all()
        self._waiting.update(self._without_target)
        for saved in self._waiting.values():
            if not complete and self._is_known(saved):
                continue
            if saved.made_by in self._without_rules:
                self._decide_one(saved, Role.ACTIVATION)
                continue
            if learns and complete:
                self._roles.learn(saved.captured.name, saved.place, Role.STATISTIC)
            elif learns and isinstance(saved.stored, Stored):
                saved.stored.on_restore = ReadInBackward(self._roles, saved.stored.on_restore, saved)
            if saved.view is not None:
                self._sink.keep_exactly(saved.view, saved.captured)
            else:
                self._settle(saved, Role.STATISTIC)
        self._waiting.clear()

    def _is_known(self, saved: Saved) -> bool:
        """Whether an earlier backward has shown its reader."""
        name, is_held = saved.captured.name, id(saved.stored) in self._held
        return not is_held and (saved.view is None or self._roles.alias_role(name, saved.place) is not None)

    def _new_nodes(self, roots: Iterable[Any]) -> list[Any]:
        """In the order in which they were made."""
        found, reached = [], list(roots)
        while reached:
            node = reached.pop()
            key = _key(node)
            if key in self._seen:
                continue
            self._seen.add(key)
            found.append(node)
            reached += [below for below, _ in node.next_functions if below is not None]
        return sorted(found, key=lambda node: node._sequence_nr())

    def _decide(self, read: _Read) -> None:
        for saved, rule in read.saved:
            role = self._roles.role_for(read.node, saved.captured.name, rule)
            if rule is not None and role is Role.STATISTIC:
                self._roles.reasons[saved.captured.name] = rule.reason
            if role is Role.LOG_SOFTMAX and saved.view is None:
                self._without_target[id(saved.stored)] = saved
            else:
                self._decide_one(saved, role)
        self._sink.after(read.node)

    def _decide_known(self, read: _Read) -> None:
        """About what need not wait."""
        for saved, rule in read.saved:
            if saved.is_known and rule is None:
                self._decide_one(saved, Role.ACTIVATION)
                read.rounded.append(_without_tensor(saved))
        read.saved = [(saved, rule) for saved, rule in read.saved if not saved.is_known or rule is not None]

    def _learn_late(self, rounded: Iterable[Saved]) -> None:
        """What is rounded in this step is to be exact in later ones."""
        for saved in rounded:
            name = saved.captured.name
            if saved.view is not None:
                self._roles.learn_alias(name, saved.place, Role.STATISTIC)
            self._roles.by_name[name] = Role.STATISTIC

    def _decide_one(self, saved: Saved, role: Role) -> None:
        if saved.view is not None:
            self._decide_alias(saved, saved.view, role)
        else:
            self._settle(saved, self._with_others(saved, role))

    def _with_others(self, saved: Saved, role: Role) -> Role:
        """The role that a tensor has if it must serve other readers too, as far as they are known."""
        name = saved.captured.name
        if self._roles.by_name.get(name) is Role.STATISTIC:
            role = Role.STATISTIC
        self._roles.learn(name, saved.place, role)
        return role

    def _settle(self, saved: Saved, role: Role) -> None:
        if id(saved.stored) in self._held:
            self._held.discard(id(saved.stored))
            self._sink.encode_held(saved.stored, saved.captured._replace(role=role))
        elif role is Role.STATISTIC:
            self._sink.keep_exactly(View(saved.stored, saved.captured.tensor, 0), saved.captured)

    def _decide_alias(self, saved: Saved, view: View, role: Role) -> None:
        captured = saved.captured
        self._roles.learn_alias(captured.name, saved.place, role)
        base = self._without_target.pop(id(view.base), None)
        if base is not None:
            self._settle(base, self._with_others(base, role))
        if role is Role.STATISTIC:
            self._roles.by_name[captured.name] = Role.STATISTIC
            if id(saved.stored) not in self._held:  # else it is kept exactly when its own reader shows
                self._sink.keep_exactly(view, captured)


class ReadInBackward:
    """Learns from a backward who reads a tensor that no operator of the forward was seen to read."""

    def __init__(self, roles: KnownRoles, before: Any, saved: Saved) -> None:
        self._roles, self._before = roles, before
        self._name, self._place, self._is_view = saved.captured.name, saved.place, saved.view is not None

    def __call__(self, stored: Stored) -> None:
        if self._before is not None:
            self._before(stored)
        node = node_in_backward()
        if node is None:
            return
        slots = [slot for slot, handle in saved_handles(node) if stored_of(handle) is stored]
        rule = next((rule for slot in slots if (rule := rule_of(node, slot)) is not None), None)
        if rule is None and any(multiplies_pole(node, slot) for slot in slots):
            rule = BESIDE
        role = self._roles.role_for(node, self._name, rule)
        if role is Role.LOG_SOFTMAX and not self._is_view:
            return  # whether anything is picked from it, its other reader tells
        if role is Role.LOG_SOFTMAX and self._roles.by_name.get(self._name) is not Role.STATISTIC:
            self._roles.learn(self._name, self._place, role)
        if role is Role.STATISTIC:
            self._roles.learn(self._name, self._place, role)
        elif self._is_view:
            self._roles.learn_alias(self._name, self._place, role)
        elif slots and self._roles.by_name.get(self._name) is not Role.STATISTIC:
            self._roles.learn(self._name, self._place, role)


def _of_any_instruction(place: Place) -> Place:
    return (*place[:2], None)


def _without_tensor(saved: Saved) -> Saved:
    """The same of a tensor that is not to be kept alive."""
    return replace(saved, captured=saved.captured._replace(tensor=_NOTHING, whole=None))


def _key(node: Any) -> tuple[int, str]:
    return node._sequence_nr(), node.name()


def _inner(handle: Any) -> Any:
    return handle.local if isinstance(handle, Distributed) else handle
