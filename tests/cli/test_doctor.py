"""gact-dist doctor, the entry point, and what every command has."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gact_dist
from gact_dist import codec
from gact_dist.cli import main
from gact_dist.cli.app import app
from gact_dist.cli.malloc_settings import MALLOC_SETTINGS
from gact_dist.cli.stopping import terminated_as_interrupted

ROOT = Path(__file__).parents[2]
COMMANDS = sorted(command.name for command in app.registered_commands)


def test_a_machine_that_can_run_the_tests_is_fine(run_json):
    found = run_json("doctor")
    checks = {check["what"]: check for check in found["checks"]}
    assert not found["broken"]
    assert checks["torch"]["found"] == torch.__version__
    assert codec.isa() in checks["native library"]["found"]
    assert checks["native hooks"]["state"] == checks["process group"]["state"] == "fine"
    assert {"GPU", "NVRTC", "CUDA driver", "pinned memory", "RAM", "numpy", "python"} <= checks.keys()


def test_without_the_native_library_the_exit_code_is_1_and_the_mend_is_told(run, monkeypatch):
    monkeypatch.setattr(codec, "isa", lambda: "reference")
    monkeypatch.setattr(codec, "native_error", "the native library was not built; install a C++17 compiler")
    result = run("doctor")
    assert result.exit_code == 1
    assert "install a C++17 compiler" in " ".join(result.stdout.split())


def test_without_the_native_hooks_the_exit_code_is_1_and_the_mend_is_told(run, monkeypatch):
    monkeypatch.setattr("gact_dist.cli.doctor.IS_BUILT", False)
    monkeypatch.setattr("gact_dist.cli.doctor.NOT_BUILT", "No module named 'gact_dist._hooks'")
    result = run("doctor")
    assert result.exit_code == 1
    assert "headers of Python" in " ".join(result.stdout.split())


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


def test_the_settings_of_malloc_are_looked_for(run_json, run, monkeypatch):
    monkeypatch.setattr("platform.libc_ver", lambda: ("glibc", "2.36"))
    for variable in MALLOC_SETTINGS:
        monkeypatch.delenv(variable, raising=False)
    [check] = [check for check in run_json("doctor")["checks"] if check["what"] == "malloc settings"]
    assert check["state"] == "absent"
    export = "export MALLOC_MMAP_THRESHOLD_=262144 MALLOC_TRIM_THRESHOLD_=524288"
    assert export in check["mend"]
    assert run("doctor").exit_code == 0
    for variable, value in MALLOC_SETTINGS.items():
        monkeypatch.setenv(variable, value)
        assert f"    export {variable}={value}" in (ROOT / "docs" / "memory.md").read_text()
    [check] = [check for check in run_json("doctor")["checks"] if check["what"] == "malloc settings"]
    assert (check["state"], check["mend"]) == ("fine", "")
    assert "262144" in check["found"]


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


def call(monkeypatch, capsys, *arguments):
    """The entry point itself: (exit code, stdout, stderr)."""
    monkeypatch.setattr(sys, "argv", ["gact-dist", *arguments])
    with pytest.raises(SystemExit) as ended:
        main.main()
    shown = capsys.readouterr()
    return ended.value.code, shown.out, shown.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["profil"], "No such command 'profil'. Did you mean 'profile'?; gact-dist --help shows"),
        (["plan"], "Missing argument 'MODULE:FUNCTION'; gact-dist plan --help shows what is expected"),
        (["plan", "a:b"], "Missing option '--output' / '-o'; gact-dist plan --help"),
        (["plan", "a:b", "-o", "p.json", "--bits", "x"], "Invalid value for '--bits'"),
        (["doctor", "--josn"], "No such option: --josn"),
        (["profile", "a:b", "--rows", "0"], "Invalid value for '--rows'"),
    ],
)
def test_a_command_line_that_is_not_understood_is_one_message_in_either_form(monkeypatch, capsys, arguments, says):
    code, out, err = call(monkeypatch, capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {says}")
    assert err.count("\n") == 1
    code, out, err = call(monkeypatch, capsys, *arguments, "--json")
    assert (code, err) == (2, "")
    assert json.loads(out)["error"].startswith(says)


def test_without_arguments_the_help_is_shown(monkeypatch, capsys):
    code, out, _ = call(monkeypatch, capsys)
    assert code == 0
    assert "Usage: gact-dist [OPTIONS] COMMAND" in out


def test_an_exit_code_of_a_command_is_that_of_the_process(monkeypatch, capsys):
    monkeypatch.setattr(codec, "isa", lambda: "reference")
    assert call(monkeypatch, capsys, "doctor")[0] == 1
    assert call(monkeypatch, capsys, "report", "/nowhere")[0] == 2


def test_an_interrupt_is_one_word(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(codec, "isa", interrupted)
    assert call(monkeypatch, capsys, "doctor") == (130, "", "interrupted\n")


def test_sigterm_is_an_interrupt_with_an_exit_code_of_its_own(monkeypatch, capsys):
    monkeypatch.setattr(codec, "isa", lambda: os.kill(os.getpid(), signal.SIGTERM))
    usual = signal.getsignal(signal.SIGTERM)
    assert call(monkeypatch, capsys, "doctor") == (143, "", "interrupted\n")
    assert signal.getsignal(signal.SIGTERM) is usual


def test_a_fork_of_the_command_still_ends_by_sigterm():
    """As the workers of a DataLoader do: an exception would be a traceback for each of them."""
    with terminated_as_interrupted():
        fork = os.fork()
        if not fork:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]) == -signal.SIGTERM


@pytest.mark.parametrize(
    ("while_importing", "ended"),
    [
        ("try:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept BaseException:\n    pass", (130, "", "interrupted\n")),
        ("", (0, "default_int_handler\n", "")),
    ],
    ids=["interrupted", "undisturbed"],
)
def test_an_interrupt_while_the_package_is_imported_is_one_word(tmp_path, while_importing, ended):
    command = tmp_path / "gact_dist" / "cli" / "main.py"  # what takes the package's place
    command.parent.mkdir(parents=True)
    (tmp_path / "gact_dist" / "__init__.py").write_text(f"import os, signal\n\n{while_importing}\n")
    command.write_text("import signal\n\n\ndef main():\n    print(signal.getsignal(signal.SIGINT).__name__)\n")
    shutil.copy(ROOT / "_gact_dist_command.py", tmp_path)
    code = "import signal, _gact_dist_command as program; signal.signal(signal.SIGINT, signal.default_int_handler); "
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code + "program.main()"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == ended


def test_the_program_is_the_command_line():
    code = "import _gact_dist_command as program, sys; sys.argv[1:] = ['--version']; program.main()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == f"gact-dist {gact_dist.__version__}\n"


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
