"""The entry point `gact-dist`. It starts without the extra "cli", to say how that is installed."""

import sys
from importlib.util import find_spec

from .stopping import exit_code_of, terminated_as_interrupted

_NEEDED = ("typer", "rich", "plotly")
USAGE_ERROR = 2


def main() -> None:
    """Run the command line of this process."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        sys.stderr.write(f"gact-dist needs {', '.join(missing)}: pip install 'gact-dist[cli]'\n")
        raise SystemExit(USAGE_ERROR)
    try:
        with terminated_as_interrupted():
            from .app import run

            raise SystemExit(run(sys.argv[1:] or ["--help"]))
    except KeyboardInterrupt as stopped:
        sys.stderr.write("interrupted\n")
        raise SystemExit(exit_code_of(stopped)) from None


if __name__ == "__main__":
    main()
