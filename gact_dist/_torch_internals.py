"""Everything undocumented that the package reads from torch, except the internals of frameworks.

What is known of a framework's internals (FSDP, DTensor, DeepSpeed) is in its file in distributed/. NEEDED names all of
both, and tests/test_torch_internals.py fails on a torch that lacks any of it.
"""

import importlib
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from inspect import signature
from types import CodeType, FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor, nn
from torch._C._dynamo.guards import TensorGuards
from torch._guards import TracingContext, active_fake_mode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

CHECKED_WITH = "2.13"
"""the torch that all tests ran with; the oldest supported one is 2.11"""

VERSION = str(torch.__version__)

NEEDED = (
    # autograd
    "torch._C._current_graph_task_id",
    "torch._C._len_torch_function_stack",
    "torch._C.DisableTorchFunction",
    "torch._C.DisableTorchFunctionSubclass",
    "torch._C._autograd._unsafe_set_version_counter",
    "torch._C._autograd._top_saved_tensors_default_hooks",
    "torch._C._autograd._pop_saved_tensors_default_hooks",
    "torch._C._autograd._push_saved_tensors_default_hooks",
    "torch._C._autograd._saved_tensors_hooks_get_disabled_error_message",
    "torch._C._dynamo.guards.TensorGuards",
    "torch._C._functorch.is_functorch_wrapped_tensor",
    "torch._C._functorch.peek_interpreter_stack",
    "torch._C._autograd.SavedTensor",
    "torch._C._current_autograd_node",
    "torch._C._disabled_torch_function_impl",
    "torch.Tensor._make_wrapper_subclass",
    "torch._C._last_executed_optimized_graph",
    "torch.autograd.Function._backward_cls._forward_cls",
    "torch.Tensor._base",
    "torch.Tensor._is_view",
    "torch.Tensor._version",
    "torch.UntypedStorage._cdata",
    "torch.multiprocessing.reductions.StorageWeakRef",
    "torch._C._storage_Use_Count",
    "torch._fused_sdp_choice",
    "torch._neg_view",
    # modules
    "torch.nn.Module._compiled_call_impl",
    "torch.nn.Module._wrapped_call_impl",
    "torch.nn.modules.module._global_backward_hooks",
    "torch.nn.modules.module._global_backward_pre_hooks",
    "torch.nn.modules.batchnorm._BatchNorm",
    "torch.nn.functional._max_pool2d",
    "torch.nn.functional._verify_batch_size",
    "torch.nn.init._no_grad_trunc_normal_",
    # checkpoint
    "torch.utils.checkpoint._CheckpointFrame",
    "torch.utils.checkpoint._checkpoint_hook",
    "torch.utils.checkpoint._CachingTorchDispatchMode",
    "torch.utils.checkpoint._CachedTorchDispatchMode",
    "torch.utils.checkpoint.SAC_IGNORED_OPS",
    "torch.utils.checkpoint.checkpoint.__wrapped__",
    # compile
    "torch._disable_dynamo",
    "torch._functorch.config.saved_tensors_hooks_filtering_mode",
    "torch._functorch._aot_autograd.graph_compile._get_saved_tensor_hook_context",
    "torch.fx.experimental.proxy_tensor._CURRENT_MAKE_FX_TRACER",
    # fake tensors and dispatch modes
    "torch._guards.active_fake_mode",
    "torch._guards.TracingContext.try_get",
    "torch._dynamo",
    "torch._C._len_torch_dispatch_stack",
    "torch._subclasses.fake_tensor.FakeTensorMode.from_tensor",
    "torch._subclasses.fake_tensor.FakeTensorConverter.set_tensor_memo",
    "torch._subclasses.fake_tensor.DataDependentOutputException",
    "torch._subclasses.fake_tensor.DynamicOutputShapeException",
    "torch._subclasses.fake_tensor.unset_fake_temporarily",
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack",
    "torch.ops._c10d_functional.wait_tensor",
    # frameworks: distributed/
    "torch.testing._internal.distributed.fake_pg.FakeStore",
    "torch.distributed.fsdp._fully_shard._fully_shard._get_post_forward_mesh_info",
    "torch.distributed.ProcessGroup.get_group_store",
    "torch.distributed.ProcessGroup._get_backend",
    "torch.distributed.algorithms.join.Join.__exit__",
    "torch.nn.parallel.DistributedDataParallel.join_hook",
    "torch.distributed.fsdp.FSDPModule._get_fsdp_state",
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._lazy_init",
    "torch.distributed.pipelining.stage._PipelineStageBase.forward_one_chunk",
    "torch.distributed._functional_collectives.AsyncCollectiveTensor",
    "torch.distributed.tensor._redistribute.Redistribute",
    "torch.distributed.tensor._api._FromTorchTensor",
    "torch.distributed.tensor._api._ToTorchTensor",
)
"""dotted names that must exist"""

