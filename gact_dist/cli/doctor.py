"""`gact-dist doctor`: whether this machine has what the package needs, and what to do about what it lacks."""

from __future__ import annotations

import os
import platform
import resource
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import Enum
from importlib import metadata
from pathlib import Path

import torch
import typer
from rich.markup import escape
from rich.table import Table
from torch import distributed

import gact_dist

from .. import codec
from .._short_ways import IS_BUILT, NOT_BUILT
from .._torch_internals import VERSION
from .malloc_settings import MALLOC_SETTINGS
from .output import FOUND_BROKEN, JsonOption, show, shown_bytes

_LEAST_TORCH = (2, 11)
_FRAMEWORKS = ("transformers", "DeepSpeed", "accelerate", "lightning", "trl", "peft")
_SEEN_BY_GROUP = Path("/sys/fs/cgroup/memory.max")
_LITTLE_SHARED_BYTES = 1 << 30


class State(Enum):
    """What a check says."""

    FINE = "fine"
    ABSENT = "absent"  # not there, and not needed by every job
    BROKEN = "broken"


@dataclass(frozen=True)
class Check:
    """One line of the command."""

    what: str
    state: State
    found: str
    mend: str = ""


def command(as_json: JsonOption = False) -> None:
    """Say whether this machine has what gact_dist needs, and what to do about what it lacks.

    Exit code 1 if something is broken.

    [dim]Example:[/dim]
    $ gact-dist doctor
    $ gact-dist doctor --json > machine.json
    """
    checks = [*_versions(), _native(), _hooks(), *_cuda(), _gloo(), *_memory()]
    broken = any(check.state is State.BROKEN for check in checks)
    found = {"broken": broken, "checks": [{**asdict(check), "state": check.state.value} for check in checks]}
    show(found, as_json, _table(checks))
    if broken:
        raise typer.Exit(FOUND_BROKEN)


def _table(checks: list[Check]) -> Table:
    signs = {State.FINE: "[green]✓[/]", State.ABSENT: "[dim]-[/]", State.BROKEN: "[bold red]✗[/]"}
    table = Table("", "", "found", "what to do", box=None, pad_edge=False)
    for check in checks:
        table.add_row(signs[check.state], check.what, escape(check.found), escape(check.mend))
    return table


# -- software --------------------------------------------------------------------------------------------------------


def _versions() -> Iterator[Check]:
    yield Check("gact_dist", State.FINE, gact_dist.__version__)
    yield Check("python", State.FINE, platform.python_version())
    least = ".".join(map(str, _LEAST_TORCH))
    is_old = tuple(int(part) for part in VERSION.split(".")[:2]) < _LEAST_TORCH
    mend = f"pip install 'torch>={least}'" if is_old else ""
    yield Check("torch", State.BROKEN if is_old else State.FINE, VERSION, mend)
    yield Check("numpy", State.FINE, metadata.version("numpy"))
    for name in _FRAMEWORKS:
        try:
            yield Check(name, State.FINE, metadata.version(name))
        except metadata.PackageNotFoundError:
            yield Check(name, State.ABSENT, "not installed", "needed only by jobs that use it")


def _native() -> Check:
    """The library of the CPU kernels, and whether what it packs can be read."""
    if codec.isa() == "reference":
        return Check("native library", State.BROKEN, "the slow PyTorch reference is in use", codec.native_error)
    values = torch.linspace(-1, 1, 4096, device="cpu")
    error = (codec.unpack(codec.pack(values, bits=8, seed=0)) - values).abs().max().item()
    if error > 2 * 2 / 255:  # a step of 8 bits over a range of 2, and the rounding of the range itself
        return Check("native library", State.BROKEN, f"wrong values, off by {error:.3g}", "report this as a bug")
    return Check("native library", State.FINE, f"loaded, {codec.isa()} kernels")


def _hooks() -> Check:
    """The module of the hooks."""
    if IS_BUILT:
        return Check("native hooks", State.FINE, "loaded")
    mend = "install a C++17 compiler and the headers of Python, such as python3-dev, and run pip install again"
    return Check("native hooks", State.BROKEN, f"each saved tensor takes more of the host's time: {NOT_BUILT}", mend)


# -- the GPU ---------------------------------------------------------------------------------------------------------


