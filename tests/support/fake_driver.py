"""A driver library for tests: it knows contexts, modules, functions and launches, and writes down what it is asked."""

import ctypes
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")


class FakeDriver:
    """Compiled into ``folder``. Its contexts are numbers: 100 and that of the device."""

    def __init__(self, folder: Path) -> None:
        path = folder / "libcuda.so"
        subprocess.run(["g++", "-x", "c", "-shared", "-fPIC", "-o", path, SOURCE], check=True)
        self.library = ctypes.CDLL(str(path))
        self.library.fake_calls.restype = ctypes.c_char_p

    def calls(self) -> list[str]:
        """One line a call, since the last time."""
        lines = self.library.fake_calls().decode().splitlines()
        self.library.fake_forget()
        return lines

    def show(self, arguments: int) -> None:
        """How many arguments of a launch are written down from now on; two by default."""
        self.library.fake_show(arguments)

    def fail_loads(self, *statuses: int) -> None:
        """The next loads of modules fail, in this order."""
        for status in reversed(statuses):
            self.library.fake_fail_load(status)
