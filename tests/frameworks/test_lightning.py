"""Lightning: the callback and attach() on a LightningModule, on one device and on two ranks; and its errors."""

from __future__ import annotations

import copy
import csv
import pickle
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import lightning
import pytest
import torch
from example_jobs import check, run_example
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from gact_dist import Config, attach
from gact_dist.cli import figures, run_files
from gact_dist.integrations.lightning import GactCallback
from gact_dist.steps import is_attached

SMALL = Config.from_level("L2", adapt_interval=2, min_numel=16)
EXACT = Config.from_level("exact")
BATCHES = [(torch.randn(8, 16, generator=torch.Generator().manual_seed(n)), torch.arange(8) % 4) for n in range(4)]


class Classifier(lightning.LightningModule):
    """through: what training_step calls: forward, or a part of the module."""

    def __init__(self, through: str = "forward") -> None:
        super().__init__()
        torch.manual_seed(7)
        self.network = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 4))
        self.through, self.calls = through, 0

    def forward(self, x):
        return self.network(x)

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        self.calls += 1
        loss = cross_entropy(self(inputs) if self.through == "forward" else self.network(inputs), labels)
        self.log_dict({"loss": loss, "number": float(batch_idx)}, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Alternating(Classifier):
    """Steps its optimizer itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = cross_entropy(self.network(batch[0]), batch[1])
        self.manual_backward(loss)
        self.optimizers().step()
        self.optimizers().zero_grad()


def trainer_of(folder: Path, *callbacks, **options) -> lightning.Trainer:
    given = {"max_epochs": 1, "logger": CSVLogger(folder, name="", version=""), "log_every_n_steps": 1, **options}
    return lightning.Trainer(
        accelerator="cpu", devices=1, callbacks=list(callbacks), enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **given,
    )  # fmt: skip


def fit(folder: Path, module: lightning.LightningModule, *callbacks, **options) -> lightning.Trainer:
    trainer = trainer_of(folder, *callbacks, **options)
    torch.manual_seed(1)
    trainer.fit(module, DataLoader(BATCHES, batch_size=None))
    return trainer


def weights(module: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


def same(first: nn.Module, second: nn.Module) -> bool:
    return all(map(torch.equal, weights(first), weights(second)))


def logged(folder: Path, name: str) -> list[float]:
    with (folder / "metrics.csv").open() as file:
        return [float(row[name]) for row in csv.DictReader(file) if row.get(name)]


def test_on_two_ranks(tmp_path):
    jobs = run_example("lightning_ddp.py", tmp_path, "--out", "{out}", "--steps", "4", "--accumulate", "1")
    check(jobs, 5)
    assert jobs["L2"][0]["adapted_at"] == [2, 4]
    assert logged(tmp_path / "exact", "loss_epoch") == logged(tmp_path / "untouched", "loss_epoch")
    retained = logged(tmp_path / "L2", "gact/retained_bytes")
    assert len(retained) == 4
    assert max(retained) < min(logged(tmp_path / "exact", "gact/retained_bytes"))
    assert len(logged(tmp_path / "L2", "gact/average_bits")) == 3


@pytest.mark.large
def test_on_two_ranks_with_accumulation(tmp_path):
    jobs = run_example("lightning_ddp.py", tmp_path, "--out", "{out}", "--steps", "4", "--accumulate", "2")
    check(jobs, 5)
    assert jobs["L2"][0]["adapted_at"] == [2, 5]


@pytest.mark.parametrize("through", ["forward", "network"])
@pytest.mark.parametrize("way", ["callback", "attach"])
def test_on_one_device(tmp_path, through, way):
    """A LightningModule is compressed whether or not its forward is called."""

    def run(config: Config | None) -> tuple[Classifier, object]:
        module, gact, callbacks = Classifier(through), None, []
        if config is not None and way == "attach":
            gact = attach(module, config=config).follow()
        elif config is not None:
            callbacks = [GactCallback(config=config)]
        fit(tmp_path / str(config and config.policy), module, *callbacks)
        return module, callbacks[0].gact if callbacks else gact

    plain, _ = run(None)
    exact, of_exact = run(EXACT)
    rounded, gact = run(SMALL)
    assert same(plain, exact)
    assert exact.calls == rounded.calls == 4  # those of a measurement are undone
    assert not same(plain, rounded)
    assert set(gact.plan) == {"network.1:Addmm@4"}
    assert [row.name for row in gact.report().rows if row.codec == "derived"] == ["network.3:Mul@4"]
    assert gact.report().retained_bytes < of_exact.report().retained_bytes
    for name in ("loss", "number"):  # what a measurement would log is not in the averages of the epoch
        assert logged(tmp_path / "exact", name) == logged(tmp_path / "None", name)
    assert logged(tmp_path / "gact", "number") == [1.5]


def train_inside_fsdp(level: str) -> tuple[list[torch.Tensor], float, int]:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    module, policy = Classifier("network"), ModuleWrapPolicy({nn.Linear})
    module._trainer, module.log_dict = SimpleNamespace(training=True), lambda *_, **__: None
    model = FullyShardedDataParallel(
        module, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu")
    )
    gact = attach(module, config=Config.from_level(level, adapt_interval=2, min_numel=16)).follow()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    module.forward = module.training_step  # as Lightning's strategy redirects it
    for number, batch in enumerate(BATCHES):
        model(batch, number).backward()
        optimizer.step()
        optimizer.zero_grad()
    with FullyShardedDataParallel.summon_full_params(model):
        return [parameter.detach().clone() for parameter in model.parameters()], gact.report().ratio, len(gact.plan)


@pytest.mark.large
def test_inside_fsdp1_as_its_strategy_has_it(ranks):
    """FSDPStrategy itself refuses a CPU."""
    (plain, _, _), _ = ranks(train_inside_fsdp, "L0")
    (exact, ratio, _), _ = ranks(train_inside_fsdp, "exact")
    assert all(map(torch.equal, plain, exact))
    assert ratio == 1
    (rounded, ratio, tensors), (_, _, others) = ranks(train_inside_fsdp, "L2")
    assert tensors == others > 0
    assert ratio > 1
    assert not all(map(torch.equal, plain, rounded))


def test_a_loop_of_ones_own_over_a_lightning_module(tmp_path):
    module = Classifier()
    gact = attach(module, config=SMALL).follow()
    for inputs, labels in BATCHES:
        cross_entropy(module(inputs), labels).backward()
    assert gact.plan
    steps = gact.history[-1]["step"]
    assert steps == 4
    module.training_step(BATCHES[0], 0).backward()  # one step, though it calls forward
    assert gact._schedule.step == 5
    fit(tmp_path, module)
    assert gact._schedule.step == 9
    module(BATCHES[0][0]).sum().backward()
    assert gact._schedule.step == 10


def test_nothing_is_left_on_the_module_and_copies_have_its_own_method(tmp_path):
    module = Classifier()
    gact = attach(module, config=SMALL).follow()
    assert "training_step" in vars(module)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert other.training_step.__func__ is Classifier.training_step
        assert other.training_step.__self__ is other
    gact.detach()
    assert "training_step" not in vars(module)
    fit(tmp_path, module, callback := GactCallback(config=SMALL))
    assert callback.gact.plan
    assert "training_step" not in vars(module)
    assert not any(inner._forward_hooks or inner._forward_pre_hooks for inner in module.modules())


def test_a_checkpoint_holds_the_state(tmp_path):
    whole = Classifier()
    trainer = fit(tmp_path, whole, GactCallback(config=SMALL), max_epochs=1)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    gact = trainer.callbacks[0].gact
    resumed, callback = Classifier(), GactCallback(config=SMALL)
    trainer = trainer_of(tmp_path, callback, max_epochs=2)
    trainer.fit(resumed, DataLoader(BATCHES, batch_size=None), ckpt_path=tmp_path / "half.ckpt")
    assert len(callback.gact.history) > len(gact.history)
    assert callback.gact.history[: len(gact.history)] == gact.history


def test_a_training_that_failed_leaves_nothing(tmp_path):
    module = Classifier()
    failing = module.network.register_forward_hook(lambda *_: 1 / 0)
    callback = GactCallback(config=SMALL)
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, module, callback)
    failing.remove()
    assert not any(inner._forward_hooks for inner in module.modules())
    fit(tmp_path, module, callback)
    assert callback.gact.plan


def test_wrong_use_has_one_clear_message(tmp_path):
    with pytest.raises(ValueError, match="level is 'L22', expected one of"):
        GactCallback("L22")
    with pytest.raises(RuntimeError, match="more than one stateful callback of type `GactCallback`"):  # Lightning's own
        trainer_of(tmp_path, GactCallback("L2"), GactCallback("L1"))
    module = Classifier()
    attach(module, config=SMALL).follow()  # and the controller is dropped
    with pytest.raises(ValueError, match="attached to this model already, and a callback was given as well"):
        fit(tmp_path, module, GactCallback(config=SMALL))


def test_a_training_step_that_cannot_be_run_again_is_refused(tmp_path):
    text = r"cannot run the training_step of Alternating again.*automatic_optimization is False.*such as attach\("
    with pytest.raises(ValueError, match=text):
        fit(tmp_path, module := Alternating(), GactCallback(config=SMALL))
    assert not is_attached(module)
    gact = attach(module.network, config=SMALL).follow()  # as the message says
    fit(tmp_path, module)
    assert gact.plan

    class FromIterator(Classifier):
        def training_step(self, dataloader_iter):
            return super().training_step(*next(dataloader_iter)[:2])

    with pytest.raises(ValueError, match="takes the batches from dataloader_iter"):
        attach(FromIterator(), config=SMALL).follow()
    fit(tmp_path, Alternating(), GactCallback("L0"))  # which leaves every job as it is


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_run_directory_is_a_run_that_can_be_reported(tmp_path, accumulate):
    losses = []

    class Noting(Classifier):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            losses.append(loss.item())
            return loss

    config = replace(SMALL, run_dir=str(tmp_path / "run"), watch_interval=0)
    fit(tmp_path, Noting(), GactCallback(config=config), accumulate_grad_batches=accumulate)
    [run] = run_files.find_runs([tmp_path / "run"])
    steps, logged = run.losses
    assert steps == list(range(1, len(steps) + 1))
    assert set(logged) <= set(losses)  # measurements run it as well
    assert len(logged) == len(BATCHES)
    assert run.adaptations
    drawn = {figure.key for figure in figures.figures_of([run])}
    assert drawn >= {"losses", "activations", "peak", "step", "bits", "time"}