DIRECTORY = os.path.dirname(torch.__file__)
"""the folder of the files that torch's own frames are in"""

# -- autograd ---------------------------------------------------------------------------------------------------


graph_task_id: Any = torch._C._current_graph_task_id
"""the number of the backward that runs in this thread; -1 if none does"""

function_modes: Any = torch._C._len_torch_function_stack
"""how many function modes are active"""


def in_backward() -> bool:
    """Whether a backward pass is running in this thread."""
    return graph_task_id() != -1


def is_backward_call(frame: FrameType) -> bool:
    """Whether a frame is that of a call of torch.autograd.grad() or torch.autograd.backward()."""
    return frame.f_code.co_filename == torch.autograd.__file__ and frame.f_code.co_name in ("grad", "backward")


def creates_graph(frame: FrameType) -> bool:
    """Whether such a call was made with create_graph=True."""
    return bool(frame.f_locals["create_graph"])


def innermost_hooks() -> Any:
    """This thread's innermost (pack, unpack) hooks for saved tensors; None if there are none."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def hooks_are_disabled() -> bool:
    """Whether torch refuses hooks for saved tensors in this thread now, as it does inside torch.func.grad()."""
    return torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is not None


@contextmanager
def without_innermost_hooks(pack: Any) -> Iterator[None]:
    """Within the context this thread's innermost hooks for saved tensors are off, if their pack hook is this one."""
    top = innermost_hooks()
    if top is None or top[0] is not pack:
        yield
        return
    torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        torch._C._autograd._push_saved_tensors_default_hooks(*top)


def is_inside_transform(tensor: Tensor) -> bool:
    """Whether a tensor is the one that a function under a torch.func transform sees: it has no storage of its own."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


innermost_transform: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
"""what stands for the torch.func transform under which a function is running, None without one"""


def runs_transform() -> bool:
    """Whether a function under a torch.func transform is running."""
    return innermost_transform() is not None


def storage_id(tensor: Tensor) -> int:
    """A number for a tensor's storage; no other storage has it while this one, or a weak reference to it, lives."""
    return tensor.untyped_storage()._cdata


def storage_reference(tensor: Tensor) -> Any:
    """A weak reference to a tensor's storage: it pins the address, not the memory."""
    return StorageWeakRef(tensor.untyped_storage())


def _current_raw_stream(device_index: int) -> int:
    return torch.cuda.current_stream(device_index).cuda_stream


# builds without CUDA lack these
current_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _current_raw_stream)
"""the handle of a CUDA device's current stream, without the object that torch.cuda.current_stream() makes"""
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
"""torch.cuda.current_device() where CUDA is initialised"""


dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""how many modes would see an operator that is called now"""


def all_dispatch_modes(allowed: Callable[[Any], bool]) -> bool:
    """Whether each of these modes is one that finds or makes fake tensors, or allowed."""
    if not dispatch_modes():
        return True
    return all(isinstance(mode, FakeTensorMode) or allowed(mode) for mode in _get_current_dispatch_mode_stack())


def likeness(tensor: Tensor) -> Callable[[Tensor], bool]:
    """A function that tells whether a tensor is like this one: in class, type, shape, strides, device, requires_grad,
    lazy bits, and in the modes and transforms that it is seen under. What torch.compile guards its graphs with; it
    keeps nothing of the tensor."""
    guards: Any = TensorGuards  # whose types torch declares otherwise than it has them
    sizes, strides = [[*tensor.shape]], [[*tensor.stride()]]
    check: Callable[[Tensor], bool] = guards(tensor, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    return check


def storage_with_id(tensor: Tensor) -> tuple[Any, int]:
    """A tensor's storage, and storage_id() of it."""
    storage = tensor.untyped_storage()
    return storage, storage._cdata


