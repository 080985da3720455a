"""bench_step.py as far as a CPU shows it: strategies train the same job, its figures are what it says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from simulated_device import Simulated, simulate
from torch import Tensor, nn

import gact_dist
from benchmarks.step import bench_step, strategies
from benchmarks.step.async_offload import AsyncOffload
from benchmarks.step.bench_step import Floor, Training, main, reported, row_of
from benchmarks.step.shapes import SMALL_SHAPES, loss_of
from benchmarks.step.strategies import STRATEGIES, Run, Strategy, replica, without_level, without_offload
from gact_dist import Config

CPU = torch.device("cpu")
SAME = ["exact", "checkpoint", "selective checkpoint"]


def gradients(run: Run, batch: tuple[Tensor, Tensor]) -> list[Tensor]:
    torch.manual_seed(1)
    parameters = [parameter for parameter in run.model.parameters() if parameter.requires_grad]
    return list(torch.autograd.grad(run.forward(batch), parameters))


@pytest.mark.parametrize("name", SMALL_SHAPES)
def test_strategies_that_keep_everything_give_the_untouched_gradients(name):
    shape = SMALL_SHAPES[name]
    model, batch = shape.model(CPU), shape.inputs(4, CPU)
    untouched = gradients(Run(STRATEGIES["untouched"], model), batch)
    assert sum(float(gradient.norm()) for gradient in untouched) > 0
    for other in SAME:
        run = Run(STRATEGIES[other], model)
        assert all(torch.equal(a, b) for a, b in zip(gradients(run, batch), untouched, strict=True)), other
        run.close()


def test_both_attentions_of_bert_compute_the_same():
    shape = SMALL_SHAPES["bert-large"]
    batch = shape.inputs(4, CPU)
    logits = [shape.model(CPU, attention).eval()(batch[0]) for attention in ("sdpa", "eager")]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-5)  # float32, in another order


def test_a_replica_shares_all_memory_and_no_module():
    model = SMALL_SHAPES["resnet-50"].model(CPU)
    other = replica(model)
    for mine, theirs in zip(
        (*model.parameters(), *model.buffers()), (*other.parameters(), *other.buffers()), strict=True
    ):
        assert mine is theirs
    assert not set(model.modules()) & set(other.modules())


@pytest.mark.parametrize("name", SMALL_SHAPES)
def test_a_checkpoint_keeps_less_than_a_selective_one_and_that_less_than_the_job(name):
    """Counted by gact_dist's own exact level, under whose hooks all three run."""
    shape = SMALL_SHAPES[name]
    model, batch = shape.model(CPU), shape.inputs(4, CPU)
    kept = {}
    for kind in ("", "selective", "full"):
        run = Run(Strategy(level="exact", checkpoint=kind), model)
        run.forward(batch)
        kept[kind] = run.gact.report().retained_bytes
        run.close()
    assert kept["full"] < kept["selective"] < kept[""]


def test_every_strategy_with_a_level_has_one_without():
    names = ("L1", "swap", "L3, all leave", "checkpoint + L3", "checkpoint + L3, all leave", "checkpoint")
    assert {name: without_level(name) for name in names} == {
        "L1": "untouched",
        "swap": "untouched",
        "L3, all leave": "untouched",
        "checkpoint + L3": "checkpoint",
        "checkpoint + L3, all leave": "checkpoint",
        "checkpoint": "checkpoint",
    }
    assert {name: without_offload(name) for name in STRATEGIES if without_offload(name) != name} == {
        "L3": "L2",
        "L3, all leave": "L2",
        "L4bit-swap": "L1",
        "swap": "exact",
        "checkpoint + L3": "checkpoint + L2",
        "checkpoint + L3, all leave": "checkpoint + L2",
    }


@pytest.mark.parametrize("name", STRATEGIES)
def test_what_offloads_needs_a_gpu(name):
    others = {"save_on_cpu", "async offload", "L1, pack stream", "L1, memory, pack stream"}
    assert STRATEGIES[name].needs_cuda == (name in others or without_offload(name) != name)


def test_async_offload_keeps_what_is_not_on_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Stream", object)  # there need not be a GPU
    x = torch.rand(1024, requires_grad=True)
    with AsyncOffload([]).hooks():
        y = x.exp()
    assert y.grad_fn._saved_result.data_ptr() == y.data_ptr()


def test_a_level_that_adapts_has_a_plan_after_the_warm_up_and_keeps_it():
    shape = SMALL_SHAPES["gpt-1024"]
    model = shape.model(CPU)
    training = Training("L2", model, torch.optim.SGD(model.parameters(), 0.1), shape.inputs(4, CPU))
    training.warm_up(2)
    assert len(training.run.gact.history) == 1
    training.step()
    assert len(training.run.gact.history) == 1


