"""The program gact-dist, as it starts: outside the package, whose import takes seconds that a user may not wait for.

Within them Python would print the line of torch that it was at, or go on, where an extension drops the interrupt.
"""

import os
import signal
import sys
from typing import Any

INTERRUPTED = 130


def main() -> None:
    """Run the command line of this process. An interrupt before it begins ends the process with one word."""
    usual = signal.getsignal(signal.SIGINT)
    stops = usual is signal.default_int_handler  # else whoever started it wants it otherwise, as nohup does
    if stops:
        signal.signal(signal.SIGINT, _stop)
    from gact_dist.cli.main import main as run

    if stops:
        signal.signal(signal.SIGINT, usual)
    run()


def _stop(*_: Any) -> None:
    sys.stderr.write("interrupted\n")
    sys.stderr.flush()
    os._exit(INTERRUPTED)  # an exception could be caught on its way


if __name__ == "__main__":
    main()
