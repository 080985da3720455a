"""gact-dist report: one page that needs nothing else, of runs in either form."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import plotly.graph_objects
import pytest
import torch

import gact_dist
from gact_dist import Config
from gact_dist.cli import figures, page, pictures, run_files
from gact_dist.cli.loading import load_job

ALL = {"losses", "activations", "peak", "step", "layers", "bits", "sensitivities", "gradient", "time"}


def train(jobs: Path, folder: Path, **settings: object) -> None:
    job = load_job(f"{jobs}:small")
    gact = gact_dist.attach(job.model, config=Config(run_dir=str(folder), **settings))
    for _ in range(6):
        with gact.step(job.loss_fn, job.batch):
            loss = job.loss_fn(job.batch)
        gact.log(loss=loss)
        loss.backward()
    gact.detach()


@pytest.fixture
def two_runs(jobs, tmp_path) -> Path:
    """A folder of an untouched run and a compressed one."""
    folder = tmp_path / "runs"
    train(jobs, folder / "untouched", policy="off")
    train(jobs, folder / "L2", adapt_interval=2, adapt_tolerance=0.0)
    return folder


class Resources(HTMLParser):
    """What a page asks for, its text, and its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.tags.append(tag)
        self.ids += [given["id"]] if "id" in given else []
        self.asked += [given[key] for key in ("src", "href", "data", "action", "poster", "srcset") if key in given]


def test_the_page_of_two_runs_has_every_figure_and_asks_for_nothing(two_runs, run_json):
    found = run_json("report", two_runs)
    assert (found["runs"], set(found["figures"])) == (["untouched", "L2"], ALL)
    text = (two_runs / "report.html").read_text()
    parsed = Resources(text)
    assert parsed.asked == []
    assert not {"link", "img", "iframe"} & set(parsed.tags)
    assert parsed.tags.count("script") == 4  # theme, plotly, data, drawing
    assert set(parsed.ids) >= ALL
    before_plotly = text[: text.index("plotly.js v")]
    assert "http" not in before_plotly
    assert "@import" not in before_plotly
    assert "url(" not in before_plotly
    cards = {card["what"]: card["value"] for card in found["key_figures"]}
    assert {"Compression of activations", "Average bits", "Peak memory", "Time of a step", "Loss"} <= cards.keys()


@pytest.mark.parametrize("derive", [None, True])
def test_the_level_of_a_run_is_the_one_with_all_its_settings(derive):
    profile = {"levels": [{"level": name} for name in ("untouched", "L1", "L1+derive", "L2")]}
    run = run_files.Run("run", {"config": {"policy": "uniform", "bits": 4, "derive": derive}})
    assert figures.level_of(run, profile)["level"] == ("L1+derive" if derive else "L1")


def test_a_profile_of_the_job_adds_memory_within_a_step(two_runs, jobs, run, run_json, tmp_path):
    """Drawn for the level of the run that is looked at; the layers add up to the peak."""
    profile = tmp_path / "profile.json"
    profile.write_text(run("profile", f"{jobs}:small", "--json").stdout)
    found = run_json("report", two_runs, "--profile", profile)
    assert set(found["figures"]) == ALL | {"memory", "peak_layers"}
    runs, content = run_files.find_runs([two_runs]), run_files.read_profile(profile)
    level = figures.level_of(runs[-1], content)
    assert level["level"] == "L2"
    assert figures.level_of(runs[0], content)["level"] == "untouched"
    drawn = {figure.key: figure for figure in figures.figures_of(runs, content)}
    untouched, compressed = drawn["peak_layers"].data
    assert [untouched["name"], compressed["name"]] == ["untouched", "L2"]
    unit = {"MiB": 2**20, "KiB": 2**10}[drawn["peak_layers"].layout["xaxis"]["title"]["text"]]
    for bars, of in ((untouched, content["levels"][0]), (compressed, level)):
        assert sum(bars["x"]) * unit == pytest.approx(of["peak_bytes"], rel=0.01)
    *kinds, whole = drawn["memory"].data
    heights = [sum(values) for values in zip(*(kind["y"] for kind in kinds), strict=True)]
    assert max(heights) * unit == pytest.approx(level["peak_bytes"], rel=0.05)
    assert max(whole["y"]) * unit == pytest.approx(content["levels"][0]["peak_bytes"], rel=0.05)
    content["levels"] = [level]
    alone = {figure.key: figure for figure in figures.figures_of(runs, content)}
    assert [line["name"] for line in alone["memory"].data] == [kind["name"] for kind in kinds]
    assert [bars["name"] for bars in alone["peak_layers"].data] == ["L2"]
    assert all(later >= earlier for line in (*kinds, whole) for earlier, later in itertools.pairwise(line["x"]))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "cannot be read"),
        ("[]", "holds no profile"),
        ('{"levels": []}', "holds no profile"),
        ('{"error": "the step failed"}', "holds no profile"),
    ],
)
def test_what_is_no_profile_is_refused(text, said, two_runs, run, tmp_path):
    profile = tmp_path / "profile.json"
    profile.write_text(text)
    result = run("report", two_runs, "--profile", profile)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in " ".join(result.stderr.split())
    assert "gact-dist profile JOB --json" in " ".join(result.stderr.split())
    assert not (two_runs / "report.html").exists()