reference_to_storage: Any = StorageWeakRef
"""storage_reference() of what is a storage itself"""
unpin_storage: Callable[[int], None] = torch.UntypedStorage._free_weak_ref
"""ends what a storage's _weak_ref() began"""


def tensors_of_storage(reference: Any) -> int:
    """How many tensors refer to a storage. reference: storage_reference() of one of them."""
    return _uses(reference) - _uses_without_tensors()


def _uses(reference: Any) -> int:
    return int(torch._C._storage_Use_Count(reference.cdata))


@cache
def _uses_without_tensors() -> int:
    """A storage that Python has seen counts as one that uses itself, in torch 2.13."""
    tensor = torch.empty(1, device="cpu")
    return _uses(storage_reference(tensor)) - 1


def negative_view(tensor: Tensor) -> Tensor:
    """A view of a tensor that is its negative, by the bit that the imaginary part of a conjugate has."""
    return torch._neg_view(tensor)


without_modes: Any = torch._C.DisableTorchFunction
"""a context in which no function mode, and no subclass's __torch_function__, sees what is called"""


def without_subclass(tensor: Tensor) -> Tensor | None:
    """A plain tensor in the memory of one whose class only changes how functions are called; None of a class that wraps
    other tensors."""
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return None
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(Tensor)


def saved_handle(node: Any, name: str) -> Any:
    """What the graph holds in place of a tensor that a node saved; None where torch does not expose it."""
    return getattr(getattr(node, _RAW + name, None), "data", None)


def saved_of(node: Any, names: Sequence[str]) -> list[Any]:
    """saved_handle() of each of these names."""
    return [getattr(getattr(node, _RAW + name, None), "data", None) for name in names]


def raw_slot(name: str) -> str:
    """The attribute whose `data` saved_handle() gives."""
    return _RAW + name


def node_of(tensor: torch.Tensor) -> Any:
    """The node that made a tensor, None for one without. A view that was made without a graph has none either, where
    torch refuses to make one because its memory was modified with a graph: that is no error until it is used."""
    try:
        return tensor.grad_fn
    except RuntimeError:
        return None


RESHAPES = ("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0")
"""nodes of operators that give a tensor another shape, in its memory"""


def behind_reshapes(node: Any) -> Any:
    """The node that computed what a node gives in another shape; None stays None."""
    while node is not None and node.name() in RESHAPES:
        node = node.next_functions[0][0]
    return node


def repeated_dimensions(tensor: torch.Tensor) -> list[int]:
    """Along which a tensor was expanded: its elements there are one in memory."""
    return [n for n, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)) if size > 1 > stride]


