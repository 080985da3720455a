"""gact-dist profile: of a user's function and of a transformers config, as tables and as JSON; and what it refuses."""

from __future__ import annotations

import json

import pytest

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 100,
}  # fmt: skip


@pytest.fixture
def config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.mark.parametrize("function", ["small", "as_mapping", "with_loss"])
def test_a_job_in_each_form(jobs, run_json, function):
    found = run_json("profile", f"{jobs}:{function}", "--fake", "--level", "untouched", "--level", "L1")
    untouched, compressed = found["levels"]
    assert (untouched["level"], compressed["level"]) == ("untouched", "L1")
    assert untouched["peak_bytes"] == sum(untouched["peak"].values())
    assert 0 < compressed["retained_bytes"] < compressed["exact_bytes"]
    assert {"parameters", "optimizer state", "batch"} <= set(untouched["peak"])


def test_tables_show_modules_operators_lines_and_reasons(jobs, run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    result = run("profile", f"{jobs}:small", "--level", "untouched", "--level", "L2", "--show", "L2", "--rows", 40)
    assert result.exit_code == 0
    for expected in ("layers.*", "aten::", "gact_dist::pack", "compressed", "jobs_of_user.py", "exact because", "█"):
        assert expected in result.stdout


def test_a_config_is_a_causal_language_model(config, run_json):
    sharded = ("--layout", "fsdp2", "--world-size", 8, "--level", "untouched", "--sequence", 32)
    found = run_json("profile", config, "--batch-size", 4, *sharded)
    smaller = run_json("profile", config / "config.json", "--batch-size", 2, *sharded)
    assert found["world_size"] == 8
    assert found["fake"] is True
    assert found["parameters"] == smaller["parameters"] > 100 * 64
    assert found["levels"][0]["peak_bytes"] > smaller["levels"][0]["peak_bytes"]


def test_a_function_may_return_a_config(tmp_path, run_json):
    path = tmp_path / "configs_of_user.py"
    path.write_text(f"import transformers\ndef llama():\n    return transformers.LlamaConfig(**{CONFIG!r})\n")
    found = run_json("profile", f"{path}:llama", "--fake", "--sequence", 16, "--level", "L1", "--optimizer", "sgd")
    assert found["levels"][0]["retained_bytes"] > 0


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        ("{jobs}:nothing", (), "has no function 'nothing'"),
        ("/nowhere/at/all", (), "the config '/nowhere/at/all' is not on this machine"),
        ("{jobs}:only_a_model", (), "expected (model, batch)"),
        ("{jobs}:raises", (), "FileNotFoundError"),
        ("{jobs}:fails_in_forward", ("--fake",), "jobs_of_user.py:"),
        ("{jobs}:without_loss", ("--fake",), "the model returned a tensor of shape (32, 4)"),
        ("{jobs}:frozen", ("--fake",), "no parameter of the model requires a gradient"),
        ("{jobs}:small", ("--level", "L9"), "level is 'L9'"),
        ("{jobs}:small", ("--layout", "mesh"), "layout is 'mesh'"),
        ("{jobs}:small", ("--dtype", "int3"), "'int3' is no type of parameters"),
        ("{jobs}:small", ("--layout", "fsdp2", "--reshard", "maybe"), "--reshard is 'maybe'"),
        ("{jobs}:small", ("--show", "L7"), "--show is 'L7'"),
    ],
)
def test_what_cannot_be_done_is_one_message(jobs, run, target, options, message):
    result = run("profile", target.format(jobs=jobs), *options, "--json")
    assert result.exit_code == 2
    error = json.loads(result.stdout)["error"]
    assert message in error
    assert "ProfileError" not in error
