"""Which modules of a model are measured one at a time.

[Note: blocks] Whatever is chosen, the numbers are the same; what changes is how much is alive at once. A block is a
module that a job runs as one: a unit of its sharding, a module that the user names, or what a model repeats, a child of
a ModuleList, ModuleDict or Sequential that has parts of its own. A Sequential of single layers is one block, and so is
a model without such parts, or what is repeated and has a few of such rows inside (an inverted residual: convolution,
norm and relu6, three times): what is made in one row and read in the next is derived, as it would not be across a
border. What is left between blocks (an embedding, the final norm, a head) is a block each.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from .._torch_internals import is_compiled
from ..distributed import TENSOR_PARALLELISM, sharding, units, unwrap, user_path
from .autograd_graph import MeasurementError

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_FEW_ROWS = 4


def blocks_of(model: nn.Module, named: Sequence[str] = ()) -> list[nn.Module]:
    """The blocks of a model, disjoint, in the order of its modules; none where the model itself is one.

    named: paths of modules that are blocks too. Raises ValueError for one that no module has.
    """
    wanted = {id(module) for module in units(model)} | _named(unwrap(model), named)
    model = unwrap(model)
    if not wanted and not _is_frame(model, False, wanted):
        return []
    return list(_below(model, wanted))


def blocks_as_run(model: nn.Module, named: Sequence[str] = (), inlined: bool = False) -> list[nn.Module]:
    """The blocks of a model as it runs, compiled regions and all; none where it can only be measured as a whole.

    A region with blocks inside is one block. Of a region the module is its own, or that which torch.compile put around
    it. named: as for blocks_of(). inlined: whether the graphs of regions pack what they save themselves.
    Raises MeasurementError where none is left and the parameters are sharded.
    """
    blocks = blocks_of(model, named)
    regions: dict[nn.Module, nn.Module] = {}
    for module in model.modules():  # outer ones first
        if is_compiled(module):
            for inner in module.modules():
                regions.setdefault(inner, module)
    is_one = unwrap(model) in regions
    if is_one and blocks and may_not_be_whole(model):
        raise MeasurementError(
            "the model is compiled as a whole and its parameters are sharded: all of them would be gathered at once; "
            "compile block by block, as with `for block in model.blocks: block.compile()`"
        )
    if is_one or (regions and inlined):
        return []
    return list(dict.fromkeys(regions.get(block, block) for block in blocks))


def may_not_be_whole(model: nn.Module) -> bool:
    """Whether the parameters of a model must not be there all at once."""
    return sharding(model) not in (None, TENSOR_PARALLELISM)


def parts_of_block(model: nn.Module) -> list[nn.Module]:
    """The modules that make up a model without blocks, in the order of its modules; none of a single module.

    They serve where one of them has an operator without a second derivative: the others need not do without.
    """
    frame, found = unwrap(model), list[nn.Module]()
    while len(found) < 2:
        found = [part for part in _members(frame) if _has_parameters(part)]
        if len(found) != 1:
            break
        frame = found[0]
    return found


def _members(frame: nn.Module) -> Iterator[nn.Module]:
    for child in frame.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _members(child)
        else:
            yield child


def _named(model: nn.Module, named: Sequence[str]) -> set[int]:
    modules = {user_path(path): module for path, module in model.named_modules()}
    unknown = [name for name in named if name not in modules]
    if unknown:
        raise ValueError(f"blocks names {unknown}, expected paths of modules, such as {list(modules)[1:4]}")
    return {id(modules[name]) for name in named}


def _below(frame: nn.Module, wanted: set[int]) -> Iterator[nn.Module]:
    in_list = isinstance(frame, _LISTS)
    for child in frame.children():
        if id(child) in wanted:
            yield child
        elif isinstance(child, (nn.ModuleList, nn.ModuleDict)) or _is_frame(child, in_list, wanted):
            yield from _below(child, wanted)
        elif _has_parameters(child):
            yield child


def _is_frame(module: nn.Module, repeated: bool, wanted: set[int]) -> bool:
    """Whether a module is not a block itself but has blocks inside. repeated: it is a child of a list."""
    inner = [child for child in module.modules() if child is not module]
    if any(id(child) in wanted for child in inner):
        return True
    lists = [part for part in (module, *inner) if isinstance(part, _LISTS) and _composites(part) > 1]
    if repeated and not isinstance(module, _LISTS):
        lists = [part for part in lists if not _has_few_rows(part)]
    if lists:
        return True
    return not repeated and _composites(module) > 1


def _has_parameters(module: nn.Module) -> bool:
    """Whether a module has parameters; those of a unit with one flat parameter are plain attributes in between."""
    parts = (value for part in module.modules() for value in (*part._parameters.values(), *vars(part).values()))
    return any(isinstance(value, Tensor) for value in parts)


def _has_few_rows(module: nn.Module) -> bool:
    """Whether what it consists of are single layers, and a few rows of such."""
    return _composites(module) <= _FEW_ROWS and not any(map(_composites, module.children()))


def _composites(module: nn.Module) -> int:
    return sum(1 for child in module.children() if any(True for _ in child.children()))