def test_the_losses_of_both_are_in_one_figure(two_runs):
    runs = run_files.find_runs([two_runs])
    drawn = next(figure for figure in figures.figures_of(runs) if figure.key == "losses")
    assert [line["name"] for line in drawn.data] == ["untouched", "L2"]
    assert drawn.data[1]["y"] == pytest.approx(runs[1].losses[1], abs=1e-5)


def test_figures_are_valid_and_name_their_axes(two_runs):
    for figure in figures.figures_of(run_files.find_runs([two_runs])):
        plotly.graph_objects.Figure({"data": figure.data, "layout": figure.layout})  # raises for what plotly lacks
        assert figure.caption
        assert figure.title
        titled = {axis for axis in ("xaxis", "yaxis") if figure.layout[axis]["title"]["text"]}
        assert titled or figure.key == "bits"


def test_bits_by_layer_are_those_of_the_adaptations(two_runs):
    [_, run] = run_files.find_runs([two_runs])
    drawn = next(figure for figure in figures.figures_of([run]) if figure.key == "bits")
    [cells] = drawn.data
    assert cells["x"] == [f"step {line['step']}" for line in run.adaptations]
    tensors = run.adaptations[-1]["tensors"]
    sizes = {row["name"]: torch.Size(row["shape"]).numel() for row in run.rows}
    own = [
        (sizes[name], entry["bits"]) for name, entry in tensors.items() if name.startswith("layers.1") and entry["bits"]
    ]
    expected = sum(size * bits for size, bits in own) / sum(size for size, _ in own)
    assert cells["z"][cells["y"].index("layers.1")][-1] == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(("count", "gap"), [(4, 2), (40, 0)])
def test_cells_of_many_adaptations_have_no_gaps_that_would_hide_them(count, gap):
    lines = [{"step": step, "tensors": {"layers.0:Linear@1": {"bits": 4}}} for step in range(count)]
    [drawn] = figures.figures_of([run_files.Run("L2", adaptations=lines)])
    [cells] = drawn.data
    assert (drawn.key, len(cells["x"]), cells["xgap"]) == ("bits", count, gap)


@pytest.mark.parametrize(("largest", "apart"), [(1e-2, "D2"), (1.0, 1)])
def test_a_logarithmic_axis_has_labels_however_close_its_values_are(tmp_path, largest, apart):
    lines = [{"step": step, "squared_gradient": 1.0, "measured": value} for step, value in ((1, largest), (2, 9e-4))]
    run = run_files.Run("L2", comparisons=lines)
    [drawn] = figures.figures_of([run])
    assert (drawn.key, drawn.layout["yaxis"]["type"], drawn.layout["yaxis"]["dtick"]) == ("gradient", "log", apart)