def offloading(name: str, device: Simulated, monkeypatch) -> Training:
    """A strategy after its warm-up on a simulated device, with payloads from 128 bytes on offloaded."""
    simulate(monkeypatch, device)
    attach = gact_dist.Controller

    def attach_to_small(model: nn.Module, config: Config) -> gact_dist.Controller:
        return attach(model, config=replace(config, offload=replace(config.offload, min_bytes=128)))

    monkeypatch.setattr(strategies.gact_dist, "attach", attach_to_small)
    shape = SMALL_SHAPES["gpt-1024"]
    model = shape.model(CPU)
    training = Training(name, model, torch.optim.SGD(model.parameters(), 0.1), shape.inputs(4, CPU))
    training.warm_up(2)
    return training


def test_offload_is_reported(monkeypatch):
    training = offloading("L4bit-swap", Simulated(compute_s=1e-3), monkeypatch)
    found = reported(training.run.gact.report())
    assert 0 < found["host_bytes"] < found["retained_bytes"] < found["exact_bytes"]
    assert found["stalls"] == 0


@pytest.mark.parametrize("name", ["L3", "checkpoint + L3"])
def test_where_all_leave_they_do_so_by_a_link_that_stalls(name, monkeypatch):
    def host_bytes(name: str, bytes_per_s: float) -> int:
        training = offloading(name, Simulated(bytes_per_s, bytes_per_s, compute_s=1e-3), monkeypatch)
        return training.run.gact.report().host_bytes

    leaving = host_bytes(f"{name}, all leave", 1e5)
    assert host_bytes(name, 1e5) < leaving / 2
    assert leaving >= host_bytes(name, 1e12)  # with such a link all but the last of the forward leave


# -- figures -----------------------------------------------------------------------------------------------------------


