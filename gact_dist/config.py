"""Settings of gact_dist: the frozen Config, the levels by name, and their validation."""

import difflib
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from .codec import GROUP_SIZES

POLICIES = ("gact", "actnn", "uniform", "acgc", "exact", "off")
_MEASURING = ("gact", "actnn", "acgc")  # policies that adapt bits to sensitivities
ESTIMATORS = ("one-pass", "perturbation")
COMPRESSORS = ("fixed-point", "error-bounded")
COMPILE_HOOKS = ("eager", "inlined")
LAYOUTS = ("columns", "memory")
LOG_SOFTMAX = ("sampled", "exact")
_DEFAULT_BITS = {"actnn": 2.0}  # 4 with the other policies


@dataclass(frozen=True, kw_only=True)
class Offload:
    """Payloads in pinned host memory: sent there after they are packed, brought back before backward asks for them."""

    enabled: bool = False
    """false keeps everything on the device; true needs a CUDA device"""
    max_host_bytes: int = 0
    """Pinned host memory that a rank may use, in bytes; 0 for half of what the host has free, shared by its ranks."""
    max_device_bytes: int = 0
    """Payload bytes that may stay on the device: just enough payloads leave, even if backward then waits for copies.
    0: as many leave as can come back without a wait."""
    prefetch: int = 2
    """Payloads that are brought back ahead of the one that backward asks for. With 0 backward waits for each, so after
    the first step none leaves unless max_device_bytes requires it."""
    min_bytes: int = 65536
    """Payloads of fewer bytes stay on the device."""

    def __post_init__(self) -> None:
        _check_flag("offload.enabled", self.enabled)
        for name, least in (("max_host_bytes", 0), ("max_device_bytes", 0), ("prefetch", 0), ("min_bytes", 1)):
            _check_integer(f"offload.{name}", getattr(self, name), least)


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of one attached model; every rank must use the same ones.

    Raises ValueError (or TypeError for a wrong type) at construction when a value cannot be used.
    """

    policy: str = "gact"
    """gact: bits for each tensor from its measured effect on the gradient (GACT, Liu et al., ICML 2022, section 4);
    actnn: the same for each example of each tensor (ActNN, Chen et al., ICML 2021, section 4);
    uniform: the same bits for every tensor; acgc: the fewest bits within an error bound (AC-GC, Evans and Aamodt,
    NeurIPS 2021); exact: all the machinery, every tensor stored exactly; off: nothing."""
    bits: float | None = None
    """Average bits per element of a compressible tensor, 1 to 8; policies gact and actnn take fractions such as 2.5,
    and add a bit for each element that is derived (see derive). Without this or another budget, 2 with policy actnn and
    4 with others. Only with policies gact, actnn and uniform."""
    retained_bytes: int | None = None
    """Bytes that a rank may keep from forward to backward in a step, everything counted as report() counts it; the bits
    follow (policy gact, in place of bits). Holds from the first adaptation on."""
    error: float | None = None
    """Tolerated relative increase of the gradient's second moment through compression, e^2 in AC-GC; needed with policy
    acgc and only there. 0.25 lets the mean of the squared gradient grow by a quarter."""
    compressor: str = "fixed-point"
    """With policy acgc, how a tensor uses the variance it is allowed: fixed-point: the same width for all of its
    groups; error-bounded: each group as wide as one error bound for the tensor requires, no bits for zeros (on a CPU;
    elsewhere as fixed-point, because the host would have to wait for the size)."""
    estimator: str = "one-pass"
    """How sensitivities are measured (policies gact, actnn and acgc): one-pass: all tensors from one double backward;
    perturbation: GACT's own, one backward for each tensor."""
    adapt_interval: int = 1000
    """Optimizer steps between two adaptations (policies gact, actnn and acgc); forwards, where no torch.optim optimizer
    holds the model's parameters. The first step that is given a loss function adapts as well; where nothing could be
    measured, it is tried again 1, 8, 64 and 512 steps later; and with acgc any step after the error bound was found to
    be exceeded."""
    adapt_tolerance: float = 0.1
    """The current plan is kept if a fresh one would gain no more than this fraction: less gradient variance, or with
    policy acgc fewer bits. With policies gact and actnn the steps to the next adaptation then double, up to 8 times
    adapt_interval. 0: never kept."""
    noise_limit: float = 100.0
    """How many times its prediction the squared error of the gradient under a plan may be. Before a plan is used, the
    gradient under it is compared with the exact one on part of the batch. Beyond the limit, or where rounding makes the
    gradient infinite or NaN, the tensors that cause it are searched for and stored exactly from then on. With policy
    uniform the first step that is given a loss function compares. 0: nothing is compared."""
    watch_interval: int = 1000
    """Steps (forwards) from one such comparison to the next, of the plan in use; at first in steps 2, 4, 8 and so on.
    Beyond the limit bits adapt at once; with policy uniform the tensors that cause it are stored exactly. Needs steps
    that are given a loss function, or follow(); policy acgc has draws of its own. 0: only new plans are compared."""
    calibration_samples: int = 8
    """Examples of the batch on which sensitivity is measured (leading dimension of its tensors)."""
    blocks: Sequence[str] = ()
    """Paths of modules ("encoder.layers.3") that are measured one at a time, in addition to those that are found: units
    of sharding, and what a model repeats. Smaller blocks take less memory in an adaptation."""
    group_size: int = 128
    """Consecutive elements, of memory or of one channel, that share one scale and offset: 64, 128, 256 or 512."""
    layout: str = "columns"
    """columns: groups of one channel where a tensor's shape shows channels, which have less variance; memory: groups of
    consecutive elements of memory. On a GPU a step took no less time with these (docs/gpu.md)."""
    pack_stream: bool = False
    """Round tensors on a CUDA stream of their own, beside the kernels of the forward; not together with offload. It did
    not pay where it was measured (docs/gpu.md)."""
    min_numel: int = 1024
    """Tensors with fewer elements are stored exactly."""
    checkpoint_inputs: bool = True
    """Compress the inputs of checkpointed blocks as well; false keeps them exactly."""
    recomputed: bool = False
    """Compress what a checkpointed block saves while it runs again in the backward, which with many layers is most of
    what checkpointing leaves in memory. For non-reentrant checkpoints and policies that measure sensitivities. The
    average of bits is of what is there at once: the inputs of all blocks, and the elements of the largest block."""
    derive: bool | None = None
    """Do not store what backward can make again from other tensors by cheap operators (the output of a norm, of GELU or
    of fused attention, a product), where it would be rounded; and call custom functions again whose inputs have to fit
    what they compute (docs/reliability.md). None: where bits adapt. There what it is made of gets a bit more for each
    of its elements: fewer bytes and mostly less error (docs/policies.md). Without effect with the estimator
    "perturbation", which does not see what a tensor does by way of others."""
    log_softmax: str = "sampled"
    """How the log-softmax of a cross entropy is stored where bits are at most 4 on average, rows have at least 1,024
    words and no other operator reads it (docs/memory.md, A large vocabulary): sampled: in about 1.8 bits a word,
    without bias; exact: as it is. Always exact with policy acgc."""
    batch_norm_inputs: bool = True
    """Compress the inputs that batch normalisation saves; false keeps them exactly (ActNN's level L1)."""
    compile_hooks: str = "eager"
    """What a compiled region saves is packed when its forward is over (eager), or by operators inside its graphs
    (inlined: a lower peak, for models that are not sharded; docs/compile.md)."""
    seed: int = 0
    """Key of the stochastic rounding, together with rank, step and tensor name."""
    plan_file: str | None = None
    """A plan that `gact-dist plan` or Controller.save_plan() wrote: the bits to begin with, so that the first
    adaptation comes adapt_interval steps later (policies gact, actnn and acgc)."""
    run_dir: str | None = None
    """Folder for a log of the run, which `gact-dist report` shows: lines of JSON by rank 0, and one a plan by every
    rank; a step never waits for it. None: no log."""
    offload: Offload = field(default_factory=Offload)
    """Pinned host memory for what is stored; its keys, in a mapping of their own, are those of Offload."""

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(
                f"policy is {self.policy!r}, expected one of {', '.join(POLICIES)}{_nearest(self.policy, POLICIES)}"
            )
        self._check_budget()
        self._check_compressor()
        _check_from_zero("adapt_tolerance", self.adapt_tolerance, 0.1)
        _check_from_zero("noise_limit", self.noise_limit, 100)
        if self.estimator not in ESTIMATORS:
            raise ValueError(
                f"estimator is {self.estimator!r}, expected one of {', '.join(ESTIMATORS)}"
                f"{_nearest(self.estimator, ESTIMATORS)}"
            )
        if self.estimator != "one-pass" and self.policy not in _MEASURING:
            raise ValueError(
                f"policy {self.policy!r} was given and estimator is {self.estimator!r}, expected one of them: only "
                "policies 'gact', 'actnn' and 'acgc' measure sensitivities"
            )
        for name, least in (("adapt_interval", 1), ("watch_interval", 0), ("calibration_samples", 1), ("min_numel", 0)):
            _check_integer(name, getattr(self, name), least)
        self._check_blocks()
        if self.group_size not in GROUP_SIZES:
            raise ValueError(f"group_size is {self.group_size!r}, expected one of {', '.join(map(str, GROUP_SIZES))}")
        _check_flag("pack_stream", self.pack_stream)
        _check_flag("checkpoint_inputs", self.checkpoint_inputs)
        _check_flag("recomputed", self.recomputed)
        if self.derive is not None:
            _check_flag("derive", self.derive)
        _check_flag("batch_norm_inputs", self.batch_norm_inputs)
        for name in ("plan_file", "run_dir"):
            _check_path(name, getattr(self, name))
        if self.plan_file is not None and self.policy not in _MEASURING:
            raise ValueError(
                f"plan_file was given and policy is {self.policy!r}, expected one that chooses bits: "
                f"{', '.join(_MEASURING)}"
            )
        if self.layout not in LAYOUTS:
            raise ValueError(
                f"layout is {self.layout!r}, expected one of {', '.join(LAYOUTS)}{_nearest(self.layout, LAYOUTS)}"
            )
        if self.log_softmax not in LOG_SOFTMAX:
            raise ValueError(
                f"log_softmax is {self.log_softmax!r}, expected one of {', '.join(LOG_SOFTMAX)}"
                f"{_nearest(self.log_softmax, LOG_SOFTMAX)}"
            )
        if self.compile_hooks not in COMPILE_HOOKS:
            raise ValueError(
                f"compile_hooks is {self.compile_hooks!r}, expected one of {', '.join(COMPILE_HOOKS)}"
                f"{_nearest(self.compile_hooks, COMPILE_HOOKS)}"
            )
        _check_integer("seed", self.seed, -(2**63))
        if not isinstance(self.offload, Offload):
            _check_mapping("offload", self.offload)
            _check_keys("offload", self.offload, [entry.name for entry in fields(Offload)])
            object.__setattr__(self, "offload", Offload(**self.offload))
        if self.pack_stream and self.offload.enabled:
            raise ValueError(
                "pack_stream is true and offload.enabled is true, expected one of them: copies to the host wait for "
                "the stream that computes, not for the one that packs"
            )
        if self.policy == "off" and self.offload.enabled:
            raise ValueError('offload.enabled is true with policy "off", expected one that stores something ("exact")')

    def _check_blocks(self) -> None:
        listed = isinstance(self.blocks, Sequence) and not isinstance(self.blocks, str)
        if not listed or not all(isinstance(path, str) for path in self.blocks):
            raise TypeError(f'blocks is {self.blocks!r}, expected a list of paths of modules, such as ["decoder"]')
        object.__setattr__(self, "blocks", tuple(self.blocks))

    def _check_compressor(self) -> None:
        if self.compressor not in COMPRESSORS:
            raise ValueError(
                f"compressor is {self.compressor!r}, expected one of {', '.join(COMPRESSORS)}"
                f"{_nearest(self.compressor, COMPRESSORS)}"
            )
        if self.compressor == "error-bounded" and (self.policy != "acgc" or self.compile_hooks == "inlined"):
            raise ValueError(
                f"compressor is 'error-bounded' with policy {self.policy!r} and compile_hooks {self.compile_hooks!r}, "
                "expected policy 'acgc', which allows an error, and compile_hooks 'eager'"
            )

    def _check_budget(self) -> None:
        """Exactly one of the settings that say how much is kept, and one that the policy uses."""
        if self.policy == "acgc":
            _check_error(self.error)
            for name in ("bits", "retained_bytes"):
                mend = "the bits follow from error; policy 'gact' takes bits or retained_bytes"
                _refuse_with("policy 'acgc'", name, getattr(self, name), mend)
            return
        mend = "error belongs to policy 'acgc'"
        _refuse_with(f"policy {self.policy!r}", "error", self.error, mend)
        if self.retained_bytes is not None:
            _check_integer("retained_bytes", self.retained_bytes, 1)
            _refuse_with("retained_bytes", "bits", self.bits, "the one follows from the other")
            if self.policy != "gact":
                raise ValueError(
                    f"retained_bytes was given and policy is {self.policy!r}, expected policy 'gact', which chooses "
                    "the bits of each tensor to fit"
                )
            return
        if self.policy in ("exact", "off"):
            _refuse_with(f"policy {self.policy!r}", "bits", self.bits, "leave bits out, or choose policy 'gact'")
            return
        if self.bits is None:
            object.__setattr__(self, "bits", _DEFAULT_BITS.get(self.policy, 4.0))
        _check_bits(self.policy, self.bits)

    @classmethod
    def from_level(cls, level: str, **changes: Any) -> "Config":
        """The settings that a level stands for (see LEVELS), with single fields changed, also those of offload.

        Raises:
            ValueError: there is no such level, or it contradicts a change (another policy).
        """
        if level not in LEVELS:
            raise ValueError(f"level is {level!r}, expected one of {', '.join(LEVELS)}{_nearest(level, LEVELS)}")
        stands_for = LEVELS[level]
        policy = changes.get("policy", stands_for["policy"])
        if policy != stands_for["policy"]:
            raise ValueError(
                f"level {level!r} stands for policy {stands_for['policy']!r} and policy is {policy!r}, expected one of "
                "them: leave the level or the policy out"
            )
        if changes.get("retained_bytes") is not None and "bits" in stands_for:
            raise ValueError(
                f"level {level!r} stands for {stands_for['bits']} bits and retained_bytes was given, expected one of "
                "them: leave the level out"
            )
        if isinstance(changes.get("offload"), Mapping):
            changes["offload"] = {**stands_for.get("offload", {}), **changes["offload"]}
        return cls.from_dict({**stands_for, **changes})

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> "Config":
        """A Config from plain keys and values.

        Raises:
            ValueError: a key is unknown; the message names the nearest known one.
        """
        _check_keys("", settings, [entry.name for entry in fields(cls)])
        return cls(**settings)

    def to_dict(self) -> dict[str, Any]:
        """Plain keys and values, accepted by from_dict."""
        return asdict(self)


