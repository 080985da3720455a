"""The search for the largest batch: its decisions, and probes that die for want of memory in their own process."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.step import bench_batch
from benchmarks.step.bench_batch import PROBED, Results, Row, main, rows_of, run_probe
from benchmarks.step.shapes import SMALL_SHAPES
from benchmarks.step.strategies import STRATEGIES
from gact_dist.cli.batch_search import RESOLUTION, Probe, largest, next_batch

GIB = 2**30


def found(largest_batch: int, limit_bytes: int = GIB, first: int = 8, peak=None) -> list[Probe]:
    """All probes of a search, on a machine where batches up to largest_batch fit."""
    probes: list[Probe] = []
    while (batch := next_batch(probes, limit_bytes, first)) is not None:
        assert batch not in [probe.batch for probe in probes]
        assert batch >= 1
        fits = batch <= largest_batch
        probes.append(Probe(batch=batch, fits=fits, peak_bytes=peak(batch) if fits and peak else None))
        assert len(probes) < 40
    return probes


@pytest.mark.parametrize("border", [1, 2, 7, 8, 9, 31, 100, 592, 5000])
@pytest.mark.parametrize("first", [1, 8, 64])
def test_the_border_is_found_to_the_resolution(border, first):
    fitting = largest(found(border, first=first))
    assert border - max(1, border * RESOLUTION) <= fitting.batch <= border


def test_where_not_one_sample_fits_there_is_no_largest():
    probes = found(0, first=8)
    assert [probe.batch for probe in probes] == [8, 4, 2, 1]
    assert largest(probes) is None


@pytest.mark.parametrize("border", [31, 100, 592, 5000])
@pytest.mark.parametrize("lost", [1.0, 0.93])
def test_memory_in_proportion_to_the_batch_makes_the_search_short(border, lost):
    """A fixed part, a part for each sample, and an allocator that cannot use all that there is."""
    each = GIB * 3 // 4 * lost / border

    def peak(batch):
        return int(GIB * lost / 4 + batch * each)

    probes = found(border, peak=peak)
    assert largest(probes).batch >= border * (1 - RESOLUTION) - 1
    assert len(probes) <= (6 if lost == 1.0 else 9)


@pytest.mark.parametrize("peak", [lambda batch: GIB // 2, lambda batch: GIB - batch, lambda batch: batch])
def test_a_peak_that_says_nothing_of_the_batch_does_not_mislead_for_long(peak):
    fitting = largest(found(300, peak=peak))
    assert 300 * (1 - RESOLUTION) - 1 <= fitting.batch <= 300


# -- probes in their own process ---------------------------------------------------------------------------------------

# 8 MiB a sample, in a process that may have 256 MiB more than it has when it starts
EATER = """
import json, resource, sys
batch = int(sys.argv[1])
status = open("/proc/self/status").read()
now = int(status.split("VmData:")[1].split()[0]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (now + 2**28, resource.RLIM_INFINITY))
held = [bytearray(2**23) for _ in range(batch)]
print("something of a library")
print(json.dumps({"batch": batch, "fits": True, "peak_bytes": batch * 2**23, "step_s": 0.5}))
"""


def run_python(code: str, batch: int) -> Probe:
    return run_probe([sys.executable, "-c", code, str(batch)], batch, 60)


def test_a_job_that_dies_of_its_memory_in_another_process_gives_the_border():
    probes: list[Probe] = []
    while (batch := next_batch(probes, 2**28, 4)) is not None:
        probes.append(run_python(EATER, batch))
    assert largest(probes).batch in (30, 31, 32)  # of 32 that have room, without what the interpreter takes
    assert {probe.reason for probe in probes if not probe.fits} == {"MemoryError"}


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import sys; sys.exit('torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB')", "CUDA out of"),
        ("import os; os.kill(os.getpid(), 9)", "killed by the host's kernel"),
    ],
)
def test_what_counts_as_no_memory(code, reason):
    probe = run_python(code, 3)
    assert (probe.batch, probe.fits) == (3, False)
    assert reason in probe.reason


def test_a_probe_that_takes_too_long_does_not_fit():
    probe = run_probe([sys.executable, "-c", "import time; time.sleep(60)"], 3, 0.5)
    assert probe == Probe(batch=3, fits=False, reason="not over after 0.5 s")


def test_a_search_goes_on_below_a_batch_that_takes_too_long(monkeypatch, tmp_path):
    def run(command, timeout, **_):
        assert importlib.util.find_spec(command[command.index("-m") + 1]).origin == bench_batch.__file__
        batch = int(command[command.index("--probe") + 1])
        if batch > 8:
            raise subprocess.TimeoutExpired(command, timeout)
        return SimpleNamespace(returncode=0, stdout=json.dumps({"batch": batch, "fits": True}))

    fake = SimpleNamespace(run=run, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(bench_batch, "subprocess", fake)
    path = tmp_path / "batch.json"
    assert run_main(path, "--timeout", "30") == 0
    (row,) = json.loads(path.read_text())["rows"].values()
    assert (row["batch"], row["finished"]) == (8, True)
    assert {probe["reason"] for probe in row["probes"] if not probe["fits"]} == {"not over after 30 s"}


def test_a_probe_that_fails_otherwise_is_an_error_and_no_border():
    with pytest.raises(RuntimeError, match=r"(?s)batch 3 ended with status 1: .*KeyError: 'a fault'"):
        run_python("raise KeyError('a fault')", 3)


def test_a_limit_on_a_gpu_is_a_fraction_of_its_memory(monkeypatch):
    fractions: list[float] = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 * GIB))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", fractions.append)
    bench_batch.limit_memory(torch.device("cuda"), 16)
    assert fractions == [0.2]
    with pytest.raises(ValueError, match=r"--gib is 81, expected at most the 80\.0 of the device"):
        bench_batch.limit_memory(torch.device("cuda"), 81)


@pytest.mark.large  # a process of its own, which imports all again
def test_a_real_probe_dies_by_its_limit():
    command = [sys.executable, "-m", bench_batch.MODULE, "--device", "cpu", "--small", "--part", "gpt-1024"]
    command += ["--gib", "0.02", "--strategies", "L1", "--attention", "sdpa"]
    probe = run_probe([*command, "--probe", "256"], 256, 120)
    assert not probe.fits
    assert probe.reason


def test_a_real_probe_that_fits_prints_what_it_measured(monkeypatch, capsys):
    monkeypatch.setattr(bench_batch, "limit_memory", lambda *_: None)  # it would hold for all tests after this one
    assert main(["--device", "cpu", "--small", "--part", "gpt-1024", "--strategies", "L2", "--probe", "2"]) == 0
    probe = Probe(**json.loads(capsys.readouterr().out))
    assert (probe.batch, probe.fits, probe.peak_bytes) == (2, True, None)
    assert probe.step_s > 0


# -- the script --------------------------------------------------------------------------------------------------------


def test_rows_have_materialised_attention_and_checkpoints_fused_attention_as_well():
    bert = rows_of("bert-large", SMALL_SHAPES["bert-large"], ["L1", "checkpoint", "checkpoint + L2"], 16)
    assert [(row.strategy, row.attention) for row in bert] == [
        ("L1", "eager"),
        ("checkpoint", "eager"),
        ("checkpoint + L2", "eager"),
        ("checkpoint", "sdpa"),
        ("checkpoint + L2", "sdpa"),
    ]
    gpt = rows_of("gpt-2048", SMALL_SHAPES["gpt-2048"], ["L1", "checkpoint"], 16)
    assert [(row.strategy, row.attention) for row in gpt] == [("L1", "sdpa"), ("checkpoint", "sdpa")]


def test_every_level_with_offload_is_probed_with_memory_as_the_constraint_too():
    rows = rows_of("bert-large", SMALL_SHAPES["bert-large"], PROBED, 16)
    names = [row.strategy for row in rows if STRATEGIES[row.strategy].needs_cuda]
    assert names == ["L3", "L3, all leave", "checkpoint + L3", "checkpoint + L3, all leave"]
    limits = [STRATEGIES[name].config.offload.max_device_bytes for name in names]
    assert limits == [0, 1, 0, 1]


@pytest.fixture
def machine(monkeypatch):
    """Probes that run at once, on a machine where 20 samples fit; what was probed."""
    probed: list[int] = []

    def probe(command, batch, timeout_s):
        probed.append(batch)
        return Probe(batch=batch, fits=batch <= 20, peak_bytes=batch * GIB // 20, step_s=batch / 100)

    monkeypatch.setattr(bench_batch, "run_probe", probe)
    return probed


def run_main(path: Path, *more: str) -> int:
    arguments = ["--device", "cpu", "--small", "--part", "gpt-2048", "--gib", "1", "--json", str(path)]
    return main([*arguments, "--strategies", "L1", "L3", *more])


def test_a_search_is_written_and_a_second_run_goes_on(machine, tmp_path, capsys):
    path = tmp_path / "batch.json"
    row = Row(part="gpt-2048", strategy="L1", attention="sdpa", gib=1.0)
    assert run_main(path, "--minutes", "0") == 1
    assert machine == []
    Results(path, {}).note(row, [Probe(batch=8, fits=True, peak_bytes=8 * GIB // 20)], finished=False)
    assert run_main(path) == 0
    assert 8 not in machine
    found = json.loads(path.read_text())["rows"][row.key]
    assert (found["batch"], found["finished"], found["samples_per_s"]) == (20, True, pytest.approx(100))
    probed = list(machine)
    assert run_main(path) == 0
    assert machine == probed
    printed = capsys.readouterr().out
    assert "L3, 1 GiB" in printed
    assert "not run: needs a CUDA device" in printed


def test_a_fault_keeps_what_was_probed(machine, monkeypatch, tmp_path):
    probe = bench_batch.run_probe

    def failing(command, batch, timeout_s):
        if batch > 8:
            raise RuntimeError("a fault")
        return probe(command, batch, timeout_s)

    monkeypatch.setattr(bench_batch, "run_probe", failing)
    with pytest.raises(RuntimeError, match="a fault"):
        run_main(tmp_path / "batch.json")
    rows = json.loads((tmp_path / "batch.json").read_text())["rows"]
    assert [[probe["batch"] for probe in row["probes"]] for row in rows.values()] == [[8]]
