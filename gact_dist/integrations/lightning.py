"""Lightning's Trainer.

    trainer = lightning.Trainer(..., callbacks=[GactCallback("L2")])
    trainer.fit(module)

The callback attaches when training begins, with the process group of the strategy, and detaches when it ends. A step is
one call of training_step; see [Note: training_step] in steps/training_step.py.
"""

from collections.abc import Mapping
from typing import Any, cast

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from ..config import Config, settings_of
from ..controller import Controller, attach
from ..steps import default_level
from .attaching import check, following, in_forwards, steps_are_seen


class GactCallback(Callback):
    """Compresses the activations of a LightningModule while it trains; its state is part of Lightning's checkpoints."""

    def __init__(
        self, level: str | None = None, *, config: Config | None = None, process_group: Any = None, **settings: Any
    ) -> None:
        """All of it as for gact_dist.attach. Raises TypeError or ValueError as it does."""
        self._config, self._process_group = settings_of(level, config, settings, default_level()), process_group
        self._loaded: Mapping[str, Any] = {}
        self.gact: Controller | None = None
        """the controller, from the beginning of training on"""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach."""
        self._detach()  # from a training that ended by an error
        check(pl_module)
        config = self._config
        if not steps_are_seen(pl_module, trainer.optimizers):
            config = in_forwards(config, trainer.accumulate_grad_batches)
        self.gact = following(attach(pl_module, config=config, process_group=self._process_group))
        if self._loaded:
            self.gact.load_state_dict(self._loaded)
            self._loaded = {}

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the loss in Config.run_dir, and the scalars of gact_dist in the steps that Lightning's loggers see."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if self.gact is not None and isinstance(loss, Tensor):
            self.gact.log(loss=loss.detach() * trainer.accumulate_grad_batches)  # Lightning divides it
        steps = cast(Any, trainer).log_every_n_steps
        if self.gact is not None and trainer.loggers and steps and trainer.global_step % steps == 0:
            pl_module.log_dict(self.gact.scalars())

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Detach; report(), plan and state_dict() of the controller still answer."""
        self._detach()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Detach."""
        self._detach()

    def state_dict(self) -> dict[str, Any]:
        """What was learnt, on every rank."""
        return {} if self.gact is None else dict(self.gact.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint, once training begins."""
        self._loaded = state_dict

    def _detach(self) -> None:
        if self.gact is not None:
            self.gact.detach()
