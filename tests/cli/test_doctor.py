"""gact-dist doctor, the entry point, and what every command has."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from gact_dist import codec
from gact_dist.cli import main
from gact_dist.cli.app import app

COMMANDS = sorted(command.name for command in app.registered_commands)


def test_a_machine_that_can_run_the_tests_is_fine(run_json):
    found = run_json("doctor")
    checks = {check["what"]: check for check in found["checks"]}
    assert not found["broken"]
    assert checks["torch"]["found"] == torch.__version__
    assert codec.isa() in checks["native library"]["found"]
    assert checks["process group"]["state"] == "fine"
    assert {"GPU", "NVRTC", "CUDA driver", "pinned memory", "RAM", "numpy", "python"} <= checks.keys()


def test_without_the_native_library_the_exit_code_is_1_and_the_mend_is_told(run, monkeypatch):
    monkeypatch.setattr(codec, "isa", lambda: "reference")
    monkeypatch.setattr(codec, "native_error", "the native library was not built; install a C++17 compiler")
    result = run("doctor")
    assert result.exit_code == 1
    assert "install a C++17 compiler" in " ".join(result.stdout.split())


def test_wrong_values_of_the_library_are_found(run, monkeypatch):
    monkeypatch.setattr(codec, "unpack", lambda packed: torch.zeros(4096))
    result = run("doctor")
    assert result.exit_code == 1
    assert "wrong values, off by 1" in " ".join(result.stdout.split())


def test_a_gpu_without_nvrtc_is_broken(run_json, run, monkeypatch):
    def refuse():
        raise codec.KernelsUnavailableError("NVRTC is not found; pip install nvidia-cuda-nvrtc")

    monkeypatch.setattr(codec, "find_nvrtc", refuse)
    assert run("doctor").exit_code == (1 if torch.cuda.is_available() else 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    properties = type("Properties", (), {"name": "H100", "total_memory": 80 << 30, "major": 9, "minor": 0})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    result = run("doctor")
    assert result.exit_code == 1
    assert "pip install nvidia-cuda-nvrtc" in " ".join(result.stdout.split())


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_has_an_example_and_json(run, name):
    result = run(name, "--help")
    assert result.exit_code == 0
    assert f"$ gact-dist {name}" in result.stdout
    assert "--json" in result.stdout


def test_the_help_lists_every_command(run):
    result = run("--help")
    assert all(name in result.stdout for name in COMMANDS)
    assert {"doctor", "max-batch", "plan", "report"} <= set(COMMANDS)


def test_the_version(run):
    assert run("--version").stdout.startswith("gact-dist ")


def test_an_unknown_command_is_exit_code_2(run):
    assert run("profil").exit_code == 2


def test_without_the_extra_one_line_says_how_to_install_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == "gact-dist needs plotly: pip install 'gact-dist[cli]'\n"


def test_the_package_does_without_the_extra():
    code = (
        "import sys, gact_dist; print([name for name in ('typer', 'rich', 'plotly', 'click') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
