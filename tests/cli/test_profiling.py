"""gact-dist profile: of a user's function and of a transformers config, as tables and as JSON; and what it refuses."""

from __future__ import annotations

import json

import pytest

from gact_dist.profile import LAYOUTS

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 100,
}  # fmt: skip


BLOCKS = """
import torch
from torch import nn


def blocks():
    torch.manual_seed(0)
    width = 64

    def block():
        return nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))))

    layers = nn.ModuleList(block() for _ in range(3))
    model = nn.ModuleDict({"layers": layers})

    def loss_fn(x):
        for layer in layers:
            x = layer(x)
        return x.square().mean()

    return model, torch.randn(2048, width), loss_fn
"""


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
    for expected in ("layers.*", "aten::", "gact_dist::pack", "jobs_of_user.py", "exact: ", "█"):
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


@pytest.mark.parametrize("options", [["--fake"], *(["--layout", layout, "--world-size", 2] for layout in LAYOUTS)])
def test_a_model_is_converted_where_nothing_is_real(config, run_json, options):
    levels = ("--sequence", 32, "--level", "untouched", "--optimizer", "sgd")
    found, narrow = (
        run_json("profile", config, *options, *levels, "--dtype", dtype) for dtype in ("float32", "bfloat16")
    )
    assert narrow["levels"][0]["peak"]["parameters"] == found["levels"][0]["peak"]["parameters"] / 2


SIZES = {"d_model": 32, "vocab_size": 100}
BERT = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 100}


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"model_type": "t5", "num_layers": 1, "num_heads": 2, "d_kv": 16, "d_ff": 64, **SIZES}, "modeling_t5"),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"], **BERT}, "modeling_bert"),
        ({"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 100}, "modeling_gpt2"),
    ],
)
def test_a_config_is_trained_as_what_it_is(tmp_path, run_json, fields, line):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields))
    found = run_json("profile", path, "--fake", "--sequence", 16, "--level", "L1")
    assert found["levels"][0]["retained_bytes"] > 0
    assert any(line in share["name"] for share in found["levels"][0]["lines"])


VIT = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "image_size": 64}
CONVNEXT = {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 32, 64], "drop_path_rate": 0.1}


@pytest.mark.parametrize(
    ("fields", "pixels"),
    [
        ({"model_type": "vit", "patch_size": 4, **VIT}, 64),  # more elements in its positions than are built for real
        ({"model_type": "convnext", **CONVNEXT}, 224),
        ({"model_type": "deit", **VIT}, 64),  # of which transformers has two classifiers
    ],
)
def test_a_config_of_images_is_a_classifier_and_as_large_with_fake_tensors(tmp_path, run_json, fields, pixels):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields))
    options = ("--batch-size", 2, "--level", "untouched", "--level", "L1", "--no-measure")
    real, fake = (run_json("profile", path, *options, *how) for how in ((), ("--fake",)))
    assert fake["parameters"] == real["parameters"]
    for shaped, measured in zip(fake["levels"], real["levels"], strict=True):
        assert shaped["peak"]["batch"] == 2 * 3 * pixels**2 * 4 + 2 * 8
        assert shaped["peak_bytes"] == pytest.approx(measured["peak_bytes"], rel=0.02)


def test_a_config_of_images_has_no_sequence(tmp_path, run):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit", **VIT}))
    result = run("profile", tmp_path, "--fake", "--sequence", 16)
    assert result.exit_code == 2
    assert "--sequence was given and a ViTConfig has images of its own size" in result.stderr


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        ("{jobs}:nothing", (), "has no function 'nothing'"),
        ("{jobs}:reads_a_value", ("--fake",), "_local_scalar_dense.default, which depends on values, and with --fake"),
        ("{jobs}:of_two_kinds", ("--fake",), "a CLIPConfig is no config of a language model"),
        ("{jobs}:too_large", (), "this machine has too little memory for it: give a smaller batch; `gact-dist profile"),
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
        ("{jobs}", (), "names no function"),
        ("", (), "the config '' is not on this machine, expected a folder with config.json"),
        ("{jobs}:small", ("--fake", "--sequence", "4"), "small returns a batch of its own"),
        (
            "{jobs}:small",
            ("--layout", "fsdp2", "--world-size", "4", "--reshard", "3"),
            "reshard is 3, expected a divisor",
        ),
        (
            "{jobs}:small",
            ("--level", "L2+deriv"),
            "level 'L2+deriv' ends in 'deriv', expected one of derive, recomputed",
        ),
        ("{jobs}:small", ("--fake", "--level", "L2+recomputed"), "and nothing is measured"),
    ],
)
def test_what_cannot_be_done_is_one_message(jobs, run, target, options, message):
    result = run("profile", target.format(jobs=jobs), *options, "--json")
    assert result.exit_code == 2
    error = json.loads(result.stdout)["error"]
    assert message in error
    assert "ProfileError" not in error


