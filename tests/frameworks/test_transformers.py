"""The Trainer of transformers and TRL's SFTTrainer with the callback, on two ranks; and its errors."""

from __future__ import annotations

import copy
import json
import logging
from contextlib import nullcontext
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from example_jobs import ATTACHED, LEVELS, check, run_example
from torch import nn
from torch.utils.checkpoint import checkpoint

from gact_dist import Config, attach

STEPS = ("--output_dir", "{out}", "--max_steps", "4")
CHECKPOINTED = "--activation_checkpointing"
BF16_ACCUMULATED = ["--bf16", CHECKPOINTED, "--gradient_accumulation_steps", "2"]
SCALARS = {"gact/retained_bytes", "gact/exact_bytes", "gact/ratio", "gact/peak_bytes"}
AFTER_ADAPTATION = {"gact/average_bits", "gact/predicted_variance"}


def zero_config(folder, stage: int, **more) -> list[str]:
    """Arguments for ZeRO with what the Trainer knows left to it."""
    config = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
    config |= {"zero_optimization": {"stage": stage}, "bf16": {"enabled": "auto"}, **more}
    (folder / "ds.json").write_text(json.dumps(config))
    return ["--deepspeed", str(folder / "ds.json")]


def steps_of(log: list[dict]) -> list[dict]:
    return [entry for entry in log if "loss" in entry]


@pytest.mark.parametrize(
    "options",
    [[], pytest.param([CHECKPOINTED], marks=pytest.mark.large), BF16_ACCUMULATED],
)
def test_the_trainer(tmp_path, options):
    jobs = run_example("hf_trainer.py", tmp_path, *STEPS, *options, levels=[*LEVELS, ATTACHED])
    check(jobs, 4)
    assert jobs[ATTACHED][0]["weights"] == jobs["L2"][0]["weights"]  # attach() before training does the same
    exact, rounded = (steps_of(jobs[level][0]["log"]) for level in ("exact", "L2"))
    losses = [entry["loss"] for entry in steps_of(jobs["untouched"][0]["log"])]
    assert [entry["loss"] for entry in exact] == losses
    assert [entry["loss"] for entry in rounded] == pytest.approx(losses, rel=0.02)
    assert all(entry.keys() >= SCALARS for entry in rounded)
    assert rounded[-1].keys() >= AFTER_ADAPTATION
    assert rounded[-1]["gact/retained_bytes"] < exact[-1]["gact/retained_bytes"]
    # two optimizer steps, of one forward each or two
    first, second, *_ = jobs["L2"][0]["adapted_at"]
    assert (first, second) == ((2, 5) if options == BF16_ACCUMULATED else (2, 4))


@pytest.mark.large
@pytest.mark.parametrize(
    ("stage", "options"),
    [(3, []), (2, BF16_ACCUMULATED)],
)
def test_the_trainer_with_a_deepspeed_config(tmp_path, stage, options):
    arguments = (*STEPS, *zero_config(tmp_path, stage), *options)
    jobs = run_example("hf_trainer.py", tmp_path, *arguments, levels=[*LEVELS, ATTACHED])
    check(jobs, 4)
    assert jobs[ATTACHED][0]["ratio"] == jobs["L2"][0]["ratio"]
    assert jobs[ATTACHED][0]["plan"].keys() == jobs["L2"][0]["plan"].keys()
    first, second, *_ = jobs["L2"][0]["adapted_at"]
    assert second - first == (4 if options else 2)  # an engine's optimizer steps are counted by their forwards


@pytest.mark.large
def test_sft_with_lora(tmp_path):
    """By TRL's chunked loss, which has no second derivative, and its default of activation checkpointing."""
    jobs = run_example("trl_sft_lora.py", tmp_path, *STEPS)
    check(jobs, 4)
    rounded = steps_of(jobs["L2"][0]["log"])
    assert all(entry.keys() >= {*SCALARS, "mean_token_accuracy"} for entry in rounded)
    assert sum(".layers." in name for name in jobs["L2"][0]["plan"]) == 2  # the inputs of the two blocks


@pytest.mark.large
def test_sft_with_lora_without_checkpointing(tmp_path):
    jobs = run_example("trl_sft_lora.py", tmp_path, *STEPS, "--activation_checkpointing", "false")
    check(jobs, 4)
    assert any(".lora_A." in name for name in jobs["L2"][0]["plan"])


@pytest.mark.large
def test_a_resumed_training_goes_on_as_it_would_have(tmp_path):
    saving = ("--save_strategy", "steps", "--save_steps", "2", "--logging_steps", "1")
    whole = run_example("hf_trainer.py", tmp_path, *STEPS, *saving, levels=["L2"])["L2"]
    checkpoint = tmp_path / "L2" / "checkpoint-2"
    assert (checkpoint / "gact_dist.json").is_file()
    resumed = run_example(
        "hf_trainer.py", tmp_path, *STEPS, *saving, "--resume_from_checkpoint", str(checkpoint), levels=["L2"]
    )["L2"]
    assert resumed[0]["plan"] == resumed[1]["plan"] == whole[0]["plan"]
    assert resumed[0]["weights"] == whole[0]["weights"]


# -- one process -----------------------------------------------------------------------------------------------------


