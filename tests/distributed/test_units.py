"""Sharded parameters gathered part by part: what is whole at which time, and that the job does not notice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from modes import ROWS, Cell, Job, Zero3, adamw, batch_of, mesh_of
from ranks import count_collectives
from small_models import Block, TinyGPT
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

from gact_dist.distributed import PeerFailedError, bypassed, gathered, gathered_in_turn, units, user_path
from gact_dist.distributed.fsdp2 import groups_of

LAYERS = 3
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Zero3Offload(Zero3):
    """The shards are in the host's memory."""

    options: ClassVar[dict[str, Any]] = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}


JOBS: dict[str, type[Job]] = ROWS | {"ZeRO-3 offload": Zero3Offload}
CASES = [
    ("FSDP1", "fp32"),
    ("FSDP1", "bf16"),
    ("FSDP1 use_orig_params", "fp32"),
    ("FSDP1 use_orig_params", "bf16"),
    ("FSDP1 SHARD_GRAD_OP", "fp32"),
    ("FSDP2", "fp32"),
    ("FSDP2", "bf16"),
    ("FSDP2 kept unsharded", "fp32"),
    ("FSDP2 CPU offload", "fp32"),
    ("ZeRO-3", "fp32"),
    ("ZeRO-3", "bf16"),
    ("ZeRO-3 offload", "fp32"),
    ("HSDP", "fp32"),
    ("FSDP1 HYBRID_SHARD", "fp32"),
]


def started(row: str, precision: str) -> Job:
    """A row's job, of more layers."""
    deeper = type("Deeper", (JOBS[row],), {"build": lambda _: TinyGPT(37, layers=LAYERS, dropout=0.1)})
    return deeper(Cell(row, "none", precision, "eager"), adamw)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, Block)]


def parts_of(model: nn.Module) -> list[nn.Module]:
    """The units of a model, or its blocks where the framework has no units."""
    return units(model) or blocks_of(model)


# -- what is whole ----------------------------------------------------------------------------------------------


def holds(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.untyped_storage().nbytes() > 0


def whole(model: nn.Module) -> set[str]:
    """Names of the parameters whose elements this rank holds all of, as their framework keeps them."""
    found = {user_path(name) for name, parameter in model.named_parameters() if is_available(parameter)}
    for path, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel) and module._handle is not None:
            found |= {user_path(f"{path}.{name}".strip(".")) for name in whole_in_handle(module._handle)}
    groups = [group for state in states_of(model) for group in groups_of(state)]
    return found | {
        shard._param_fqn
        for group in groups
        for shard in group.fsdp_params
        if any(holds(output) for output in shard.all_gather_outputs)
    }


def is_available(parameter: nn.Parameter) -> bool:
    """Of ZeRO-3."""
    return hasattr(parameter, "ds_id") and parameter.ds_status.name == "AVAILABLE" and holds(parameter)


def whole_in_handle(handle: Any) -> Sequence[str]:
    flat = handle.flat_param
    # what mixed precision computes in is enough: the stored type would be as much again, and twice
    assert not holds(getattr(flat, "_full_prec_full_param_padded", None))
    return flat._fqns if holds(flat._full_param_padded) else ()


def states_of(model: nn.Module) -> dict[Any, None]:
    getters = (getattr(module, "_get_fsdp_state", None) for module in model.modules())
    return dict.fromkeys(get() for get in getters if get is not None)