def _cuda() -> Iterator[Check]:
    present = torch.cuda.is_available()
    lacking = State.BROKEN if present else State.ABSENT
    if present:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        found = f"{properties.name}, {shown_bytes(properties.total_memory)}, sm_{properties.major}{properties.minor}"
        yield Check("GPU", State.FINE, f"{torch.cuda.device_count()} x {found}")
    else:
        built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs only"
        yield Check("GPU", State.ABSENT, f"none is seen; torch is built for {built}", "jobs on a CPU do without")
    try:
        version = ".".join(map(str, codec.find_nvrtc().version()))
        yield Check("NVRTC", State.FINE, f"{version}, compiles the GPU kernels")
    except codec.KernelsUnavailableError as error:
        yield Check("NVRTC", lacking, str(error), "" if present else "needed on a GPU only")
    try:
        codec.find_driver()
        yield Check("CUDA driver", State.FINE, "loaded")
    except (codec.KernelsUnavailableError, codec.DriverError) as error:
        yield Check("CUDA driver", lacking, str(error), "" if present else "needed on a GPU only")
    yield _pinned() if present else Check("pinned memory", State.ABSENT, "needs a GPU", "levels with offload need it")


def _pinned() -> Check:
    try:
        torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True, device="cpu")
    except RuntimeError as error:
        mend = "raise the limit of locked memory (ulimit -l, or the container's --ulimit memlock=-1)"
        return Check("pinned memory", State.BROKEN, str(error).splitlines()[0], mend)
    return Check("pinned memory", State.FINE, "can be had")


# -- ranks and memory ------------------------------------------------------------------------------------------------


def _gloo() -> Check:
    """Whether ranks on this machine can talk: a group of one is made, and ended."""
    name = "process group"
    if not distributed.is_available() or not distributed.is_gloo_available():
        return Check(name, State.BROKEN, "torch is built without gloo", "install torch from pytorch.org")
    if distributed.is_initialized():
        return Check(name, State.FINE, f"of {distributed.get_world_size()} ranks, {distributed.get_backend()}")
    try:
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    except RuntimeError as error:
        mend = "name the network interface: GLOO_SOCKET_IFNAME=lo for one machine"
        return Check(name, State.BROKEN, f"gloo: {str(error).splitlines()[0]}", mend)
    distributed.destroy_process_group()
    nccl = "and nccl" if distributed.is_nccl_available() else "only: GPUs would need nccl"
    return Check(name, State.FINE, f"gloo {nccl}")


def _memory() -> Iterator[Check]:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    yield Check("RAM", State.FINE, f"{shown_bytes(total)}, {shown_bytes(free)} free; {os.cpu_count()} CPUs")
    yield _malloc()
    limits = [f"{name} {shown_bytes(limit)}" for name, limit in _limits()]
    yield Check("limits of memory", State.FINE, ", ".join(limits) or "none", "max-batch needs less" if limits else "")
    shared = os.statvfs("/dev/shm") if Path("/dev/shm").is_dir() else None
    if shared is not None:
        size = shared.f_frsize * shared.f_blocks
        little = size < _LITTLE_SHARED_BYTES
        mend = "DataLoader workers and gloo may want more: --shm-size=4g in a container" if little else ""
        yield Check("shared memory", State.ABSENT if little else State.FINE, shown_bytes(size), mend)


def _malloc() -> Check:
    """Whether glibc gives a freed tensor back; by itself it keeps those below 32 MiB in a heap."""
    name = "malloc settings"
    if platform.libc_ver()[0] != "glibc":
        return Check(name, State.FINE, "not needed: the C library is not glibc")
    unset = {variable: value for variable, value in MALLOC_SETTINGS.items() if not os.environ.get(variable)}
    if not unset:
        return Check(name, State.FINE, ", ".join(f"{variable}={os.environ[variable]}" for variable in MALLOC_SETTINGS))
    mend = "for jobs on a CPU, before they start: export " + " ".join(f"{key}={value}" for key, value in unset.items())
    return Check(name, State.ABSENT, "not set: glibc keeps freed memory, which hides what is saved on a CPU", mend)


def _limits() -> Iterator[tuple[str, int]]:
    for name, number in (("address space", resource.RLIMIT_AS), ("data", resource.RLIMIT_DATA)):
        limit = resource.getrlimit(number)[0]
        if limit != resource.RLIM_INFINITY:
            yield name, limit
    if _SEEN_BY_GROUP.is_file():
        of_group = _SEEN_BY_GROUP.read_text().strip()
        if of_group.isdigit():
            yield "of the container", int(of_group)