class Row(nn.Module):
    """A model as small as a Trainer takes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))

    def forward(self, x, labels):
        loss = (self.layers(x).squeeze(-1) - labels).square().mean()
        return {"loss": loss}


@pytest.fixture
def trainer(tmp_path):
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=8, report_to="none", save_strategy="no",
        disable_tqdm=True, use_cpu=True, logging_steps=1,
    )  # fmt: skip
    rows = [{"x": torch.full((16,), number / 16), "labels": float(number)} for number in range(16)]
    return Trainer(model=Row(), args=arguments, train_dataset=rows)


def callback_of(trainer, *args, **kwargs):
    from gact_dist.integrations.transformers import GactCallback

    return GactCallback(trainer, *args, **kwargs)


SMALL = Config.from_level("L2", min_numel=16)


def test_what_loggers_see_and_what_is_left_after_training(trainer):
    from transformers import TrainerCallback

    class Logger(TrainerCallback):
        seen: ClassVar[list] = []

        def on_log(self, args, state, control, logs=None, **kwargs):
            self.seen.append(dict(logs))

    trainer.add_callback(Logger())  # one that comes before, as those of report_to do
    callback = callback_of(trainer, config=SMALL)
    trainer.add_callback(callback)
    before = [len(module._forward_hooks) for module in trainer.model.modules()]
    for _ in range(2):  # a second training attaches anew
        trainer.train()
        assert [len(module._forward_hooks) for module in trainer.model.modules()] == before
        assert callback.gact.plan
        assert callback.gact.report().ratio > 1
    assert sum("gact/ratio" in logs for logs in Logger.seen) == 4
    assert not any("gact/ratio" in logs for logs in Logger.seen if "train_runtime" in logs)


def test_a_training_that_failed_can_begin_again(trainer):
    callback = callback_of(trainer, config=SMALL)
    trainer.add_callback(callback)
    failing = trainer.model.layers.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    failing.remove()
    trainer.train()
    assert callback.gact.report().ratio > 1


def test_wrong_use_has_one_clear_message(trainer):
    with pytest.raises(TypeError, match=r"trainer is a str, expected a transformers.Trainer: trainer.add_callback\("):
        callback_of("L2")
    with pytest.raises(ValueError, match=r"level is 'L22', expected one of"):
        callback_of(trainer, "L22")
    with pytest.raises(ValueError, match=r"config and level='L2' were given"):
        callback_of(trainer, "L2", config=SMALL)
    first, second = callback_of(trainer, "L2"), callback_of(trainer, "L1")
    trainer.add_callback(first)
    trainer.add_callback(second)
    with pytest.raises(ValueError, match="the trainer has 2 GactCallbacks, expected one"):
        trainer.train()
    trainer.remove_callback(first)
    gact = attach(trainer.model.layers, config=SMALL)
    with pytest.raises(ValueError, match=r"attached to this model already, and a callback was given as well"):
        trainer.train()
    gact.detach()
    trainer.train()
    assert second.gact.config.policy == "uniform"


def test_a_callback_of_another_trainer_is_refused(trainer):
    other = copy.copy(trainer)
    trainer.add_callback(callback_of(other, "L2"))
    del other
    with pytest.raises(ValueError, match=r"the callback was made for another trainer than the one that trains"):
        trainer.train()


def test_data_parallel_is_refused(trainer):
    trainer.add_callback(callback_of(trainer, "L2"))
    trainer._wrap_model = lambda model, **_: nn.DataParallel(model)
    with pytest.raises(ValueError, match=r"DataParallel, which runs copies of it in threads.*torchrun"):
        trainer.train()


def test_a_checkpoint_without_a_state_is_said(trainer, caplog):
    trainer.args.save_strategy = "steps"
    trainer.args.save_steps = 1
    trainer.train()
    trainer.args.max_steps = 3
    trainer.add_callback(callback_of(trainer, config=SMALL))
    trainer.train(resume_from_checkpoint=True)
    text = "bits are uniform until the next adaptation"
    assert [text in record.getMessage() for record in caplog.records if record.levelno == logging.WARNING].count(True)


def test_a_run_directory_is_a_run_that_can_be_reported(trainer, tmp_path):
    from gact_dist.cli import figures, run_files

    trainer.args.max_steps, run_dir = 6, tmp_path / "run"
    trainer.add_callback(callback_of(trainer, config=replace(SMALL, run_dir=str(run_dir), adapt_interval=2)))
    trainer.train()
    [run] = run_files.find_runs([run_dir])
    told = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert run.losses == ([1, 2, 3, 4, 5, 6], [entry["loss"] for entry in told])
    assert [line["learning_rate"] for line in run.steps] == [entry["learning_rate"] for entry in told]
    assert run.adaptations
    drawn = {figure.key for figure in figures.figures_of([run])}
    assert drawn >= {"losses", "activations", "peak", "step", "bits", "time"}


@pytest.mark.parametrize("level", [None, "L0", "L2"])
def test_an_attention_of_transformers_under_a_checkpoint_of_its_own(level):
    """As docs/reliability.md has it for an attention that would be exact; with padding."""
    from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=50, num_key_value_heads=2, attn_implementation="sdpa", **sizes))
    tokens = torch.randint(0, 50, (4, 48))
    batch = {"input_ids": tokens, "attention_mask": (torch.arange(48) < 40).long().expand(4, 48), "labels": tokens}

    def gradients(gact=None):
        for _ in range(3):
            model.zero_grad()
            with nullcontext() if gact is None else gact.step(lambda given: model(**given).loss, batch):
                loss = model(**batch, use_cache=False).loss
            loss.backward()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    expected = gradients()
    attend = AttentionInterface()["sdpa"]

    def attend_again(module, *args, **kwargs):
        return checkpoint(attend, module, *args, use_reentrant=False, **kwargs)

    try:
        AttentionInterface.register("sdpa", attend_again)
        gact = None if level is None else attach(model, level)
        got = gradients(gact)
        if level != "L2":
            assert torch.equal(got, expected)
        else:
            assert (got - expected).norm() < 0.15 * expected.norm()
            rows = [row for row in gact.report().rows if "BlockInput" in row.name and row.codec == "quantised"]
            assert len(rows) == 6
    finally:
        AttentionInterface.register("sdpa", attend)