def test_the_floor_copies_what_packing_and_unpacking_move():
    gact = gact_dist.attach(nn.Identity(), level="L1")
    x = torch.randn(64, 256, requires_grad=True)
    with gact.step():
        x.exp().sum()
    (row,) = gact.report().rows
    floor = Floor(gact.report())
    assert floor.sizes == [(x.nbytes + row.bytes) // 2]
    assert floor.moved_bytes == 2 * (x.nbytes + row.bytes)  # a read and a write in pack, the same in unpack
    with pytest.raises(RuntimeError, match="scratch is None"):
        floor.step()
    floor.sizes *= 3
    floor.scratch = torch.ones(2 * floor.sizes[0] + 5, dtype=torch.uint8), torch.zeros(2 * floor.sizes[0] + 5)
    floor.step()
    assert floor.scratch[1].sum() == 2 * floor.sizes[0]  # the third starts over


class Timed:
    """What row_of() looks at of a Training or a Floor."""

    def __init__(self, *times_s: float, sizes: tuple[int, ...] = (10,)) -> None:
        self.times_s, self.sizes, self.moved_bytes = list(times_s), sizes, 4 * sum(sizes)


def test_differences_are_taken_within_a_round():
    floor = Timed(1.0, 2.0, 4.0)
    times = {"untouched": Timed(2.0, 11.0, 2.0), "L1": Timed(3.0, 13.0, 5.0), "L4bit-swap": Timed(3.5, 16.0, 5.0)}
    row = row_of("L1", times, floor)
    assert (row["step_s"], row["added_s"], row["added_to_step"]) == (5.0, 2.0, 1.0)
    assert (row["floor_s"], row["added_to_floor"], row["floor_bytes_per_s"]) == (2.0, 1.0, 20.0)
    assert "offload_to_step" not in row
    assert row_of("L4bit-swap", times, None)["offload_to_step"] == 0.25
    assert set(row_of("L1", {"L1": times["L1"]}, None)) == {"step_s", "times_s"}


def test_a_level_under_a_checkpoint_is_held_against_that_checkpoint():
    times = {"untouched": Timed(1.0), "checkpoint": Timed(3.0), "checkpoint + L2": Timed(4.5)}
    row = row_of("checkpoint + L2", times, Timed(0.5))
    assert (row["added_s"], row["added_to_floor"]) == (3.5, 3.0)


# -- the script --------------------------------------------------------------------------------------------------------


def run_main(path: Path, *names: str) -> int:
    return main([
        *("--device", "cpu", "--small", "--part", "gpt-1024", "--rounds", "2", "--steps", "1"),
        *("--json", str(path), "--strategies", *names),
    ])  # fmt: skip


def test_a_part_is_measured_and_written_beside_the_others(tmp_path, capsys):
    path = tmp_path / "new" / "step.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"parts": {"swin-t": "of an earlier run"}}))
    assert run_main(path, "untouched", "L1", "checkpoint", "checkpoint + L2", "L3", "save_on_cpu") == 0
    parts = json.loads(path.read_text())["parts"]
    assert parts["swin-t"] == "of an earlier run"
    part = parts["gpt-1024"]
    assert part["not_run"] == {"L3": "needs a CUDA device", "save_on_cpu": "needs a CUDA device"}
    assert set(part["rows"]) == {"untouched", "L1", "checkpoint", "checkpoint + L2"}
    for name, row in part["rows"].items():
        assert len(row["times_s"]) == 2
        assert (row["held_bytes"], row["peak_bytes"]) == (None, None)  # a CPU's allocator counts nothing
        assert ("floor_s" in row) == ("L" in name)
    assert part["rows"]["untouched"]["added_s"] == 0
    assert part["rows"]["L1"]["exact_bytes"] > 4 * part["rows"]["L1"]["retained_bytes"]
    assert part["environment"]["torch"] == torch.__version__
    assert "L3                         not run: needs a CUDA device" in capsys.readouterr().out


def test_a_strategy_that_fails_is_a_row_and_the_others_run(tmp_path, monkeypatch, capsys):
    def fail(*_):
        raise ArithmeticError("broken")

    monkeypatch.setattr(bench_step.Run, "adapt", lambda run, *_: fail() if run.gact is not None else None)
    assert run_main(tmp_path / "step.json", "L1", "untouched") == 1
    rows = json.loads((tmp_path / "step.json").read_text())["parts"]["gpt-1024"]["rows"]
    assert rows["L1"]["error"].endswith("ArithmeticError: broken\n")
    assert rows["untouched"]["step_s"] > 0
    assert "failed: ArithmeticError: broken" in capsys.readouterr().out


@pytest.mark.parametrize("failing", [Training, Floor])
def test_a_strategy_that_fails_in_its_turn_is_a_row_and_the_others_go_on(failing, tmp_path, monkeypatch, capsys):
    step, forward, left_over = failing.step, Run.forward, set()

    def fail_once_it_was_timed(actor):
        if not actor.times_s or (failing is Training and actor.run.gact is None):
            return step(actor)
        if failing is Training:
            actor.run.forward(actor._batch).backward()
        raise ArithmeticError("broken")

    def look_for_gradients(run, batch):
        left_over.update(parameter.grad for parameter in run.model.parameters())
        return forward(run, batch)

    monkeypatch.setattr(failing, "step", fail_once_it_was_timed)
    monkeypatch.setattr(Run, "forward", look_for_gradients)
    assert run_main(tmp_path / "step.json", "L1", "untouched", "checkpoint", "--rounds", "3") == 1
    rows = json.loads((tmp_path / "step.json").read_text())["parts"]["gpt-1024"]["rows"]
    assert rows["L1"]["error"].endswith("ArithmeticError: broken\n")
    assert rows["L1"]["retained_bytes"] > 0
    assert "step_s" not in rows["L1"]
    for name in ("untouched", "checkpoint"):
        assert len(rows[name]["times_s"]) == 3
        assert "added_s" in rows[name]
    assert left_over == {None}
    assert "failed: ArithmeticError: broken" in capsys.readouterr().out


def test_where_all_strategies_fail_all_are_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_step.Run, "adapt", lambda *_: {}["no such key"])
    assert run_main(tmp_path / "step.json", "L1", "untouched") == 1
    rows = json.loads((tmp_path / "step.json").read_text())["parts"]["gpt-1024"]["rows"]
    assert all("KeyError: 'no such key'" in row["error"] for row in rows.values())


def test_without_a_gpu_the_script_says_so(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(SystemExit):
        main(["--part", "gpt-1024"])
    assert "--device cpu --small" in capsys.readouterr().err


def test_losses_of_all_shapes_are_finite_and_their_images_channels_last():
    for name, shape in SMALL_SHAPES.items():
        inputs, classes = shape.inputs(2, CPU)
        model = shape.model(CPU)
        assert torch.isfinite(loss_of(model, (inputs, classes))), name
        assert model.training
        if inputs.dim() == 4:
            assert inputs.is_contiguous(memory_format=torch.channels_last)
            weights = [p for p in model.parameters() if p.dim() == 4 and p.shape[1] > 1 and p.shape[2] > 1]
            assert weights
            assert all(weight.is_contiguous(memory_format=torch.channels_last) for weight in weights)
