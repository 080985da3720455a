"""deepspeed.initialize with a "gact" block in the DeepSpeed config.

    engine, optimizer, loader, scheduler = gact_dist.deepspeed.initialize(model=model, config="ds_config.json")

The loop stays as it is. Sensitivities come from the engine's own forwards and backwards (see sensitivity/probe.py), the
plan travels in the engine's checkpoints, and engine.gact is the controller (report(), plan, detach()).
"""

import base64
import inspect
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import deepspeed
import hjson
from deepspeed.runtime.pipe.module import PipelineModule

from .config import Config, from_block
from .controller import Controller
from .distributed import say
from .offload import require_cuda

_log = logging.getLogger(__name__)
_BLOCK = "gact"
_CLIENT_STATE = "gact_dist"


def initialize(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
    """deepspeed.initialize, with activations compressed as the config's "gact" block says.

    Takes the arguments and returns the results of deepspeed.initialize (0.19): (engine, optimizer, training_dataloader,
    lr_scheduler). Without the block, or with "enabled": false, the engine is untouched; else engine.gact is its
    gact_dist.Controller. The block's keys are listed in docs/configuration.md.

    Raises:
        ValueError, TypeError: the block cannot be used, or contradicts the rest of the config. Raised before DeepSpeed
            does anything.
    """
    given = inspect.signature(deepspeed.initialize).bind(*args, **kwargs).arguments
    settings = _ds_config(given)
    config = from_block(settings.get(_BLOCK, {"enabled": False}))
    if config is not None:
        check_with(settings, given.get("model"), config)
    results = deepspeed.initialize(*args, **kwargs)
    if config is not None:
        _follow(results[0], config)
    return results


def _ds_config(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """The DeepSpeed config among the arguments, as a mapping; empty where DeepSpeed itself will complain."""
    config = given.get("config")
    if config is None:
        config = given.get("config_params")
    for name in ("deepspeed_config", "deepscale_config"):
        if config is None:
            config = getattr(given.get("args"), name, None)
    loaded = hjson.loads(_text(config)) if isinstance(config, str) else config
    return loaded if isinstance(loaded, Mapping) else {}


def _text(config: str) -> str:
    """The text of a config that is given as a string: a file's path or, as DeepSpeed allows, base64 of the text."""
    if os.path.exists(config):
        return Path(config).read_text()
    try:
        return base64.urlsafe_b64decode(config).decode()
    except ValueError:
        return ""


def check_with(settings: Mapping[str, Any], model: Any, config: Config) -> None:
    """Raise ValueError if the block contradicts the rest of the config, or asks for what the machine lacks."""
    if config.offload.enabled:
        require_cuda()
    checkpoints = settings.get("activation_checkpointing", {})
    for key in ("partition_activations", "cpu_checkpointing", "contiguous_memory_optimization"):
        if config.checkpoint_inputs and checkpoints.get(key):
            raise ValueError(
                f'"gact.checkpoint_inputs" is true and "activation_checkpointing.{key}" is true, expected one of them: '
                "both would store the inputs of checkpointed blocks, each in its own way; set either to false"
            )
    if settings.get("compile", {}).get("deepcompile"):
        raise ValueError(
            '"gact.enabled" is true and "compile.deepcompile" is true, expected one of them: DeepCompile keeps saved '
            "tensors inside its own graphs, past all hooks; set either to false"
        )
    if isinstance(model, PipelineModule):
        raise ValueError(
            '"gact.enabled" is true and the model is a PipelineModule, whose engine runs forward and backward out of '
            'reach; expected a plain module (for pipelines use torch.distributed.pipelining), or "enabled": false'
        )


def follow_engine(engine: Any, config: Config) -> Controller:
    """Attach to an engine and follow it."""
    # adapt_interval counts optimizer steps, the controller counts forwards
    steps = config.adapt_interval * engine.gradient_accumulation_steps()
    group = engine.seq_data_parallel_group or engine.data_parallel_group
    return Controller(engine, config=replace(config, adapt_interval=steps), process_group=group).follow()


def _follow(engine: Any, config: Config) -> None:
    engine.gact = controller = follow_engine(engine, config)
    engine.save_checkpoint = _saving(engine.save_checkpoint, controller)
    engine.load_checkpoint = _loading(engine.load_checkpoint, controller)


def _saving(save: Callable[..., Any], controller: Controller) -> Callable[..., Any]:
    @wraps(save)
    def save_checkpoint(save_dir: str, tag: Any = None, client_state: Any = None, *args: Any, **kwargs: Any) -> Any:
        client_state = {**(client_state or {}), _CLIENT_STATE: controller.state_dict()}
        return save(save_dir, tag, client_state, *args, **kwargs)

    return save_checkpoint


def _loading(load: Callable[..., Any], controller: Controller) -> Callable[..., Any]:
    @wraps(load)
    def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
        path, client_state = load(*args, **kwargs)
        if path is not None:
            state = (client_state or {}).pop(_CLIENT_STATE, None)
            if state is None:
                say(_log, "checkpoint %s holds no state of gact_dist: bits are uniform until the next adaptation", path)
            else:
                controller.load_state_dict(state)
        return path, client_state

    return load_checkpoint