def full_weights(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter as the framework's own ways of exporting it give it."""
    import deepspeed

    named = list(model.named_parameters())
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            return {user_path(name): parameter.detach().clone() for name, parameter in model.named_parameters()}
    if any(hasattr(parameter, "ds_id") for _, parameter in named):
        prefix = "module."
        with deepspeed.zero.GatheredParameters([p for _, p in named if not is_available(p)]):
            return {name.removeprefix(prefix): parameter.detach().clone() for name, parameter in named}
    return {
        name: (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach().clone()
        for name, parameter in named
    }


def named(part: nn.Module, model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters inside a part, under their names in the user's model."""
    path = next(path for path, module in model.named_modules() if module is part)
    found = part.named_parameters(remove_duplicate=False)
    return {user_path(f"{path}.{name}").removeprefix("module."): parameter for name, parameter in found}


# -- jobs -------------------------------------------------------------------------------------------------------


def check_parts(model: nn.Module, dtype: torch.dtype, between_steps: bool) -> None:
    """Visit every part three times, as a measurement does."""
    expected = {name: weight.to(dtype) for name, weight in full_weights(model).items()}
    before, parts = stripped(whole(model)), parts_of(model)
    assert len(parts) == LAYERS
    assert not (between_steps and before)
    with bypassed(model, parts):
        root = {name for name in expected if not name.startswith("blocks.")}
        assert stripped(whole(model)) == before | root
        for part in [*parts, *reversed(parts), *parts]:
            with gathered(part):
                own = named(part, model)
                assert stripped(whole(model)) == before | root | own.keys()
                assert all(same(parameter, expected[name]) for name, parameter in own.items())
            assert stripped(whole(model)) == before | root
    assert stripped(whole(model)) == before


def stripped(names: set[str]) -> set[str]:
    return {name.removeprefix("module.") for name in names}


def same(parameter: Tensor, expected: Tensor) -> bool:
    return parameter.dtype == expected.dtype and torch.equal(parameter, expected)


def trained(row: str, precision: str, visiting: bool) -> tuple[list[Tensor], dict[str, Tensor], Tensor]:
    """Losses, this rank's weights and the state of its generator after three steps; visiting: parts are gathered
    before the first forward, between a forward and its backward, before an update and after it."""
    job = started(row, precision)
    check = check_parts if visiting else lambda *_, **__: None
    losses = []
    torch.manual_seed(7 + dist.get_rank())
    check(job.model, TYPES[precision], between_steps=True)
    for step in range(3):
        inputs, targets = batch_of(step, dist.get_rank())
        loss = nn.functional.cross_entropy(job.model(inputs).float().flatten(0, -2), targets.flatten())
        check(job.model, TYPES[precision], between_steps=False)
        job.backward(loss)
        check(job.model, TYPES[precision], between_steps=False)
        job.update()
        check(job.model, TYPES[precision], between_steps=True)
        losses.append(loss.detach().clone())
    weights = job.weights()
    job.close()
    return losses, weights, torch.get_rng_state()


@contextmanager
def gradients_aside(model: nn.Module) -> Iterator[None]:
    """As a measurement does it: what gathers must not take them for gradients that the job has dropped."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    yield
    for parameter, gradient in gradients:
        parameter.grad = gradient


def accumulated(row: str, visiting: bool) -> list[Tensor]:
    """Weights after two updates, each by the gradients of two backwards; visiting: between these and after them."""
    job = started(row, "fp32")
    torch.manual_seed(7 + dist.get_rank())
    for step in range(4):
        job.forward_backward(*batch_of(step, dist.get_rank()))
        if visiting:
            with gradients_aside(job.model):
                visited(job.model, parts_of(job.model))
        if step % 2:
            job.update()
    return list(job.weights().values())


@pytest.mark.parametrize("row", ["FSDP1", "FSDP1 use_orig_params", "FSDP1 SHARD_GRAD_OP", "FSDP2"])
def test_accumulated_gradients_are_kept(ranks, row):
    for visited, untouched in zip(ranks(accumulated, row, True), ranks(accumulated, row, False), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(visited, untouched, strict=True))


def size_of(row: str) -> int:
    return JOBS[row].world_size


@pytest.mark.parametrize(("row", "precision"), CASES)
def test_the_root_and_one_part_are_whole_and_the_job_does_not_notice(ranks, row, precision):
    visited = ranks(trained, row, precision, True, world_size=size_of(row))
    untouched = ranks(trained, row, precision, False, world_size=size_of(row))
    for (losses, weights, state), (own_losses, own_weights, own_state) in zip(visited, untouched, strict=True):
        assert losses == own_losses
        assert all(torch.equal(weights[name], own_weights[name]) for name in own_weights)
        assert torch.equal(state, own_state)


def derivatives(row: str | None) -> list[Tensor]:
    """First and second derivatives of each block alone at an input of its own; row: None for the unwrapped model."""
    job = started(row, "fp32") if row is not None else None
    torch.manual_seed(0)
    model = job.model if job is not None else TinyGPT(37, layers=LAYERS, dropout=0.1)
    parts = parts_of(model) if job is not None else blocks_of(model)
    model.eval()
    found = []
    with bypassed(model, parts):
        for part in parts:
            generator = torch.Generator().manual_seed(1)
            x = torch.randn(2, 40, 64, generator=generator, requires_grad=True)
            with gathered(part), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                own = list(part.parameters())
                gradients = torch.autograd.grad(part(x).square().sum(), [x, *own], create_graph=True)
                found += [*gradients, *torch.autograd.grad(sum(g.square().sum() for g in gradients), [x, *own])]
    found = [tensor.detach().clone() for tensor in found]
    if job is not None:
        job.close()
    return found


@pytest.mark.parametrize("row", ["FSDP1", "FSDP1 use_orig_params", "FSDP2", "FSDP2 CPU offload", "ZeRO-3"])
def test_a_part_can_be_differentiated_twice_while_it_is_gathered(ranks, row):
    for found, expected in zip(ranks(derivatives, row)[0], ranks(derivatives, None)[0], strict=True):
        # ZeRO-3's linear layer is another operator: sums of some hundreds of float32 in another order
        bound = 1e-5 if row == "ZeRO-3" else 0.0
        assert float((found - expected).norm()) <= bound * float(expected.norm())


# -- a forward of which nothing but its outputs is used ---------------------------------------------------------


def in_turn(row: str, precision: str) -> None:
    """The forward of a rehearsal: what is whole in each part's forward, what it is given, and what comes out."""
    job, dtype = started(row, precision), TYPES[precision]
    model, parts = job.model, parts_of(job.model)
    inputs, _ = batch_of(0, dist.get_rank())
    root = {name for name in stripped(set(full_weights(model))) if not name.startswith("blocks.")}
    visits: list[set[str]] = []

    def watched(part: nn.Module) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            assert x.dtype == dtype
            visits.append(stripped(whole(model)) - root)
            return type(part).forward(part, x)

        return forward

    with bypassed(model), torch.no_grad():
        torch.manual_seed(3)
        expected = model(inputs)
    for part in parts:
        part.forward = watched(part)
    with gathered_in_turn(model, parts), torch.no_grad():
        torch.manual_seed(3)
        assert torch.equal(model(inputs), expected)
        assert stripped(whole(model)) == root
    assert not whole(model)
    blocks = [{name for name in stripped(set(full_weights(model))) if f"blocks.{i}." in name} for i in range(LAYERS)]
    assert visits == blocks
    assert all("gathering" not in vars(part)["forward"].__qualname__ for part in parts)
    job.close()


@pytest.mark.parametrize(
    ("row", "precision"),
    [("FSDP1", "bf16"), ("FSDP1 use_orig_params", "fp32"), ("FSDP2", "bf16"), ("ZeRO-3", "fp32")],
)
def test_in_turn_each_part_is_whole_for_its_own_forward(ranks, row, precision):
    ranks(in_turn, row, precision)


# -- which modules are units, and what they share ---------------------------------------------------------------


BLOCKS = [f"blocks.{index}" for index in range(LAYERS)]


def tiny() -> TinyGPT:
    torch.manual_seed(0)
    return TinyGPT(37, layers=LAYERS)


def shard(*modules: nn.Module | list[nn.Module]) -> None:
    """fully_shard each, or the modules of a list as one group."""
    for module in modules:
        fully_shard(module, mesh=mesh_of((2,), ("dp",)))


def wrapped(model: nn.Module, *classes: type[nn.Module]) -> FullyShardedDataParallel:
    policy = ModuleWrapPolicy(set(classes))
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), auto_wrap_policy=policy)


def paths(modules: Sequence[nn.Module], model: nn.Module) -> list[str]:
    known = {module: user_path(path) for path, module in model.named_modules()}
    return [known[module] for module in modules]


def found_units() -> dict[str, tuple[list[str], list[str]]]:
    """What was sharded -> paths of the units that were found, and of those expected."""
    models = {name: tiny() for name in ("plain", "root only", "blocks", "no root", "nested", "group")}
    shard(models["root only"])
    shard(*models["blocks"].blocks, models["blocks"])
    shard(*models["no root"].blocks)
    shard(models["nested"].blocks[0].up, *models["nested"].blocks, models["nested"])
    shard(*models["group"].blocks, [models["group"].norm, models["group"].head], models["group"])
    models |= {
        "inside another model": nn.Sequential(models["blocks"], nn.Linear(37, 37)),
        "a unit around all units": nn.Sequential(nn.Linear(2, 2), tiny()),
        "FSDP1": wrapped(tiny(), Block),
        "FSDP1 root only": wrapped(tiny()),
    }
    around = models["a unit around all units"]
    shard(*around[1].blocks, around[1], around)
    expected = {
        "blocks": BLOCKS,
        "no root": BLOCKS,
        "nested": BLOCKS,
        "group": [*BLOCKS, "norm", "head"],
        "inside another model": [f"0.{path}" for path in BLOCKS],
        "a unit around all units": [f"1.{path}" for path in BLOCKS],
        "FSDP1": BLOCKS,
    }
    return {name: (paths(units(model), model), expected.get(name, [])) for name, model in models.items()}


def test_units_are_the_outermost_below_the_root(ranks):
    for found, expected in ranks(found_units)[0].values():
        assert found == expected


def fsdp1_units_are_inside_their_wrappers() -> list[type]:
    return [type(unit) for unit in units(wrapped(tiny(), Block))]


def test_a_unit_of_fsdp1_is_the_wrapped_module_whose_inputs_are_cast(ranks):
    assert ranks(fsdp1_units_are_inside_their_wrappers)[0] == [Block] * LAYERS


def visited(model: nn.Module, parts: Sequence[nn.Module]) -> list[list[str]]:
    """What is whole in the root's context, and then in that of each part, besides."""
    with bypassed(model, parts):
        root = whole(model)
        seen = [sorted(root)]
        for part in parts:
            with gathered(part):
                assert all(parameter.untyped_storage().nbytes() > 0 for parameter in part.parameters())
                seen.append(sorted(whole(model) - root))
            assert whole(model) == root
    assert not whole(model)
    return seen


def names_under(model: nn.Module, *prefixes: str) -> list[str]:
    return sorted(user_path(name) for name, _ in model.named_parameters() if user_path(name).startswith(prefixes))


def nested_units() -> None:
    """The layer inside a block is a unit of its own, and the last block is left to the root."""
    model = tiny()
    names = {path: names_under(model, f"{path}.") for path in (*BLOCKS, "embedding", "norm", "head")}
    root = sorted([*names["embedding"], *names["norm"], *names["head"], *names["blocks.2"]])
    shard(*(block.up for block in model.blocks), *model.blocks, model)
    assert visited(model, units(model)[:2]) == [root, names["blocks.0"], names["blocks.1"]]

    model = wrapped(tiny(), Block, nn.Linear)
    first, second, _ = units(model)[:3]
    found = visited(model, [first, second])
    assert found == [root, names["blocks.0"], names["blocks.1"]]
    around = [module for module in model.modules() if isinstance(module, FullyShardedDataParallel)]
    wrappers = [module for module in around if module.module in (first, second)]
    assert visited(model, wrappers) == found  # the wrapper is as good a part as what it wraps


def test_a_unit_inside_a_unit_is_gathered_with_it(ranks):
    ranks(nested_units)


def groups_of_modules() -> None:
    """norm and head are sharded as one: each gathers both, and the root as well if one of them is its own."""
    model = tiny()
    both = names_under(model, "norm.", "head.")
    embedding = names_under(model, "embedding.")
    blocks = [names_under(model, f"{path}.") for path in BLOCKS]
    shard(*model.blocks, [model.norm, model.head], model)
    assert visited(model, units(model)) == [embedding, *blocks, both, both]
    assert visited(model, [*model.blocks, model.head]) == [sorted(embedding + both), *blocks, []]


def test_modules_that_are_sharded_as_one_are_gathered_as_one(ranks):
    ranks(groups_of_modules)


class Tied(TinyGPT):
    """The head has the embedding's weight."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.head.weight = self.embedding.weight


def tied_parameters() -> None:
    """Under ZeRO-3 the root holds the weight and leaves it whole; with both modules as parts they take turns."""
    model = Tied(37, layers=LAYERS)
    shard(*model.blocks, [model.embedding, model.head], model)
    own = ["embedding.weight", "head.bias"]
    assert visited(model, [model.embedding, model.head])[1:] == [own, own]

    tied = type("TiedJob", (JOBS["ZeRO-3"],), {"build": lambda _: Tied(37, layers=LAYERS)})
    job = tied(Cell("ZeRO-3", "none", "fp32", "eager"), adamw)
    inner = job.engine.module
    weight, bias = inner.embedding.weight, inner.head.bias
    with bypassed(job.model, [inner.head]):
        with gathered(inner.head):
            assert is_available(weight)
            assert is_available(bias)
        assert is_available(weight)
        assert not is_available(bias)
    assert not is_available(weight)
    with bypassed(job.model, [inner.embedding, inner.head]):
        assert not is_available(weight)
        for part in (inner.embedding, inner.head):
            with gathered(part):
                assert is_available(weight)
            assert not is_available(weight)
        with gathered(inner.embedding):
            with gathered(inner.head):
                assert is_available(bias)
            assert is_available(weight)  # the other part's still
    job.close()


def test_a_tied_parameter_stays_whole_as_long_as_anyone_gathers_it(ranks):
    ranks(tied_parameters)


def gathered_by_the_job_already(original_parameters: bool) -> None:
    """The user's own context around ours keeps what it gathered; so does ours around itself."""
    model = FullyShardedDataParallel(
        tiny(),
        device_id=torch.device("cpu"),
        use_orig_params=original_parameters,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
    )
    parts, expected = units(model), list(full_weights(model).values())

    def are_whole() -> bool:
        return all(
            torch.equal(parameter, weight) for parameter, weight in zip(model.parameters(), expected, strict=True)
        )

    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        with bypassed(model, parts):
            for part in parts:
                with gathered(part), gathered(part):
                    assert are_whole()
                assert are_whole()
        assert are_whole()
    with bypassed(model, parts), gathered(parts[0]):
        one = [parameter.clone() for parameter in parts[0].parameters()]
        with gathered(parts[0]):
            pass
        assert all(torch.equal(a, b) for a, b in zip(one, parts[0].parameters(), strict=True))
    assert not whole(model)


@pytest.mark.parametrize("original_parameters", [False, True], ids=["flat", "use_orig_params"])
def test_what_is_whole_already_is_left_as_it_is(ranks, original_parameters):
    ranks(gathered_by_the_job_already, original_parameters)


def failing(row: str, ranks_that_fail: list[int], at: int) -> None:
    """Some ranks fail within a part, or after the last one; the others learn of it, and the job trains as ever."""
    job = started(row, "fp32")
    parts, fails = parts_of(job.model), dist.get_rank() in ranks_that_fail
    visits = []

    def measure() -> None:
        with bypassed(job.model, parts):
            for number, part in enumerate(parts):
                with gathered(part):
                    visits.append(number)
                    if fails and number == at:
                        raise ZeroDivisionError
            if fails:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError if fails else PeerFailedError):
        measure()
    assert visits == list(range(min(at + 1, LAYERS)))
    assert not whole(job.model)
    job.forward_backward(*batch_of(0, dist.get_rank()))
    job.update()
    check_parts(job.model, torch.float32, between_steps=True)
    job.close()


