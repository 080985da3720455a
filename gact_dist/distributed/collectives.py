"""What ranks tell each other: the mean of their statistics, that they hold the same plan, and that one has failed.

The only file of the package that calls collectives. Before any of them all ranks meet() in the process group's store,
which takes none. An adaptation takes one to learn that no rank failed, two for the statistics and one for the plan. A
budget in bytes takes three more, the gradients of examples two; an error bound takes three for each plan that is tried
and three for each draw of the gradient. No other step has any. Without torch.distributed, or in a group of one rank,
the results are the same without a collective.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from .._errors import first_line, is_out_of_memory

_T = TypeVar("_T")

_DIGEST_BYTES = 8
_KEYS = "gact_dist"
_MOST_FACTS = 3


class PlanMismatchError(RuntimeError):
    """Ranks of one data-parallel group hold different plans, or settings that lead to them; raised on all of them."""


@dataclass(frozen=True, eq=False)
class Statistics:
    """Statistics of L tensors over the ranks of a group, bitwise the same on all of them.

    names: the union over ranks, in order of first appearance with rank 0 first. mean: float64 [L, K] on the CPU, over
    the valid ranks; NaN where there is none. valid_ranks: int64 [L], how many ranks went into the mean. invalid:
    name -> number of ranks whose row was left out; only names that have one.
    """

    names: tuple[str, ...]
    mean: torch.Tensor
    valid_ranks: torch.Tensor
    invalid: dict[str, int]


def data_parallel_group(process_group: ProcessGroup | DeviceMesh | None) -> ProcessGroup | None:
    """The process group to agree over; None is the default group, a mesh of one dimension is its group.

    Raises ValueError for a mesh of several dimensions, TypeError for anything else.
    """
    if process_group is None or isinstance(process_group, ProcessGroup):
        return process_group
    if not isinstance(process_group, DeviceMesh):
        raise TypeError(
            f"process_group is a {type(process_group).__name__}; expected a ProcessGroup, a DeviceMesh of one "
            "dimension, or None for the default group"
        )
    if process_group.ndim != 1:
        raise ValueError(
            f"process_group is a DeviceMesh of {process_group.ndim} dimensions {process_group.mesh_dim_names}; "
            'expected the data-parallel one alone: pass mesh["dp"], with the name you gave that dimension; where '
            'all of them are data-parallel (HSDP), mesh._flatten("dp"), or leave it out if they are all ranks'
        )
    return process_group.get_group()


def data_parallel_groups(process_group: Any, tensor_parallel: list[Any]) -> list[Any]:
    """The data-parallel group in a list, which is empty where every rank belongs to one tensor-parallel group."""
    if process_group is None and tensor_parallel:
        if math.prod(world_size(group) for group in tensor_parallel) == world_size():
            return []
        raise ValueError(
            "the model's parameters are split over a tensor-parallel mesh and process_group was not given, expected "
            'the data-parallel part of that mesh: attach(model, process_group=mesh["dp"]), with the name you gave it'
        )
    return [data_parallel_group(process_group)]


def rank(group: ProcessGroup | None = None) -> int:
    """This process's rank in the group; 0 when torch.distributed is not initialised."""
    return dist.get_rank(group) if _member(group) else 0


def is_first(groups: Sequence[Any]) -> bool:
    """Whether this rank is the one of these groups that says what all of them have agreed on."""
    return all(rank(group) == 0 for group in groups)


def world_size(group: ProcessGroup | None = None) -> int:
    """Ranks in the group; 1 when torch.distributed is not initialised."""
    return dist.get_world_size(group) if _member(group) else 1


def all_ranks(condition: bool, group: ProcessGroup | None = None) -> bool:
    """Whether a condition holds on all ranks of the group. Collectives: one all_reduce of 4 bytes."""
    if world_size(group) == 1:
        return condition
    holds = torch.tensor(int(condition), dtype=torch.int32, device=_collective_device(group))
    with _explained():
        dist.all_reduce(holds, dist.ReduceOp.MIN, group=group)
    return bool(holds.item())