# at 2 bits groups of 128 would be 5 percent larger on images, and have as much variance as these at equal bytes
_TWO_BITS = {"bits": 2, "group_size": 256}
LEVELS: dict[str, dict[str, Any]] = {
    "L0": {"policy": "off"},
    "L1": {"policy": "uniform", "bits": 4},
    "L1.1": {"policy": "uniform", "bits": 8},
    "L1.2": {"policy": "uniform", "bits": 2},
    "L2": {"policy": "gact", "bits": 4},
    "L2.1": {"policy": "gact", "bits": 3},
    "L2.2": {"policy": "gact", **_TWO_BITS},
    "L3": {"policy": "gact", "bits": 4, "offload": {"enabled": True}},
    "L4bit-swap": {"policy": "uniform", "bits": 4, "offload": {"enabled": True}},
    "swap": {"policy": "exact", "offload": {"enabled": True}},
    "actnn-L0": {"policy": "off"},
    "actnn-L1": {"policy": "uniform", "bits": 4, "batch_norm_inputs": False},
    "actnn-L2": {"policy": "uniform", "bits": 4},
    "actnn-L3": {"policy": "actnn", **_TWO_BITS},
    "actnn-L3.1": {"policy": "actnn", **_TWO_BITS},  # and settings of the CUDA allocator: docs/policies.md
    "actnn-L4": {"policy": "actnn", **_TWO_BITS, "offload": {"enabled": True}},
    "actnn-L5": {"policy": "actnn", **_TWO_BITS, "offload": {"enabled": True}},  # as L3.1 is to L3
    "exact": {"policy": "exact"},
}
"""The optimisation levels of the published code of GACT and, as "actnn-...", of ActNN (their conf.py), and "exact" for
parity tests and finding faults."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """The keys of a "gact" block that are not settings of Config; the block may hold all of Config's as well."""

    enabled: bool = True
    """false leaves the job untouched"""
    level: str = "L2"
    """Level whose settings apply where the block does not say otherwise: a name in gact_dist.LEVELS. Giving a level
    and a policy that contradicts it is an error."""


