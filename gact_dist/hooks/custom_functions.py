"""What a torch.autograd.Function of the user's saves beside its inputs, and when its inputs must be exact as well.

[Note: custom functions] Nobody knows what the backward of such a function computes from what it saved. Its inputs are
operands like any other. What it made itself is kept exactly: its result, and what it computed on the way (a logsumexp,
a norm, a normalised copy). A backward that reads something computed on the way together with several inputs, as that of
a fused attention does, needs them to fit together: exp(q k^T - logsumexp) of rounded q and k is off by a factor that
grows exponentially. Then the inputs are kept exactly too. With a single input that does not happen: norms, activations
and losses read a statistic of it, and rounding it is as safe as in the operators of torch that do the same.
A function of several inputs has them kept exactly in the first step that meets it, and is judged when that is over.

A function may save a view of an input that it has made itself, without a graph, as wrappers of kernels do that take
matrices. Nothing shows whether the memory holds the input still: some losses write the gradient over it. So it is kept
exactly, unless the function turns out to give the same when it runs again on copies of its inputs.

For a fused attention of the user's own this means that its queries, keys, values and result are not compressed, unless
it runs again on its rounded inputs ([Note: functions again] in functions_again.py); those of torch's
scaled_dot_product_attention are, see fused_attention.py.
"""

import logging
from typing import Any

from torch import Tensor

from .._torch_internals import storage_id
from ..distributed import say
from .function_calls import FunctionCall
from .functions_again import FunctionsAgain
from .roles import Role, role_of_itself

_log = logging.getLogger(__name__)


class CustomFunctions:
    """Finds what calls of custom functions may have rounded. See [Note: custom functions]."""

    def __init__(self, roles: dict[str, Role], again: FunctionsAgain | None = None) -> None:
        """roles: by name, with a name for each place that calls such a function. again: those that may run again."""
        self._roles, self._again = roles, again
        self._call: Any = None  # its identity
        self._names: list[str] = []
        self._combines = self._is_large = False
        self._met: set[str] = set()
        self._saved: set[str] = set()  # names of inputs
        self._viewing: set[str] = set()  # places of functions that save views of their inputs
        self._said: set[str] = set()  # names of functions: a model calls one in every layer
        self._proposed: set[str] = set()  # places of functions that may run again from the next forward on

    def role(
        self, tensor: Tensor, name: str, role: Role | None, call: FunctionCall | None, place: str, recording: bool
    ) -> Role | None:
        """The role of a tensor that is being saved, where without a custom function it would have this one.

        call: None if something else is saving. place: the name of that call's place. recording:
        roles are looked at when the forward is over.
        """
        identity = None if call is None else call.identity
        if identity is not self._call:
            self._enter(identity)
        if call is None or not (tensor.is_floating_point() or tensor.is_complex()):
            return role
        operand = self.operand(tensor, call)
        if operand is None:
            self._combines |= tensor.grad_fn is None and tensor.numel() > 1
            self._judge(place, call, recording)
            return None if role is None else Role.STATISTIC
        if role is Role.STATISTIC and role_of_itself(tensor) is None and role_of_itself(operand) is Role.ACTIVATION:
            is_known = place in self._viewing
            self._viewing.add(place)
            self._try_again(place, call, "it saves views of its inputs that show no graph", not recording, is_known)
        self._names.append(name)
        self._saved.add(name)
        self._is_large |= role is not None
        self._judge(place, call, recording)
        if role is not Role.ACTIVATION or not self.needs_exact(tensor, call, place):
            return role
        return role if recording and place not in self._roles else Role.STATISTIC

    def leave(self) -> None:
        """Something else than such a call is saving."""
        if self._call is not None:
            self._enter(None)

    def _enter(self, identity: Any) -> None:
        self._call, self._names, self._combines, self._is_large = identity, [], False, False

    def needs_exact(self, tensor: Tensor, call: FunctionCall, place: str) -> bool:
        """Whether an input of a call must not be rounded, as far as is known."""
        known = self._roles.get(place)
        if known is not None:
            return known is Role.STATISTIC
        operand = self.operand(tensor, call)
        several = operand is not None and (call.inputs() > 1 or tensor.numel() < operand.numel())
        if several:
            self._met.add(place)
        return several

    @staticmethod
    def operand(tensor: Tensor, call: FunctionCall) -> Tensor | None:
        """The argument of a call whose memory a tensor shares."""
        storage = storage_id(tensor)
        return next((operand for operand in call.operands() if storage_id(operand) == storage), None)

    def forget_inputs(self) -> None:
        """Functions are called in another way from now on: what else their inputs' lines save has these names then."""
        for name in self._saved:
            self._roles.pop(name, None)
        self._saved.clear()

    def forget_step(self) -> None:
        """At the end of a step: what was met in it is judged."""
        for place in self._met:
            self._roles.setdefault(place, Role.ACTIVATION)
        self._met.clear()
        self._call = None

    def _judge(self, place: str, call: FunctionCall, recording: bool) -> None:
        if not self._combines or len(self._names) < 2:
            return
        is_known = self._roles.get(place) is Role.STATISTIC
        reason = "it combines its inputs with what it computed from them"
        self._try_again(place, call, reason, not recording and self._is_large, is_known)
        self._roles[place] = Role.STATISTIC
        self._roles.update(dict.fromkeys(self._names, Role.STATISTIC))

    def _try_again(self, place: str, call: FunctionCall, reason: str, proposes: bool, is_known: bool) -> None:
        """What a call saves is kept exactly, for a reason, unless its function can run again.

        proposes: whether that is to be tried. is_known: whether the call was met before.
        """
        again = self._again
        if again is not None and proposes:
            again.propose(call.function, place)
        if again is not None and again.may_follow(call.function):
            self._proposed.add(place)
        elif not is_known or place in self._proposed:
            level = logging.DEBUG if call.name in self._said else logging.INFO
            say(
                _log,
                "%s is kept exactly: %s. Under a checkpoint of its own, checkpoint(%s.apply, ..., "
                "use_reentrant=False), it keeps its inputs alone, in few bits",
                place,
                reason,
                call.name,
                level=level,
            )
            self._said.add(call.name)
            self._proposed.discard(place)