def once(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without the elements that only repeat others in memory, since it was expanded."""
    for dimension in repeated_dimensions(tensor):
        tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def next_sequence_number() -> int:
    """What the next node that this thread makes is numbered with; nodes are numbered in the order of their making."""
    return torch._C._autograd._get_sequence_nr()


node_in_backward: Callable[[], Any] = torch._C._current_autograd_node
"""the node whose backward is running in this thread, None without one"""


without_torch_function: Any = torch._C._disabled_torch_function_impl
"""the __torch_function__ of a subclass of Tensor that has none of its own"""


tensor_without_memory: Callable[..., Any] = Tensor._make_wrapper_subclass
"""(subclass that has a __torch_dispatch__, shape, strides=, dtype=, device=) -> a tensor of it, without memory"""


SHOWS_SAVED = hasattr(torch._C._autograd.SavedTensor, "data")
"""whether the graph shows what it holds in place of a saved tensor"""
_slots: WeakKeyDictionary[type, tuple[str, ...]] = WeakKeyDictionary()
_constants: WeakKeyDictionary[type, tuple[str, ...]] = WeakKeyDictionary()


def saved_slots(node: Any) -> tuple[str, ...]:
    """The attributes in which a node saves tensors; of a function of Python's one, "tensors"."""
    kind = type(node)
    slots = _slots.get(kind)
    if slots is None:
        slots = _slots[kind] = tuple(name[len(_RAW) :] for name in dir(kind) if name.startswith(_RAW))
    return slots


def constants_of(node: Any) -> tuple[str, ...]:
    """The attributes in which a node keeps what it was given beside tensors."""
    kind = type(node)
    names = _constants.get(kind)
    if names is None:
        tensors = saved_slots(node)
        slots = (name[len(_SAVED) :] for name in dir(kind) if name.startswith(_SAVED))
        names = _constants[kind] = tuple(_SAVED + slot for slot in slots if slot not in tensors)
    return names


def saved_handles(node: Any) -> Iterator[tuple[str, Any]]:
    """(slot, what the graph holds in place of the tensor) of all that a node saved; nothing once it was freed."""
    for slot in saved_slots(node):
        try:
            saved = getattr(node, _RAW + slot)
        except RuntimeError:  # a backward has run, and freed a list of tensors
            return
        for item in saved if isinstance(saved, (tuple, list)) else (saved,):
            handle = getattr(item, "data", None)
            if handle is not None:
                yield slot, handle


def hides_saved(node: Any) -> bool:
    """Whether a node, of TorchScript, runs many operators and does not show what they saved."""
    return node is not None and "::DifferentiableGraph" in node.name()


def operators_of_script(graphs: int) -> list[str] | None:
    """The operators of what TorchScript ran last; None where it holds fewer differentiable graphs than given."""
    text = str(torch._C._last_executed_optimized_graph())
    return re.findall(r"aten::(\w+)", text) if text.count("= prim::DifferentiableGraph") >= graphs else None


def shape_of_output(node: Any, number: int) -> tuple[int, ...]:
    """The shape of a tensor that a node computed."""
    metadata = node._input_metadata  # of its backward: the gradient of that tensor is its input
    try:
        return tuple(metadata[number].shape) if number < len(metadata) else ()
    except RuntimeError:  # of a nested tensor
        return ()


def gradient_at(node: Any, number: int, gradient: torch.Tensor) -> torch.Tensor:
    """A gradient as autograd hands it to the node that made a tensor: in the tensor's shape and type."""
    metadata = node._input_metadata[number]
    if gradient.is_nested:
        return gradient
    if gradient.shape != metadata.shape:
        gradient = gradient.sum_to_size(metadata.shape)
    return gradient.to(metadata.dtype)


_RAW = "_raw_saved_"
_SAVED = "_saved_"


def saves_own_result(node: Any) -> bool:
    """Whether a node that saves its own result is doing so now: its slot for it is empty at no other time.

    The slot is not unpacked where torch shows what it holds: that of a node in a checkpoint would recompute the block.
    """
    slot = getattr(node, "_raw_saved_result", None)  # none in a function of Python's under the node's name
    if slot is None or hasattr(slot, "data"):
        return slot is not None and slot.data is None
    return node._saved_result is None


APPLY_HAS_FRAME = isinstance(vars(torch.autograd.Function)["apply"], classmethod)
"""whether Function.apply is written in Python: its frame then calls the pack hook for what a function saves"""


def function_of_context(context: Any) -> type | None:
    """The custom autograd function whose forward a context was made for."""
    return getattr(context, "_forward_cls", None)


def keeps_tensors(node: Any) -> bool:
    """Whether a custom autograd function saved any tensor."""
    return bool(node._raw_saved_tensors)


def attention_kernel(*tensors: Any, **options: Any) -> int:
    """The kernel that torch chooses for scaled_dot_product_attention, as an SDPBackend."""
    return torch._fused_sdp_choice(*tensors, **options)


def set_version(tensor: Tensor, version: int) -> None:
    """Set the number of times that a tensor was modified, as autograd counts them."""
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def verify_batch_size(size: Sequence[int]) -> None:
    """Raise what batch and group normalisation do, where a statistic would be that of a single value.

    size: (examples, channels, positions ...)
    """
    functional: Any = torch.nn.functional
    functional._verify_batch_size(list(size))


def global_backward_hooks() -> tuple[Any, ...]:
    """The mappings that hold the backward hooks of all modules."""
    return nn.modules.module._global_backward_hooks, nn.modules.module._global_backward_pre_hooks


# -- fake tensors, and what is dispatched ---------------------------------------------------------------------------

DispatchMode: Any = TorchDispatchMode
"""a mode that sees every operator that runs, below autograd"""


class RuntimeMode(TorchDispatchMode):
    """One that also sees the operators of compiled code, where that code dispatches any.

    torch.compile never compiles again, in the whole process, what it first meets under any other mode.
    """

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """See TorchDispatchMode; it is about how code is compiled, which sees no mode."""
        return True


PLAIN = (Tensor, FakeTensor)
"""the classes of tensors that have one storage and behave like any other; a fake one has no memory behind it"""
PLAIN_OR_PARAMETER = (*PLAIN, nn.Parameter)


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor has a shape, a type and a device, and no values."""
    return isinstance(tensor, FakeTensor)


@contextmanager
def fake_tensors() -> Iterator[Any]:
    """Within the context operators make fake tensors. Yields what makes them of real ones, with from_tensor()."""
    log = logging.getLogger(FakeTensorMode.__module__)
    level = log.level
    log.setLevel(logging.CRITICAL)  # it shows the trace of every error that it raises as well
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            converter: Any = mode.fake_tensor_converter
            # It keeps weak references to what operators return, and to() refuses to convert such a parameter.
            converter.set_tensor_memo = lambda *_: None
            yield mode
    finally:
        log.setLevel(level)


NEEDS_VALUES: Any = (DataDependentOutputException, DynamicOutputShapeException)
"""the errors of operators whose result, or its shape, depends on values that fake tensors do not have"""
TRUNC_NORMAL = "_no_grad_trunc_normal_"
"""the function of torch.nn.init that does the work of trunc_normal_()"""
without_fake_tensors: Any = unset_fake_temporarily
"""a context in which operators make real tensors"""


def current_fake_mode() -> Any:
    """The innermost such context, None outside; DTensor opens one of its own to find shapes."""
    return active_fake_mode()


def waits_for_collective(operator: Any) -> bool:
    """Whether an operator waits for a collective's result, which it returns. Its fake makes a new tensor instead."""
    return operator is torch.ops._c10d_functional.wait_tensor.default


def number_of(node: Any) -> int:
    """The number of a node, see next_sequence_number()."""
    return node._sequence_nr()


# -- modules ----------------------------------------------------------------------------------------------------

BatchNorm: Any = nn.modules.batchnorm._BatchNorm
"""the base class of all batch normalisation modules"""
POOLING: list[tuple[CodeType, int]] = [
    (function.__code__, int(name.split("max_pool")[1][0]))
    for name, function in vars(nn.functional).items()
    if "max_pool" in name and (name[0] == "_" or name.endswith("_with_indices"))  # the others choose between these
]
"""(code, number of dimensions) of the functions that find the largest of some elements; their operand is `input`"""
ORIGINAL_MODULE = "_orig_mod"
"""the attribute under which the result of torch.compile holds the module it was given"""


def run_by(module: nn.Module) -> tuple[str, Callable[..., Any]]:
    """(name, value) of the attribute that a call of a module runs: its forward, or once its compile() was called what
    that has made of its hooks and forward."""
    compiled = module._compiled_call_impl
    return ("forward", module.forward) if compiled is None else ("_compiled_call_impl", compiled)


def is_compiled(module: nn.Module) -> bool:
    """Whether a module was given to torch.compile, or its compile() was called."""
    return module._compiled_call_impl is not None or ORIGINAL_MODULE in module._modules


def has_compiled_parts(model: nn.Module) -> bool:
    """The same of a model or one of its modules."""
    pending, seen = [model], {model}  # model.modules() takes three times as long, in every step
    while pending:
        module = pending.pop()
        modules = module._modules
        if module._compiled_call_impl is not None or ORIGINAL_MODULE in modules:  # is_compiled(), without a call each
            return True
        for child in modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                pending.append(child)
    return False


# -- checkpoint -------------------------------------------------------------------------------------------------

CheckpointFrame: Any = torch_checkpoint._CheckpointFrame
"""the state of one call of a non-reentrant checkpoint"""
CheckpointHooks: Any = torch_checkpoint._checkpoint_hook
"""its hooks for what its block saves, made once it has saved the block's inputs"""
KeepingMode: Any = torch_checkpoint._CachingTorchDispatchMode
"""the dispatch mode of a selective checkpoint's forward"""
KeptMode: Any = torch_checkpoint._CachedTorchDispatchMode
"""of its recomputation"""


def inputs_of(call: Any) -> Any:
    """What a block is made again from: its positional arguments, as its checkpoint keeps them. call: its state."""
    if hasattr(call, "get_inputs"):
        return call.get_inputs()
    node = call.input_saver.grad_fn
    return node.get_args(node.saved_tensors)[1:]  # behind the keywords


_INPUT_SAVER: Any = getattr(torch_checkpoint, "_NoopSaveInputs", None)
"""the function that saves a block's inputs in an older torch (2.11)"""


def is_no_input(tensor: Tensor, frame: FrameType) -> bool:
    """Whether a tensor that a checkpoint saves is none of its block's inputs: that function is given one more, so that
    it has a graph. frame: of the caller of the pack hook."""
    if _INPUT_SAVER is None or frame.f_locals.get("cls") is not _INPUT_SAVER:
        return False
    return frame.f_locals["args"][0] is tensor


def bypass_hooks(mode: Any) -> None:
    """Have what a selective checkpoint keeps bypass hooks, unless the job says otherwise.

    It does in torch 2.13. From 2.14 on a checkpoint has an argument for it (pytorch issue 191236); where a job leaves
    that out, torch warns, and in a later version it is to be an error. mode: a KeepingMode.
    """
    if getattr(mode, RESPECTS_HOOKS, False) is None:
        setattr(mode, RESPECTS_HOOKS, False)


RESPECTS_HOOKS = "respect_saved_tensors_hooks"
"""the argument of a checkpoint, and attribute of its mode (torch 2.14)"""


def load_compiler() -> None:
    """Import what torch imports the first time that one of its functions is kept from being compiled: in nearly all
    jobs that is when the optimizer is made."""
    importlib.import_module("torch._dynamo")


@contextmanager
def checkpoint_calls(replacement: Callable[..., Any]) -> Iterator[None]:
    """Within the context calls of torch.utils.checkpoint.checkpoint, whoever holds a reference to it, become calls of
    replacement(checkpoint, *args, **kwargs), but for those in a region that is being compiled."""
    decorated: Any = torch_checkpoint.checkpoint
    original = decorated.__wrapped__  # decorated to be left out of compilation: what it calls is looked up each time
    before = original.__dict__.get(_UNCOMPILED)

    def replaced_when_run(*args: Any, **kwargs: Any) -> Any:
        if TracingContext.try_get() is not None:
            return original(*args, **kwargs)
        return replacement(original, *args, **kwargs)

    setattr(original, _UNCOMPILED, replaced_when_run)
    try:
        yield
    finally:
        if before is None:
            delattr(original, _UNCOMPILED)
        else:
            setattr(original, _UNCOMPILED, before)


_UNCOMPILED = "__dynamo_disable"


def is_ignored_by_selective(operator: Any) -> bool:
    """Whether selective checkpoints leave an operator out of their cache."""
    return operator in torch_checkpoint.SAC_IGNORED_OPS


def selective_key(operator: Any, args: tuple) -> Any:
    """The key under which a selective checkpoint caches an operator's results; an older torch uses the operator."""
    key_of = getattr(torch_checkpoint, "_sac_storage_key", None)
    return operator if key_of is None else key_of(operator, args)


_enter_mode = KeptMode.__enter__
RUNS_COUNT_CALLS = "__enter__" in vars(KeptMode)
"""whether each run of a selective checkpoint's recomputation counts the calls of an operator from the first on"""


def enter_with_all(mode: Any) -> Any:
    """In place of KeptMode.__enter__: each run finds all that was kept.

    An older torch (2.11) takes it from the front of a list for each operator, and asks the policy again, which may
    count its calls: a run gets lists of its own, and the policy is asked once about each call.
    """
    storage, policy, decisions = vars(mode).setdefault("whole", (mode.storage, mode.policy_fn, {}))
    calls: Counter[Any] = Counter()

    def decide(context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
        call = operator, calls[operator]
        calls[operator] += 1
        if call not in decisions:
            decisions[call] = policy(context, operator, *args, **kwargs)
        return decisions[call]

    mode.storage = {operator: [*kept] for operator, kept in storage.items()}
    mode.policy_fn = decide
    return _enter_mode(mode)


def dispatch_again(
    dispatch: Callable[..., Any], mode: Any, operator: Any, types: Any, args: tuple, kwargs: Any
) -> tuple[Any, bool]:
    """(what the dispatch of a KeptMode returns, whether that was in its cache, where it stays for further runs)."""
    key = selective_key(operator, args)
    if not hasattr(mode, "func_counter"):
        left = len(mode.storage.get(key, ()))
        result = dispatch(mode, operator, types, args, kwargs)
        return result, len(mode.storage.get(key, ())) < left
    number = mode.func_counter[key]
    cached = mode.storage.get(key, {}).get(number)
    result = dispatch(mode, operator, types, args, kwargs)
    was_cached = mode.storage[key][number] is not cached
    mode.storage[key][number] = cached
    return result, was_cached


POLICY_SEES_RESULT = "op_output" in signature(torch_checkpoint.SelectiveCheckpointContext).parameters
"""whether the policy of a selective checkpoint is asked once an operator has run; an older torch (2.11) asks before"""


def selective_context(result: Any) -> Any:
    """What a policy is given with an operator of the forward. result: of the operator."""
    given = {"op_output": result} if POLICY_SEES_RESULT else {}
    return torch_checkpoint.SelectiveCheckpointContext(is_recompute=False, **given)


Overload: Any = torch._ops.OpOverload
"""the class of operators that have a schema"""


def has_effects(operator: Any) -> bool:
    """Whether a selective checkpoint keeps an operator's results in any case, as to run it again would do more than
    make them (torch 2.15)."""
    known = getattr(torch_checkpoint, "_is_cacheable_effect", None)
    return known is not None and bool(known(operator))


def modes_of_checkpoint(frame: FrameType) -> tuple[Any, Any] | None:
    """(context of the forward, context of the recomputation) of a non-reentrant checkpoint that has yet to run.

    frame: of code of the checkpoint, or called by it.
    """
    caller: FrameType | None = frame
    while caller is not None:
        found = caller.f_locals if caller.f_code.co_filename == torch_checkpoint.__file__ else {}
        if "forward_context" in found and "recompute_context" in found:
            return found["forward_context"], found["recompute_context"]
        if caller.f_code.co_name == "checkpoint" and found:
            return None
        caller = caller.f_back
    return None


def counting_versions() -> Any:
    """A context for code in a dispatch mode: what is detached in it shares the tensor's counter of versions."""
    return torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False)


# -- compile ----------------------------------------------------------------------------------------------------

untraced: Any = torch._disable_dynamo
"""A decorator: the compiler does not look into the function."""
COMPILED_RUNTIME = os.path.join(DIRECTORY, "_functorch", "_aot_autograd")
COMPILED_FUNCTIONS = "torch._functorch."
"""the modules of the autograd functions that compiled regions are"""
COMPILER = os.path.join(DIRECTORY, "_dynamo")


def hooks_in_graphs() -> Any:
    """A context: hooks that are graph modules are traced into compiled graphs, but not for their static inputs."""
    import torch._functorch.config as settings

    return settings.patch(saved_tensors_hooks_filtering_mode="no_static")


def graphs_being_made() -> dict[str, Any] | None:
    """The node that is being given hooks while a graph is compiled, and both graphs; None at any other time."""
    from torch._functorch._aot_autograd.graph_compile import _get_saved_tensor_hook_context

    return _get_saved_tensor_hook_context()


def is_being_noted() -> bool:
    """Whether the compiler is recording what runs now into a graph."""
    from torch.fx.experimental import proxy_tensor

    return proxy_tensor._CURRENT_MAKE_FX_TRACER is not None


def static_inputs(frame: FrameType | None) -> set[int]:
    """The indices of the static inputs of the graph that is being given hooks; torch's context does not have them.

    frame: the search for torch's own frame starts at its caller. Raises RuntimeError if there is none.
    """
    while frame is not None and "static_input_indices" not in frame.f_locals:
        frame = frame.f_back
    if frame is None:
        raise RuntimeError(
            f"torch {torch.__version__} does not tell hooks which inputs of a graph are parameters; use "
            "compile_hooks='eager'"
        )
    return set(frame.f_locals["static_input_indices"])