def from_block(block: Mapping[str, Any]) -> Config | None:
    """The Config that a "gact" block of a DeepSpeed JSON stands for; None where "enabled" is false.

    Raises ValueError or TypeError that names the key: an unknown one with the nearest known one.
    """
    _check_mapping('"gact"', block)
    outer, inner = [entry.name for entry in fields(Block)], [entry.name for entry in fields(Config)]
    _check_keys('"gact"', block, [*outer, *inner])
    chosen = Block(**{key: block[key] for key in outer if key in block})
    _check_flag('"gact.enabled"', chosen.enabled)
    settings = {key: block[key] for key in inner if key in block}
    config = Config.from_level(chosen.level, **settings) if "level" in block else Config.from_dict(settings)
    return config if chosen.enabled else None


DISABLE = "GACT_DISABLE"
"""The environment variable that leaves every job untouched: 1, or 0 as without it."""


def disabled_by_environment(*, strict: bool = False) -> bool:
    """Whether GACT_DISABLE is 1. strict: raise ValueError for anything but 1, 0 and nothing."""
    value = os.environ.get(DISABLE, "").strip()
    if strict and value not in ("", "0", "1"):
        raise ValueError(f"the environment variable GACT_DISABLE is {value!r}, expected 1 or 0")
    return value == "1"