def any_rank(conditions: Sequence[bool], groups: Sequence[ProcessGroup | None]) -> list[bool]:
    """Which of some conditions hold on any rank of the groups. Collectives in each group: one all_reduce."""
    holds = torch.tensor(conditions, dtype=torch.int32, device="cpu")
    for group in groups:
        holds = _reduced(holds, dist.ReduceOp.MAX, group)
    return [bool(value) for value in holds.tolist()]


def least_of_ranks(value: float, groups: Sequence[ProcessGroup | None]) -> float:
    """The least of a value on all ranks of the groups. Collectives in each group: one all_reduce."""
    least = torch.tensor([value], dtype=torch.float64, device="cpu")
    for group in groups:
        least = _reduced(least, dist.ReduceOp.MIN, group)
    return least.item()


def meet(groups: Sequence[ProcessGroup | None], doing: str, facts: Mapping[str, str]) -> bool:
    """Wait until all ranks of the groups are here to do the same, in the same way.

    [Note: meeting] Ranks of which one has another policy, no loss function or an older library would call different
    collectives, and those of the job's wrapper with ours: a message that says nothing, numbers that are wrong, or a
    process that is aborted. So they meet before, in the store that the process group was made with, where waiting
    disturbs nobody. The last to come compares what all of them say and tells the others. A few messages a rank, and
    no collective. A rank that does not come is waited for as long as the group waits for any collective.

    doing: what follows, as the error message names it. facts: name -> value, the same on all ranks.
    Returns False on every rank that has come if another called leave() instead.
    Raises PlanMismatchError on every rank if the facts differ, RuntimeError if a rank does not come in time.
    """
    for group in groups:
        store = _store_of(group) if world_size(group) > 1 else None
        if store is not None and not _Meeting(store, group, doing).hold(facts):
            return False
    return True


def leave(groups: Sequence[ProcessGroup | None]) -> None:
    """In place of the next meeting of the first group, to which this rank will not come: those who do are told.

    Waits for nobody. Each rank comes to a meeting or leaves it.
    """
    for group in groups[:1]:
        store = _store_of(group) if world_size(group) > 1 else None
        if store is not None:
            _Meeting(store, group, "leaving").leave()


def can_meet(groups: Sequence[ProcessGroup | None]) -> bool:
    """Whether the ranks of the groups have a store to meet in."""
    return all(world_size(group) == 1 or _store_of(group) is not None for group in groups)


_ALIKE, _DIFFERING, _ABSENT, _LEFT = "alike", "differing", "absent", "left"  # verdicts