def test_memory_over_a_step_ends_where_the_report_does(two_runs):
    [_, run] = run_files.find_runs([two_runs])
    drawn = next(figure for figure in figures.figures_of([run]) if figure.key == "step")
    *layers, whole = drawn.data
    middle = len(run.rows)
    exact, retained = run.last_bytes
    assert sum(layer["y"][middle] for layer in layers) == pytest.approx(retained / 2**10, rel=1e-3)
    assert whole["y"][middle] == pytest.approx(exact / 2**10, rel=1e-3)
    assert all(layer["y"][0] == layer["y"][-1] == 0 for layer in layers)


def test_a_run_of_the_examples_is_read_from_its_result(tmp_path, run_json):
    stored = {"codec": "quantised", "bits": 4.0, "bytes": 600, "sensitivity": 1.0}
    rows = [{"name": "layer.0:Add@1", "shape": [4, 256], "dtype": "torch.float32", **stored}]
    result = {
        "config_name": "text", "world_size": 2, "device": "cpu", "losses": [1.0, 0.5], "accuracy": 0.75,
        "step_time_median_s": 0.2, "peak_bytes": 3 << 20, "step_peaks_bytes": [3 << 20, 2 << 20],
        "report": {"exact_bytes": 4096, "retained_bytes": 600, "rows": rows}, "versions": {"torch": "2.13"},
    }  # fmt: skip
    tensors = {"layer.0:Add@1": {"bits": 4, "sensitivity": 1.0}}
    history = {
        "step": 1,
        "average_bits": 4.0,
        "stored_exactly": {"layer.0:Exp@2": "too coarse <b>"},
        "tensors": tensors,
    }
    (tmp_path / "result.json").write_text(json.dumps(result))
    (tmp_path / "history.jsonl").write_text(json.dumps(history) + '\n{"step": 2, "event": "disabled", "why": "x"}\n')
    found = run_json("report", tmp_path, "--output", tmp_path / "page.html")
    assert set(found["figures"]) == {"losses", "peak", "step", "layers", "bits", "sensitivities"}
    assert {"what": "Test accuracy", "value": "75.0%", "note": "on test examples"} in found["key_figures"]
    text = (tmp_path / "page.html").read_text()
    assert "too coarse &lt;b&gt;" in text


def test_a_run_that_went_back_is_read_as_it_ended(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    steps = [(1, 5.0), (2, 4.0), (3, 3.0), (2, 3.5), (3, 2.5)]
    text = "".join(json.dumps({"step": step, "loss": loss}) + "\n" for step, loss in steps)
    (tmp_path / "steps.jsonl").write_text(text + '{"step": 4, "lo')  # killed in the middle of a line
    [run] = run_files.find_runs([tmp_path])
    assert run.losses == ([1, 2, 3], [5.0, 3.5, 2.5])


def test_the_rank_and_the_step_that_differ_are_shown_where_not_all_are(tmp_path, run_json):
    """130 ranks with 20 plans, of which a page shows the latest: rank 100 went its own way in the second."""
    ranks = tmp_path / "run" / "ranks"
    ranks.mkdir(parents=True)
    (ranks.parent / "run.json").write_text(json.dumps({"world_size": 130}))
    (ranks.parent / "steps.jsonl").write_text("".join(f'{{"step": {step}, "loss": 1.0}}\n' for step in (1, 2)))
    for rank in range(130):
        plans = ["bad" if (rank, step) == (100, 2) else "good" for step in range(1, 21)]
        lines = [{"step": step, "plan": plan, "retained_bytes": 100} for step, plan in enumerate(plans, 1)]
        (ranks / f"rank{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run_json("report", tmp_path / "run", "--output", tmp_path / "page.html")
    table = (tmp_path / "page.html").read_text().split("Agreement of ranks")[1].split("</table>")[0]
    assert re.findall(r"step (\d+)", table) == ["2", "16", "17", "18", "19", "20"]
    assert re.findall(r"<tr><td>(\d+)</td>", table) == [*map(str, range(63)), "100"]
    assert table.count("✗") == 1


def test_ranks_with_different_plans_are_shown(tmp_path, run_json):
    (tmp_path / "run.json").write_text(json.dumps({"world_size": 2}))
    (tmp_path / "steps.jsonl").write_text('{"step": 1, "loss": 1.0}\n{"step": 2, "loss": 0.5}\n')
    (tmp_path / "ranks").mkdir()
    for rank, digest in enumerate(("aaaa", "bbbb")):
        line = {"step": 1, "plan": digest, "tensors": 3, "retained_bytes": 100, "exact_bytes": 400}
        (tmp_path / "ranks" / f"rank{rank}.jsonl").write_text(json.dumps(line) + "\n")
    found = run_json("report", tmp_path)
    assert {"what": "Ranks", "value": "differ", "note": "in the plans of steps 1"} in found["key_figures"]
    assert "✗ " in (tmp_path / "report.html").read_text()


def test_a_table_for_people(two_runs, run):
    result = run("report", two_runs / "L2")
    assert result.exit_code == 0
    assert "Compression of activations" in result.stdout
    assert f"9 figures of L2 in {two_runs}/L2/report.html" in result.stdout.replace("\n", "")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda folder: None, "there is no folder"),
        (lambda folder: folder.mkdir(), "holds no run, expected run.json"),
        (lambda folder: (folder.mkdir(), (folder / "run.json").write_text("{}")), "has no lines yet"),
        (lambda folder: (folder.mkdir(), (folder / "run.json").write_text("{")), "cannot be read"),
        (lambda folder: (folder.mkdir(), (folder / "run.json").write_text("")), "cannot be read"),
        (
            lambda folder: (folder.mkdir(), (folder / "run.json").write_text("[]")),
            "holds a list, expected a JSON object",
        ),
    ],
)
def test_what_is_no_run(tmp_path, run, make, says):
    make(tmp_path / "run")
    result = run("report", tmp_path / "run")
    assert (result.exit_code, result.stdout) == (2, "")
    assert says in result.stderr