def settings_of(
    level: str | None, config: Config | None, settings: Mapping[str, Any], default_level: str | None
) -> Config:
    """A config, or what a level stands for with single settings changed. Raises TypeError or ValueError.

    default_level: where none is given; None for what Config() stands for.
    """
    if isinstance(level, Config):
        raise TypeError(
            "level is a gact_dist.Config, expected a level's name; a Config goes in as attach(model, config=...)"
        )
    _check_keys("", settings, ["level", "config", "process_group", *(entry.name for entry in fields(Config))])
    if config is None:
        level = default_level if level is None else level
        return Config.from_dict(settings) if level is None else Config.from_level(level, **settings)
    beside = {**({} if level is None else {"level": level}), **settings}
    if beside:
        given = ", ".join(f"{name}={value!r}" for name, value in beside.items())
        raise ValueError(
            f"config and {given} were given, expected one of them: attach(model, level, bits=3) needs no config"
        )
    if not isinstance(config, Config):
        raise TypeError(
            f"config is a {type(config).__name__}, expected a gact_dist.Config; a dict goes through Config.from_dict"
        )
    return config


def _check_mapping(name: str, value: object) -> None:
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}), expected a block of keys and values")


def _check_keys(block: str, keys: Iterable[str], known: Sequence[str]) -> None:
    """block: the name of the one that the keys stand in; empty for single settings."""
    for key in keys:
        if key not in known:
            expected = f"expected one of {', '.join(known)}{_nearest(key, known)}"
            if block:
                raise ValueError(f"unknown key {key!r} in {block}, {expected}")
            raise ValueError(f"unknown setting {key!r}, {expected}")


