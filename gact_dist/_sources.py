"""Whether what was compiled was built from the sources that lie beside it.

[Note: sources] In a checkout that was updated, the libraries of before are still there where nobody has built them
anew, or where that failed, as an installation goes on without a compiler. With other operators or classes than Python
expects they would fail, or be passed by in silence. So each holds the fingerprint of its sources, and one with another
is not used. An installed package has no sources, and nothing to compare.
"""

import hashlib
from functools import cache
from pathlib import Path

FOLDERS = ("common", "cpu", "hooks")
"""of csrc: those that setup.py compiles"""
_SUFFIXES = (".h", ".cpp")
OTHER_SOURCES = "it was built from other sources than csrc/ now holds; run pip install again"
_CSRC = Path(__file__).absolute().parents[1] / "csrc"  # without _paths: setup.py runs this file alone


def fingerprint(csrc: Path = _CSRC) -> str:
    """Of all that is compiled, as setup.py writes it into each library."""
    digest = hashlib.blake2b(digest_size=16)
    files = (path for folder in FOLDERS for path in sorted((csrc / folder).iterdir()))
    for path in (path for path in files if path.suffix in _SUFFIXES):  # an editor may leave others
        digest.update(b"%s %d\n" % (path.name.encode(), path.stat().st_size))
        digest.update(path.read_bytes())
    return f"gact_dist sources {digest.hexdigest()}"


def is_of_these_sources(library: str | Path) -> bool:
    """Whether a library was built from the sources of this checkout; true where there are none."""
    expected = _expected()
    return not expected or expected in Path(library).read_bytes()


@cache
def _expected() -> bytes:
    return fingerprint().encode() if (_CSRC / FOLDERS[-1]).is_dir() else b""