def test_a_page_that_cannot_be_written(two_runs, run):
    result = run("report", two_runs, "--output", two_runs / "no" / "page.html")
    assert result.exit_code == 2
    assert "the page cannot be written" in result.stderr


def test_pictures_of_all_figures_or_one_message_why_not(two_runs, run_json, run, monkeypatch):
    drawn = []
    monkeypatch.setattr(pictures, "find_spec", lambda name: name)
    monkeypatch.setattr(plotly.graph_objects.Figure, "write_image", lambda self, path, **_: drawn.append(Path(path)))
    found = run_json("report", two_runs, "--png", two_runs / "png")
    assert [str(path) for path in drawn] == found["png"]
    assert {path.stem for path in drawn} == ALL

    def refuse(*_: object, **__: object) -> None:
        raise ValueError("Image export requires the kaleido package")

    monkeypatch.setattr(plotly.graph_objects.Figure, "write_image", refuse)
    result = run("report", two_runs, "--png", two_runs / "png")
    assert result.exit_code == 2
    assert "drawing a PNG (it needs `pip install kaleido`" in result.stderr
    monkeypatch.setattr(pictures, "find_spec", lambda name: None)
    (two_runs / "report.html").unlink()
    result = run("report", two_runs, "--png", two_runs / "png")
    assert result.exit_code == 2
    assert "drawing a PNG needs `pip install kaleido`" in result.stderr
    assert not (two_runs / "report.html").exists()


def test_a_picture_has_room_for_its_title_each_row_of_its_legend_and_the_last_tick(two_runs):
    drawn = {figure.key: figure for figure in figures.figures_of(run_files.find_runs([two_runs]))}
    one_row, height = pictures.layout_of(drawn["losses"])
    assert one_row["margin"]["t"] >= 50 + 20  # the title, and below it the legend
    [line, *_] = drawn["step"].data
    lines = [{**line, "name": f"layers.{i}.attention.query"} for i in range(9)]  # three in a row
    many = dataclasses.replace(drawn["step"], data=lines, height=drawn["losses"].height)
    three_rows, higher = pictures.layout_of(many)
    assert three_rows["margin"]["t"] == one_row["margin"]["t"] + 2 * 20
    assert higher == height + 2 * 20  # the plot keeps its size
    assert three_rows["margin"]["r"] == drawn["step"].layout["margin"]["r"]  # of "backward ends", below the corner
    assert three_rows["title"]["yref"] == "container"
    # one entry for several lines, as where layers are too many for a legend
    of_one = dataclasses.replace(many, data=[{**line, "showlegend": i == 0} for i, line in enumerate(lines)])
    assert pictures.layout_of(of_one)[0]["margin"]["t"] == one_row["margin"]["t"]