def _check_path(name: str, value: object) -> None:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}), expected a path as text")


def _check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}), expected true or false")


def _nearest(word: object, known: Any) -> str:
    lowered = {key.lower(): key for key in known}
    match = difflib.get_close_matches(str(word).lower(), list(lowered), n=1, cutoff=0.5)
    return f"; did you mean {lowered[match[0]]!r}?" if match else ""


def _check_integer(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}), expected an integer")
    if not least <= value < 2**63:
        raise ValueError(f"{name} is {value}, expected at least {least} and below 2**63")


def _refuse_with(reason: str, name: str, value: object, mend: str) -> None:
    if value is not None:
        raise ValueError(f"{reason} was given and {name} is {value!r}, expected one of them: {mend}")


def _check_error(error: object) -> None:
    if error is None:
        raise ValueError(
            "policy 'acgc' was given and error was not, expected e^2, the tolerated relative increase of the "
            "gradient's second moment: error=0.25, for instance"
        )
    if isinstance(error, bool) or not isinstance(error, (int, float)):
        raise TypeError(f"error is {error!r} ({type(error).__name__}), expected a number above 0")
    if not (math.isfinite(error) and error > 0):
        raise ValueError(f"error is {error}, expected a finite number above 0, such as 0.25")


def _check_from_zero(name: str, value: object, example: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}), expected a number from 0 up")
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} is {value}, expected a finite number from 0 up, such as {example}")


def _check_bits(policy: str, bits: object) -> None:
    if isinstance(bits, bool) or not isinstance(bits, (int, float)):
        raise TypeError(f"bits is {bits!r} ({type(bits).__name__}), expected a number from 1 to 8")
    if not (math.isfinite(bits) and 1 <= bits <= 8):
        raise ValueError(f"bits is {bits}, expected a number from 1 to 8 (policy 'exact' stores tensors exactly)")
    if policy == "uniform" and bits != int(bits):
        raise ValueError(
            f"bits is {bits}, expected an integer with policy 'uniform'; policies 'gact' and 'actnn' reach any average"
        )