def test_a_config_larger_than_the_machine_is_refused_before_it_is_built(config, run, monkeypatch):
    monkeypatch.setattr("os.sysconf", lambda name: 1 << 8)  # bytes of a page, and pages
    result = run("profile", config, "--level", "untouched")
    assert result.exit_code == 2
    assert "and this machine has 64.00 KiB: give --fake" in result.stderr


@pytest.mark.parametrize("columns", [80, 40])
def test_no_number_and_no_reason_is_cut(jobs, run, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    result = run("profile", f"{jobs}:small", "--fake", "--rows", 40)
    assert result.exit_code == 0
    assert "…" not in result.stdout
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    headings = next(line for line in lines if "backward" in line and "kept" in line)
    assert headings.split() == ["level", "peak", "forward", "backward", "optimizer", "kept", "on", "host"]
    # which keep the same: what ends a layer is saved in the next one, so nothing is derived
    assert any(line.split()[:4] == ["saved", "tensor", "L1,", "L2"] for line in lines)
    text = " ".join(result.stdout.split())
    assert "exact: it has fewer than 1024 elements" in text
    assert "L2 and other levels that adapt have their average bits for every tensor, with what those" in text


def test_the_untouched_job_alone_says_what_it_keeps(jobs, run):
    kept = []
    for levels in (("--level", "untouched"), ("--level", "untouched", "--level", "L1")):
        result = run("profile", f"{jobs}:small", "--fake", *levels)
        row = next(line.split() for line in result.stdout.splitlines() if line.split()[:1] == ["untouched"])
        assert row[-2] == "100%"
        kept.append(float(row[-3]))
    assert kept[0] == pytest.approx(kept[1], abs=0.11)


def test_experts_of_a_mixture_say_which_type_has_a_fake_kernel(tmp_path, run):
    options = {
        **CONFIG,
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": 2,
        "num_key_value_heads": 4,
    }
    (tmp_path / "config.json").write_text(json.dumps(options))
    wanted = ("profile", tmp_path, "--fake", "--level", "untouched", "--sequence", 16)
    result = run(*wanted)
    assert result.exit_code == 2
    assert "give --dtype bfloat16" in result.stderr
    assert run(*wanted, "--dtype", "bfloat16").exit_code == 0


def test_bits_are_measured_where_there_are_values(jobs, run_json):
    levels = ("--level", "L1", "--level", "L2")
    bits = {}
    for name, options in (("values", ()), ("shapes", ("--fake",)), ("averages", ("--no-measure",))):
        found = run_json("profile", f"{jobs}:small", *levels, *options)
        rounded = [[t["bits"] for t in level["tensors"] if t["codec"] == "quantised"] for level in found["levels"]]
        bits[name] = [set(of_level) for of_level in rounded]
        assert ("were measured on this batch" in " ".join(found["notes"])) == (name == "values")
        assert found["levels"][1]["retained_bytes"] <= 1.02 * found["levels"][0]["retained_bytes"]
    assert bits["shapes"] == bits["averages"]
    assert bits["shapes"][0] == bits["values"][0] == {4.0}
    assert bits["shapes"][1] <= {4.0, 5.0}  # a bit of each element that is derived goes to the others
    assert len(bits["values"][1]) > 1


def test_a_config_has_no_values_to_measure_unless_they_are_asked_for(config, run_json):
    options = ("--sequence", 16, "--level", "L2")
    for given, measured in (((), False), (("--measure",), True)):
        found = run_json("profile", config, *options, *given)
        assert ("were measured on this batch" in " ".join(found["notes"])) == measured
        widths = {tensor["bits"] for tensor in found["levels"][0]["tensors"] if tensor["codec"] == "quantised"}
        assert (widths <= {4.0, 5.0}) != measured


def test_what_checkpointed_blocks_recompute_is_counted(tmp_path, run_json):
    path = tmp_path / "blocks_of_user.py"
    path.write_text(BLOCKS)
    levels = ("--level", "L2", "--level", "L2+recomputed")
    found = run_json("profile", f"{path}:blocks", "--checkpointing", "--optimizer", "none", *levels)
    plain, recomputed = found["levels"]
    assert recomputed["peak_bytes"] < 0.9 * plain["peak_bytes"]
    kind = "recomputed activations"
    assert recomputed["peak"].get(kind, 0) < 0.5 * plain["peak"][kind]