def test_peaks_of_another_kind_are_not_set_side_by_side(two_runs):
    """One run ended and has those above the start of training; the other was stopped, and has those of the process."""
    untouched, compressed = run_files.find_runs([two_runs])
    both = figures.figures_of([untouched, compressed])
    assert [line["name"] for line in {figure.key: figure for figure in both}["peak"].data] == ["untouched", "L2"]
    assert "untouched: " in dict(card[::2] for card in page.cards_of([untouched, compressed]))["Peak memory"]
    untouched.result.update(peak_bytes=3 << 20, step_peaks_bytes=[3 << 20, 2 << 20])
    for known in ("peaks_bytes", "peak_bytes"):
        vars(untouched).pop(known, None)
    [line] = {figure.key: figure for figure in figures.figures_of([untouched, compressed])}["peak"].data
    assert line["name"] == "L2"
    assert "untouched" not in dict(card[::2] for card in page.cards_of([untouched, compressed]))["Peak memory"]


def test_a_page_holds_no_end_of_a_script_in_its_data():
    line = {"type": "scatter", "x": [1], "y": [1], "name": "</script><b>"}
    figure = figures.Figure("x", "<title>", "", [line], {"xaxis": {}, "yaxis": {}})
    text = page.page_of_figures("<heading>", "", [figure])
    assert "</script><b>" not in text
    assert "&lt;heading&gt;" in text
    assert "&lt;title&gt;" in text


def test_lines_that_are_not_as_they_were_written_are_left_out_and_counted(two_runs, run_json, run):
    steps = two_runs / "L2" / "steps.jsonl"
    bad = ["3", '"x"', '{"loss": 3}', '{"step": "x"}', '{"step": 3, "loss": "abc"}', "\udcff\ufffd", '{"step": 7, "lo']
    steps.write_text(steps.read_text() + "\n".join(bad), errors="surrogateescape")
    found = run_json("report", two_runs)
    assert found["unread_lines"] == {"L2/steps.jsonl": len(bad)}
    assert set(found["figures"]) == ALL
    assert f"L2/steps.jsonl: {len(bad)} lines cannot be read and are left out" in run("report", two_runs).stdout


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("run.json", '{"world_size": "two"}'),
        ("saved.jsonl", '{"step": 9, "rows": [["a", [2, 2]]]}\n'),
        ("saved.jsonl", '{"step": 9}\n'),
        ("adaptations.jsonl", '{"step": 9, "tensors": 3}\n'),
        ("gradient.jsonl", '{"step": 9, "squared_gradient": 1.0, "predicted": "x"}\n'),
    ],
)
def test_a_file_that_another_program_wrote_is_one_message(two_runs, run, file, content):
    (two_runs / "L2" / file).write_text(content)
    result = run("report", two_runs)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(("error: reading the run in ", "error: drawing untouched, L2 (is each file as"))
    assert "L2" in result.stderr


def test_a_rank_that_left_no_file_is_said(two_runs, run_json):
    about = json.loads((two_runs / "L2" / "run.json").read_text())
    (two_runs / "L2" / "run.json").write_text(json.dumps({**about, "world_size": 2}))
    cards = {card["what"]: card for card in run_json("report", two_runs)["key_figures"]}
    assert cards["Ranks"]["value"] == "unknown"
    assert cards["Ranks"]["note"].startswith("only rank 0 of 2 left a file in ranks")


def test_a_run_is_drawn_once_and_two_of_one_name_are_told_apart(two_runs, run_json, tmp_path):
    assert run_json("report", two_runs, two_runs / "L2")["runs"] == ["untouched", "L2"]
    shutil.copytree(two_runs / "L2", tmp_path / "again" / "L2")
    found = run_json("report", two_runs, tmp_path / "again")
    assert found["runs"] == ["untouched", str(two_runs / "L2"), str(tmp_path / "again" / "L2")]
