"""The Trainer of transformers, and those made from it, such as TRL's SFTTrainer.

    trainer.add_callback(GactCallback(trainer, "L2"))
    trainer.train()

The callback attaches when training begins, with the model in whatever the Trainer has put around it (DDP, FSDP, a
DeepSpeed engine), and detaches when training ends.
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from weakref import ref

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..config import Config, from_block, settings_of
from ..controller import Controller, attach
from ..distributed import say
from ..steps import default_level
from .attaching import check, following

_log = logging.getLogger(__name__)
_FILE = "gact_dist.json"


class GactCallback(TrainerCallback):
    """Compresses the activations of a Trainer's model while it trains."""

    def __init__(
        self,
        trainer: Trainer,
        level: str | None = None,
        *,
        config: Config | None = None,
        process_group: Any = None,
        **settings: Any,
    ) -> None:
        """trainer: which the callback is then added to: trainer.add_callback(GactCallback(trainer, "L2")).

        The others are as for gact_dist.attach. With neither level, config nor settings the "gact" block of the
        DeepSpeed config is used, if there is one; a DeepSpeed engine says itself which group shares a plan.
        Raises TypeError or ValueError when one of these cannot be used.
        """
        if not isinstance(trainer, Trainer):
            raise TypeError(
                f"trainer is a {type(trainer).__name__}, expected a transformers.Trainer: "
                'trainer.add_callback(GactCallback(trainer, "L2"))'
            )
        self._trainer = ref(trainer)  # it holds the callback
        self._given = level is not None or config is not None or bool(settings)
        self._config: Config | None = settings_of(level, config, settings, default_level())
        self._process_group = process_group
        self.gact: Controller | None = None
        """the controller, from the beginning of training on"""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Attach."""
        self._detach()  # from a training that ended by an error
        trainer = self._trainer_with_this_alone()
        self._go_first(trainer)
        config = self._settings(trainer)
        if config is None:
            return
        check(trainer.model_wrapped)
        if trainer.is_deepspeed_enabled:
            from ..deepspeed import check_with, follow_engine  # which needs DeepSpeed

            check_with(_deepspeed_config(trainer), trainer.model, config)
            self.gact = follow_engine(trainer.model_wrapped, config)
        else:
            self.gact = following(attach(trainer.model_wrapped, config=config, process_group=self._process_group))
        if state.global_step > 0:
            self._load(_folder(args, state))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Detach; report(), plan and state_dict() of the controller still answer."""
        self._detach()

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        """Add the scalars of gact_dist to those of a training step, before any logger sees them.

        With Config.run_dir the Trainer's own numbers, such as the mean loss since the last time, go there.
        """
        if self.gact is not None and logs is not None and "loss" in logs:
            self.gact.log(**{name: value for name, value in logs.items() if isinstance(value, (int, float))})
            scalars = self.gact.scalars()
            logs.update(scalars)
            if state.log_history:
                state.log_history[-1].update(scalars)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Put what was learnt beside the Trainer's own state. Every rank asks for it, as state_dict() wants it."""
        if self.gact is None:
            return
        learnt, folder = self.gact.state_dict(), _folder(args, state)
        if args.should_save and folder.is_dir():
            (folder / _FILE).write_text(json.dumps(learnt))

    def _load(self, folder: Path) -> None:
        file = folder / _FILE
        if self.gact is not None and file.is_file():
            self.gact.load_state_dict(json.loads(file.read_text()))
        elif self.gact is not None:
            say(
                _log,
                "training goes on from a checkpoint without %s: bits are uniform until the next adaptation",
                file,
            )

    def _detach(self) -> None:
        if self.gact is not None:
            self.gact.detach()

    def _trainer_with_this_alone(self) -> Trainer:
        """Its trainer. Raises ValueError if that is not the one that trains, or has another such callback."""
        trainer = self._trainer()
        callbacks = [] if trainer is None else trainer.callback_handler.callbacks
        found = sum(isinstance(callback, GactCallback) for callback in callbacks)
        if trainer is None or self not in callbacks:
            raise ValueError(
                "the callback was made for another trainer than the one that trains; expected "
                "trainer.add_callback(GactCallback(trainer, ...)) with the same trainer twice"
            )
        if found > 1:
            raise ValueError(f"the trainer has {found} GactCallbacks, expected one: leave out the others")
        return trainer

    def _go_first(self, trainer: Trainer) -> None:
        """Loggers are callbacks too, and those that the Trainer was made with come before what is added later."""
        handler = trainer.callback_handler  # which is iterating over the list that it has now
        handler.callbacks = [self, *(callback for callback in handler.callbacks if callback is not self)]

    def _settings(self, trainer: Trainer) -> Config | None:
        """What was given, or what the DeepSpeed config says; None to leave the job as it is."""
        block = _deepspeed_config(trainer).get("gact") if trainer.is_deepspeed_enabled else None
        if block is None:
            return self._config
        if self._given:
            raise ValueError(
                'the DeepSpeed config has a "gact" block and the callback was given a level or a config, expected one '
                "of them"
            )
        return from_block(block)


def _folder(args: TrainingArguments, state: TrainerState) -> Path:
    """Where the Trainer puts the checkpoint of this step."""
    return Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"


def _deepspeed_config(trainer: Trainer) -> Mapping[str, Any]:
    config: Mapping[str, Any] = trainer.accelerator.state.deepspeed_plugin.deepspeed_config
    return config
