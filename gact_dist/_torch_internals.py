"""Everything of torch that the package reads and that torch does not document, but for what frameworks are asked for.

What is known of a framework's insides (FSDP, DTensor, DeepSpeed) stands in its file of distributed/. NEEDED names all
of it, and tests/test_torch_internals.py fails on a torch that lacks any of it.
"""

import os
from types import FrameType
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

CHECKED_WITH = "2.13"
"""of torch, by all tests; 2.11 is the oldest that is supported"""

NEEDED = (
    # autograd
    "torch._C._current_graph_task_id",
    "torch._C._autograd._top_saved_tensors_default_hooks",
    "torch.Tensor._base",
    "torch.Tensor._is_view",
    "torch.Tensor._version",
    "torch.UntypedStorage._cdata",
    "torch.multiprocessing.reductions.StorageWeakRef",
    "torch._fused_sdp_choice",
    # modules
    "torch.nn.Module._compiled_call_impl",
    "torch.nn.Module._wrapped_call_impl",
    "torch.nn.modules.batchnorm._BatchNorm",
    # checkpoint
    "torch.utils.checkpoint._CheckpointFrame",
    "torch.utils.checkpoint._CachingTorchDispatchMode",
    "torch.utils.checkpoint._CachedTorchDispatchMode",
    "torch.utils.checkpoint.SAC_IGNORED_OPS",
    # compile
    "torch._disable_dynamo",
    "torch._functorch.config.saved_tensors_hooks_filtering_mode",
    "torch._functorch._aot_autograd.graph_compile._get_saved_tensor_hook_context",
    "torch.fx.experimental.proxy_tensor._CURRENT_MAKE_FX_TRACER",
    # frameworks: distributed/
    "torch.distributed.fsdp.FSDPModule._get_fsdp_state",
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._lazy_init",
    "torch.distributed.pipelining.stage._PipelineStageBase.forward_one_chunk",
    "torch.distributed._functional_collectives.AsyncCollectiveTensor",
)
"""Dotted names that must exist"""

DIRECTORY = os.path.dirname(torch.__file__)
"""in which torch's own frames have their files"""

# -- autograd ---------------------------------------------------------------------------------------------------


def in_backward() -> bool:
    """Whether a backward pass is running in this thread."""
    return torch._C._current_graph_task_id() != -1


def innermost_hooks() -> Any:
    """The (pack, unpack) hooks for saved tensors that are innermost in this thread; None without any."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def storage_id(tensor: Tensor) -> int:
    """A number for a tensor's storage, that no other storage has while this one, or a weak reference to it, lives."""
    return tensor.untyped_storage()._cdata


def storage_reference(tensor: Tensor) -> Any:
    """A weak reference to a tensor's storage: it pins the address, not the memory."""
    return StorageWeakRef(tensor.untyped_storage())


def saved_handle(node: Any, name: str) -> Any:
    """What the graph holds in place of a tensor that a node saved; None where torch does not show it."""
    return getattr(getattr(node, f"_raw_saved_{name}"), "data", None)


def saves_own_result(node: Any) -> bool:
    """Whether a node that saves its own result is doing so now: its slot for it is empty at no other time."""
    return node._saved_result is None


def keeps_tensors(node: Any) -> bool:
    """Whether a custom autograd function saved any tensor."""
    return bool(node._raw_saved_tensors)


def attention_kernel(*tensors: Any, **options: Any) -> int:
    """The kernel that torch chooses for scaled_dot_product_attention, a value of SDPBackend."""
    return torch._fused_sdp_choice(*tensors, **options)


# -- modules ----------------------------------------------------------------------------------------------------

BatchNorm: Any = nn.modules.batchnorm._BatchNorm
"""of all modules of batch normalisation"""
ORIGINAL_MODULE = "_orig_mod"
"""under which what torch.compile returns holds the module that it was given"""


def is_compiled(module: nn.Module) -> bool:
    """Whether a module was given to torch.compile, or its compile() was called."""
    return module._compiled_call_impl is not None or ORIGINAL_MODULE in module._modules


# -- checkpoint -------------------------------------------------------------------------------------------------

CheckpointFrame: Any = torch_checkpoint._CheckpointFrame
"""of one call of a non-reentrant checkpoint"""
KeepingMode: Any = torch_checkpoint._CachingTorchDispatchMode
"""of the forward of a selective checkpoint"""
KeptMode: Any = torch_checkpoint._CachedTorchDispatchMode
"""of its recomputation"""


def is_ignored_by_selective(operator: Any) -> bool:
    """Whether selective checkpoints leave an operator out of their cache."""
    return operator in torch_checkpoint.SAC_IGNORED_OPS


def selective_key(operator: Any, args: tuple) -> Any:
    """Under which a selective checkpoint caches what an operator gave; an older torch takes the operator alone."""
    key_of = getattr(torch_checkpoint, "_sac_storage_key", None)
    return operator if key_of is None else key_of(operator, args)


# -- compile ----------------------------------------------------------------------------------------------------

untraced: Any = torch._disable_dynamo
"""A decorator: the compiler does not look into the function."""
COMPILED_RUNTIME = os.path.join(DIRECTORY, "_functorch", "_aot_autograd")
COMPILER = os.path.join(DIRECTORY, "_dynamo")


def hooks_in_graphs() -> Any:
    """A context: hooks that are graph modules are traced into compiled graphs, but not for their static inputs."""
    import torch._functorch.config as settings

    return settings.patch(saved_tensors_hooks_filtering_mode="no_static")


def graphs_being_made() -> dict[str, Any] | None:
    """The node of a compiled graph that is being given hooks, and both graphs; None while no graph is made."""
    from torch._functorch._aot_autograd.graph_compile import _get_saved_tensor_hook_context

    return _get_saved_tensor_hook_context()


def is_being_noted() -> bool:
    """Whether the compiler notes what runs now in a graph."""
    from torch.fx.experimental import proxy_tensor

    return proxy_tensor._CURRENT_MAKE_FX_TRACER is not None


def static_inputs(frame: FrameType | None) -> set[int]:
    """The numbers of the static inputs of the graph that is being given hooks: torch's context does not have them.

    frame: below which torch's own is searched. Raises RuntimeError where it is not found.
    """
    while frame is not None and "static_input_indices" not in frame.f_locals:
        frame = frame.f_back
    if frame is None:
        raise RuntimeError(
            f"torch {torch.__version__} does not tell hooks which inputs of a graph are parameters; use "
            "compile_hooks='eager'"
        )
    return set(frame.f_locals["static_input_indices"])
