"""A job that the user names as MODULE:FUNCTION: the model, its batch and its loss, and one message where they fail."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from .._errors import says_out_of_memory
from .._torch_internals import NEEDS_VALUES
from .output import CommandError

JobArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODULE:FUNCTION",
        help="A function that returns (model, batch), the model's output being the loss or having one, or "
        "(model, batch, loss_fn), loss_fn(batch) being the loss; package.module:function or path/to/file.py:function.",
    ),
]
_LIBRARIES = ("site-packages", "dist-packages")
_PACKAGE = str(Path(__file__).resolve().parents[1])


@dataclass(frozen=True)
class Job:
    """What a command tries: one step is `loss_fn(batch).backward()`."""

    model: nn.Module
    batch: Any
    loss_fn: Callable[[Any], Tensor]
    """loss_fn(batch): the scalar loss"""


_NEEDS_VALUES = (
    ", which depends on values, and with --fake or a layout tensors have none: leave that out, or have the function "
    "take another way there (a number in place of item(), a mask in place of nonzero())"
)
_TOO_LARGE = (
    "\n  this machine has too little memory for it: give a smaller batch; `gact-dist profile --fake` takes no memory, "
    "and says how much the job would"
)
_SAYS_NO_GPU = ("Torch not compiled with CUDA enabled", "Found no NVIDIA driver", "No CUDA GPUs are available")
_NO_GPU = (
    "\n  torch sees no GPU on this machine, and `gact-dist doctor` says why: have the function take the CPU where "
    "torch.cuda.is_available() is False"
)
_NO_FAKE_EXPERTS = (
    "\n  torch has no fake kernel for the experts of a mixture in another type than bfloat16: give --dtype bfloat16"
)


class UserCode(AbstractContextManager[Any]):
    """A context in which the user's code runs: what it raises becomes a CommandError with the user's own line.

    It is a class because every error counts, of whatever type: they are not ours to choose among.
    """

    def __init__(self, doing: str) -> None:
        """doing: for the message, "building the model"."""
        self._doing = doing

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, (KeyboardInterrupt, GeneratorExit, CommandError)):
            return
        text = (str(error).strip().splitlines() or [""])[0]
        kind_of_error = "" if _is_refusal(error, trace) else f"{type(error).__name__}: "
        needs = _NEEDS_VALUES if isinstance(error, NEEDS_VALUES) else ""
        raise CommandError(
            f"{self._doing} failed: {kind_of_error}{text}{needs}{_own_line(trace)}{_mend(error)}"
        ) from None


def load_job(name: str, *arguments: Any) -> Job:
    """What the function called `name` returns. arguments: for it. Raises CommandError."""
    function = load_function(name, *arguments)
    with UserCode(f"{name}({', '.join(map(str, arguments))})"):
        made = function(*arguments)
    return job_of(name, made)


def load_function(name: str, *arguments: Any) -> Callable[..., Any]:
    """The function called MODULE:FUNCTION or FILE.py:FUNCTION, which takes these arguments. Raises CommandError."""
    module_name, separator, function_name = name.rpartition(":")
    if not separator or not module_name or not function_name:
        raise CommandError(
            f"{name!r} names no function, expected MODULE:FUNCTION such as my_package.jobs:small or jobs.py:small"
        )
    module = _load_file(Path(module_name)) if module_name.endswith(".py") else _load_module(module_name)
    function = getattr(module, function_name, None)
    if function is None:
        known = [key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")]
        raise CommandError(
            f"{module_name} has no function {function_name!r}, expected one of its own: {', '.join(known) or 'none'}"
        )
    if not callable(function):
        raise CommandError(f"{name} is of type {type(function).__name__}, expected a function")
    _check_takes(name, function, arguments)
    return function


def _check_takes(name: str, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    try:
        inspect.signature(function).bind(*arguments)
    except ValueError:  # it is written in C, and does not say
        return
    except TypeError as error:
        call = f"{name}({', '.join(map(str, arguments))})"
        mend = "takes these arguments" if arguments else "can be called without arguments: give them defaults"
        raise CommandError(f"{call} is not possible: {error}; expected a function that {mend}") from None


def _load_module(name: str) -> ModuleType:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        with UserCode(f"importing {name}"):
            return importlib.import_module(name)
    except CommandError:
        if _is_there(name):
            raise
        raise CommandError(
            f"there is no module {name!r}, expected one that can be imported from {Path.cwd()}: check its name and the "
            "folder, or give a file as path/to/file.py:FUNCTION"
        ) from None


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ModuleNotFoundError, ValueError):  # of a package that it is said to be in
        return False


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise CommandError(f"there is no file {path}, expected path/to/file.py:FUNCTION")
    folder = str(path.resolve().parent)
    if folder not in sys.path:  # so that it imports its neighbours as a script does
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise CommandError(f"{path} cannot be imported, expected a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    with UserCode(f"importing {path}"):
        spec.loader.exec_module(module)
    return module


def job_of(name: str, made: Any) -> Job:
    """The job that a function of the user's returned. name: the function's. Raises CommandError."""
    parts = list(made) if isinstance(made, (tuple, list)) else [made]
    if len(parts) not in (2, 3) or not isinstance(parts[0], nn.Module):
        kinds = ", ".join(type(part).__name__ for part in parts)
        raise CommandError(
            f"{name} returned ({kinds}), expected (model, batch) or (model, batch, loss_fn), the model being a "
            "torch.nn.Module"
        )
    model, batch = parts[:2]
    if len(parts) == 2:
        _check_fits(name, model, batch)
        return Job(model, batch, lambda batch: loss_of(model, batch))
    if not callable(parts[2]):
        raise CommandError(
            f"{name} returned a {type(parts[2]).__name__} as loss_fn, expected a function: loss_fn(batch) is the loss"
        )
    return Job(model, batch, parts[2])


def _arguments_of(batch: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    if isinstance(batch, Mapping):
        return (), batch
    return (batch if isinstance(batch, (tuple, list)) else (batch,)), {}


def _check_fits(name: str, model: nn.Module, batch: Any) -> None:
    """Raise CommandError where a model's forward does not take what is in the batch."""
    arguments, keywords = _arguments_of(batch)
    try:
        inspect.signature(model.forward).bind(*arguments, **keywords)
    except ValueError:  # it is written in C++, and does not say
        return
    except TypeError as error:
        raise CommandError(
            f"{name} returned a batch that the forward of {type(model).__name__} does not take: {error}; a mapping is "
            "given as keywords, a tuple as arguments; for any other call return (model, batch, loss_fn), where loss_fn "
            "of a LightningModule may be lambda batch: model.training_step(batch, 0)"
        ) from None


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    """The loss that a model returns, or that its output has. A mapping is given as keywords, a tuple as arguments."""
    arguments, keywords = _arguments_of(batch)
    output = model(*arguments, **keywords)
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    if isinstance(loss, Sequence) and loss and isinstance(loss[0], Tensor):
        loss = loss[0]
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss
    got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(output).__name__}"
    raise CommandError(
        f"the model returned {got}, expected the loss, or an output with a loss: give the batch its labels, or return "
        "(model, batch, loss_fn), where loss_fn(batch) is the loss"
    )