@pytest.mark.parametrize("row", ["FSDP1", "FSDP1 use_orig_params", "FSDP2", "HSDP", "ZeRO-3"])
@pytest.mark.parametrize("at", [1, LAYERS])
def test_a_rank_that_fails_leaves_nothing_whole_and_no_rank_waiting(ranks, row, at):
    size = size_of(row)
    ranks(failing, row, list(range(0, size, 2)), at, world_size=size)  # of HSDP one rank of each pair with the same
    ranks(failing, row, list(range(size)), at, world_size=size)


def collectives_of(row: str) -> list[int]:
    """Collectives that gather the root's parameters and each part's; with parts, of the rank's answer as well."""
    job = started(row, "fp32")
    parts = parts_of(job.model)
    counts = []
    with count_collectives() as count, bypassed(job.model, parts):
        pass
    counts.append(count.total)
    with bypassed(job.model, parts):
        for part in parts:
            with count_collectives() as count, gathered(part):
                pass
            counts.append(count.total)
    job.close()
    return counts


@pytest.mark.parametrize("row", ["FSDP1", "FSDP2", "HSDP"])
def test_one_collective_gathers_a_unit_and_one_tells_that_all_go_on(ranks, row):
    assert ranks(collectives_of, row, world_size=size_of(row))[0] == [2] * (1 + LAYERS)


@pytest.mark.parametrize("row", ["DDP", "ZeRO-2"])
def test_nothing_is_gathered_where_nothing_is_sharded(ranks, row):
    assert ranks(collectives_of, row)[0] == [0] * (1 + LAYERS)