class _Meeting:
    """See [Note: meeting]."""

    def __init__(self, store: Any, group: ProcessGroup | None, doing: str) -> None:
        self._store, self._doing = store, doing
        self._me, self._size = rank(group), world_size(group)
        self._ranks = dist.get_process_group_ranks(group)
        self._timeout = _timeout_of(group)

    def hold(self, facts: Mapping[str, str]) -> bool:
        """Meet, and raise what the ranks found out; False if a rank has left."""
        with self._reaching_the_store():
            place, all_here = self._come({"what they do": self._doing, **facts})
            if not all_here and not _waited_for(self._store, f"{place}/verdict", self._timeout):
                self._tell(place, _ABSENT, self._describe_absent(place))
            verdict, text = json.loads(self._store.get(f"{place}/verdict"))
        if verdict == _DIFFERING:
            raise PlanMismatchError(text)
        if verdict == _ABSENT:
            raise RuntimeError(text)
        return verdict == _ALIKE

    def leave(self) -> None:
        """Be there for the others to see that this rank has left."""
        with self._reaching_the_store():
            self._come(None)

    @contextmanager
    def _reaching_the_store(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # the store's own
            raise RuntimeError(
                f"{self._doing}: the ranks' store cannot be reached ({first_line(error)}); the rank that holds it has "
                "probably ended"
            ) from error

    def _come(self, says: Mapping[str, str] | None) -> tuple[str, bool]:
        """(the keys' prefix, whether all ranks are here). The last one leaves a verdict. says: None if it has left."""
        store = self._store
        number = store.add(f"{_KEYS}/meetings/{self._me}", 1)
        place = f"{_KEYS}/{number}"
        store.set(self._key(place, self._me), json.dumps(says))
        all_here = store.add(f"{place}/here", 1) == self._size
        if all_here:
            said = [json.loads(text) for text in store.multi_get(self._keys(place))]
            text = "" if None in said else _describe_facts(self._doing, said, self._ranks)
            self._tell(place, _LEFT if None in said else _DIFFERING if text else _ALIKE, text)
            self._clear(f"{_KEYS}/{number - 1}")
        return place, all_here

    def _tell(self, place: str, verdict: str, text: str) -> None:
        """Leave a verdict, unless another rank has left one. text: of the error."""
        self._store.compare_set(f"{place}/verdict", "", json.dumps([verdict, text]))

    def _describe_absent(self, place: str) -> str:
        absent = [who for member, who in enumerate(self._ranks) if not self._store.check([self._key(place, member)])]
        return (
            f"{self._doing}: rank{'s' * (len(absent) > 1)} {', '.join(map(str, absent))} did not come within "
            f"{self._timeout.total_seconds():g} s, which is how long the process group waits. A rank has ended or is "
            "slow, or went another way: step() without a loss function, another level or policy, a batch left out"
        )

    def _clear(self, place: str) -> None:
        """Remove a meeting that every rank has left."""
        if self._store.check([f"{place}/here"]):
            for key in (*self._keys(place), f"{place}/here", f"{place}/verdict"):
                self._store.delete_key(key)

    def _keys(self, place: str) -> list[str]:
        return [self._key(place, member) for member in range(self._size)]

    @staticmethod
    def _key(place: str, member: int) -> str:
        return f"{place}/rank/{member}"


def raises_on_all(groups: Sequence[ProcessGroup | None], doing: str) -> AbstractContextManager[None]:
    """Within the context this rank works alone; if that raises on any rank of the groups, every rank raises at its end.

    groups: process groups in turn, the same number of them on every rank (data-parallel, then tensor-parallel).
    doing: what the ranks do in it; the error message begins with this ("measuring the sensitivities").
    A rank that failed re-raises its own error; the others raise RuntimeError, which names the ranks that failed and
    what they raised. A KeyboardInterrupt or SystemExit ends this rank at once, without telling the others.
    Collectives in each group, at the end: one all_reduce of 4 bytes; the errors' texts travel only if there are any.
    """
    return _RaisesOnAll(groups, doing)


class _RaisesOnAll(AbstractContextManager[None]):
    def __init__(self, groups: Sequence[ProcessGroup | None], doing: str) -> None:
        self._groups, self._doing = groups, doing

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None and not isinstance(error, Exception):
            return
        failures = self._failures({} if error is None else {rank(): f"{type(error).__qualname__}: {error}"})
        if failures and error is None:
            raise RuntimeError(
                f"{self._doing} failed on other ranks, and no rank goes on without them: "
                f"{_ranks_by_value(failures.values(), list(failures))}"
            )

    def _failures(self, known: dict[int, str]) -> dict[int, str]:
        """Global rank -> what it raised, for all ranks in the groups, in order of rank."""
        for group in self._groups:
            if world_size(group) > 1 and not all_ranks(not known, group):
                known = {who: text for failures in _gather_objects(known, group) for who, text in failures.items()}
        return dict(sorted(known.items()))


def reduce_statistics(names: Sequence[str], values: torch.Tensor, *, group: ProcessGroup | None = None) -> Statistics:
    """Mean of each named row over the ranks of the group that have a valid one.

    names: L distinct names; ranks may have seen different tensors. values: [L, K], the same K >= 1 on all ranks. A row
    with NaN, -inf, or +inf in its last column is invalid and left out; +inf in another column means "this width must
    not be used" and stays +inf in the mean. A row that a rank lacks counts there as neither.
    Collectives: one all_gather of 8 bytes and one all_reduce; only when the names differ, the names as well.
    Raises ValueError when names and values do not fit together, or ranks differ in K.
    """
    if values.ndim != 2 or values.shape[1] < 1 or len(values) != len(names) or len(set(names)) != len(names):
        raise ValueError(
            f"got {len(names)} names, {len(set(names))} of them distinct, and values of shape {tuple(values.shape)}; "
            "expected values [L, K] with one distinct name a row and K >= 1"
        )
    values = values.detach().to(device="cpu", dtype=torch.float64)
    columns = values.shape[1]
    union = _union_of_names(tuple(names), columns, group)
    sums = _reduced(_with_flags(names, values, union), dist.ReduceOp.SUM, group)
    valid_ranks, invalid_ranks = sums[:, columns].long(), sums[:, columns + 1].long()
    return Statistics(
        names=union,
        mean=sums[:, :columns] / valid_ranks.unsqueeze(1),
        valid_ranks=valid_ranks,
        invalid={name: count for name, count in zip(union, invalid_ranks.tolist(), strict=True) if count},
    )


def reduce_over(names: Sequence[str], values: torch.Tensor, groups: Sequence[ProcessGroup | None]) -> Statistics:
    """reduce_statistics over several groups, one after the other: the mean over a grid of ranks, the same on all."""
    statistics = Statistics(tuple(names), values, torch.ones(len(values), dtype=torch.int64, device="cpu"), {})
    invalid: dict[str, int] = {}
    for group in groups:
        statistics = reduce_statistics(statistics.names, statistics.mean, group=group)
        invalid = {**statistics.invalid, **invalid}
    return replace(statistics, invalid=invalid)


def max_over_groups(
    names: Sequence[str], values: torch.Tensor, groups: Sequence[ProcessGroup | None]
) -> tuple[tuple[str, ...], torch.Tensor]:
    """(names, values) with the union of the ranks' names and the largest value of each, over several groups in turn.

    names: L distinct names. values: [L, K] numbers of at least 0, the same K on all ranks; a name that a rank lacks
    counts there as 0. Collectives in each group: one all_gather of 8 bytes and one all_reduce; only when the names
    differ, the names as well.
    """
    union = tuple(names)
    values = values.detach().to(device="cpu", dtype=torch.float64)
    for group in groups:
        known = dict(zip(union, values, strict=True))
        union = _union_of_names(union, values.shape[1], group)
        nothing = torch.zeros(values.shape[1], dtype=torch.float64, device="cpu")
        values = torch.stack([known.get(name, nothing) for name in union]) if union else values
        values = _reduced(values, dist.ReduceOp.MAX, group)
    return union, values


def mean_of_positive(values: torch.Tensor | None, groups: Sequence[ProcessGroup | None]) -> torch.Tensor | None:
    """float [N]: the mean of each value over the ranks that have one above 0, over several groups in turn; None if no
    rank has any.

    values: [N], which may be shorter or None on some ranks. Collectives in each group: an all_reduce of 8 bytes, and
    one of 2 N values.
    """
    for group in groups:
        length = torch.tensor([[0 if values is None else len(values)]], dtype=torch.int64, device="cpu")
        longest = int(_reduced(length, dist.ReduceOp.MAX, group))
        if longest == 0 or world_size(group) == 1:
            continue
        rows = torch.zeros(2, longest, device="cpu")
        if values is not None:
            rows[0, : len(values)] = values
            rows[1] = rows[0] > 0
        total, ranks = _reduced(rows, dist.ReduceOp.SUM, group)
        mean = total / ranks.clamp(min=1)
        values = mean if values is None else mean.to(values.device)
    return values


def check_agreement(plan: Mapping[str, int | tuple[int, ...] | None], *, group: ProcessGroup | None = None) -> str:
    """Hex digest of the plan's names and bits, in whatever order, once every rank of the group is known to share it.

    plan: name -> bits, where None and 0 both mean exact, or the widths of equal shares of its examples.
    Collectives: one all_gather of 8 bytes; the plans themselves travel only when the digests differ.
    Raises PlanMismatchError on every rank, naming the ranks that agree with one another and the first tensor, by
    name, whose bits differ.
    """
    entries = {name: bits if isinstance(bits, tuple) else int(bits or 0) for name, bits in sorted(plan.items())}
    digest = _digest(tuple(entries.items()))
    digests = _gather_digests(digest, group)
    if len(set(digests)) > 1:
        plans = _gather_objects(entries, group)
        raise PlanMismatchError(_describe_mismatch(digests, plans, dist.get_process_group_ranks(group)))
    return digest.hex()


def _member(group: ProcessGroup | None) -> bool:
    """Whether there is a group at all; ValueError when there is one and this process is not in it."""
    if not (dist.is_available() and dist.is_initialized()):
        return False
    if dist.get_rank(group) < 0:
        raise ValueError(
            f"rank {dist.get_rank()} is not in the given process group of ranks "
            f"{dist.get_process_group_ranks(group)}; pass the data-parallel group that this rank belongs to"
        )
    return True


def _collective_device(group: ProcessGroup | None) -> torch.device:
    """Where the group's backend wants its tensors: the CPU if it serves it, else the current accelerator.

    Tested with gloo; the nccl branch has not run yet.
    """
    served = [entry.split(":")[0] for entry in dist.get_backend_config(group).split(",")]
    if "cpu" in served:
        return torch.device("cpu")
    return torch.device(served[0], torch.accelerator.current_device_index())


def _store_of(group: ProcessGroup | None) -> Any:
    """The store that a group was made with; None for a backend without one."""
    if "fake" in dist.get_backend(group):
        return None
    of_group: Any = dist.group.WORLD if group is None else group
    try:
        return of_group.get_group_store()
    except RuntimeError:  # none was set, as with MPI
        return None


def _timeout_of(group: ProcessGroup | None) -> timedelta:
    """How long a group waits for a collective."""
    of_group: Any = dist.group.WORLD if group is None else group
    found = getattr(of_group._get_backend(_collective_device(group)).options, "_timeout", None)
    return found or dist.default_pg_timeout


def _waited_for(store: Any, key: str, timeout: timedelta) -> bool:
    """Whether a key appeared in time. Raises RuntimeError if the store is gone."""
    try:
        store.wait([key], timeout)
    except RuntimeError:  # of a timeout, or because the store is gone
        return store.check([key])
    return True


@contextmanager
def _explained() -> Iterator[None]:
    """A collective that fails says what that may mean."""
    try:
        yield
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        raise RuntimeError(
            f"a collective of gact_dist failed ({first_line(error)}): another rank has ended, was killed, or is "
            "slower than the process group waits"
        ) from error


def _describe_facts(doing: str, said: Sequence[Mapping[str, str]], ranks: list[int]) -> str:
    """What the ranks differ in; empty if in nothing."""
    names = dict.fromkeys(name for facts in said for name in facts)
    differing = [name for name in names if len({facts.get(name) for facts in said}) > 1][:_MOST_FACTS]
    if not differing:
        return ""
    found = (
        f"{name} is {_ranks_by_value((facts.get(name, 'unknown') for facts in said), ranks)}" for name in differing
    )
    return (
        f"{doing}: the ranks differ, and no rank goes on: {'. '.join(found)}. Give all of them the same settings, "
        "versions of gact_dist and torch, and calls"
    )


def _digest(content: object) -> bytes:
    # repr of tuples of str and int quotes and separates them, so different contents have different texts
    return hashlib.blake2b(repr(content).encode(), digest_size=_DIGEST_BYTES).digest()


def _gather_digests(digest: bytes, group: ProcessGroup | None) -> list[bytes]:
    ranks = world_size(group)
    if ranks == 1:
        return [digest]
    mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(_collective_device(group))
    gathered = [torch.empty_like(mine) for _ in range(ranks)]
    with _explained():
        dist.all_gather(gathered, mine, group=group)
    return [bytes(other.tolist()) for other in gathered]


def _gather_objects(mine: _T, group: ProcessGroup | None) -> list[_T]:
    gathered: list[_T] = [mine] * world_size(group)
    with _explained():
        dist.all_gather_object(gathered, mine, group=group)
    return gathered


def _union_of_names(names: tuple[str, ...], columns: int, group: ProcessGroup | None) -> tuple[str, ...]:
    if len(set(_gather_digests(_digest((columns, names)), group))) == 1:
        return names
    everyone = _gather_objects((columns, names), group)
    widths = [other_columns for other_columns, _ in everyone]
    if len(set(widths)) > 1:
        raise ValueError(f"the ranks' values have {widths} columns, in rank order; expected the same number on all")
    return tuple(dict.fromkeys(name for _, other_names in everyone for name in other_names))


def _with_flags(names: Sequence[str], values: torch.Tensor, union: tuple[str, ...]) -> torch.Tensor:
    """[len(union), K + 2]: this rank's valid rows, zero elsewhere, then 1 where valid, then 1 where invalid."""
    invalid = values.isnan().any(dim=1) | values.isneginf().any(dim=1) | ~values[:, -1].isfinite()
    flags = torch.stack([~invalid, invalid], dim=1).to(values.dtype)
    rows = torch.cat([values.masked_fill(invalid.unsqueeze(1), 0.0), flags], dim=1)
    positions = {name: position for position, name in enumerate(union)}
    result = torch.zeros(len(union), rows.shape[1], dtype=values.dtype, device="cpu")
    result[[positions[name] for name in names]] = rows
    return result


def _reduced(values: torch.Tensor, operation: Any, group: ProcessGroup | None) -> torch.Tensor:
    if world_size(group) == 1:
        return values
    reduced = values.to(_collective_device(group))
    with _explained():
        dist.all_reduce(reduced, operation, group=group)
    return reduced.cpu()


def _describe_mismatch(
    digests: list[bytes], plans: Sequence[Mapping[str, int | tuple[int, ...]]], ranks: list[int]
) -> str:
    """The same text on every rank; ranks holds the global rank of each member of the group."""
    by_digest = _ranks_by_value((digest.hex() for digest in digests), ranks)
    names = sorted({name for plan in plans for name in plan})
    first = next(name for name in names if len({plan.get(name) for plan in plans}) > 1)
    by_bits = _ranks_by_value((_describe_bits(plan.get(first)) for plan in plans), ranks)
    return (
        f"the ranks of a data-parallel group hold different plans: digest {by_digest}. First tensor that differs: "
        f"{first!r}, {by_bits}. All of them must use one plan: build it from reduced statistics alone, with the same "
        "settings and library versions on every rank, or load the same state_dict on all"
    )


def _describe_bits(bits: int | tuple[int, ...] | None) -> str:
    if bits is None:
        return "no entry"
    return f"{bits} bits" if bits else "exact"


def _ranks_by_value(values: Iterable[str], ranks: list[int]) -> str:
    members: dict[str, list[int]] = {}
    for rank_, value in zip(ranks, values, strict=True):
        members.setdefault(value, []).append(rank_)
    return "; ".join(
        f"{value} on rank{'s' * (len(who) > 1)} {', '.join(map(str, who))}" for value, who in members.items()
    )