def _mend(error: BaseException) -> str:
    """What to do about an error of torch that says what this machine lacks; empty for any other."""
    text = f"{type(error).__name__}: {error}"
    if says_out_of_memory(text):
        return _TOO_LARGE
    if any(words in text for words in _SAYS_NO_GPU) and not torch.cuda.is_available():
        return _NO_GPU
    return _NO_FAKE_EXPERTS if "Expected inputs of BF16 type" in text else ""


def _is_refusal(error: BaseException, trace: TracebackType | None) -> bool:
    """Whether the package itself refused what it was given, in words that need no name of a class before them."""
    frames = traceback.extract_tb(trace)
    return isinstance(error, (ValueError, TypeError)) and bool(frames) and frames[-1].filename.startswith(_PACKAGE)


def _own_line(trace: TracebackType | None) -> str:
    """Where the user's code was, of a traceback that ends in some library."""
    frames = traceback.extract_tb(trace)
    own = [frame for frame in frames if not _is_foreign(frame.filename)]
    if not own:
        return ""
    last = own[-1]
    return f"\n  {last.filename}:{last.lineno}, in {last.name}: {last.line}"


def _is_foreign(path: str) -> bool:
    return path.startswith((_PACKAGE, "<")) or any(f"/{part}/" in path for part in _LIBRARIES) or "/lib/python3" in path
