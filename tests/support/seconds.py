"""Write ../seconds.json, how long the functions of the tests take: see [Note: which cases run] in ../conftest.py.

bash launch/test.sh --all --junitxml=run.xml && python tests/support/seconds.py run.xml
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

TESTS = Path(__file__).parents[1]
FROM_S = 1.5


def seconds(report: Path) -> dict[str, float]:
    """Seconds by function, of those with several cases that take more than FROM_S together."""
    taken: Counter[str] = Counter()
    cases: Counter[str] = Counter()
    for case in ElementTree.parse(report).iter("testcase"):
        function = f"{case.attrib['classname'].replace('.', '/')}.py::{case.attrib['name'].partition('[')[0]}"
        taken[function] += float(case.attrib["time"])
        cases[function] += 1
    return {name: round(taken[name], 1) for name in sorted(taken) if cases[name] > 1 and taken[name] > FROM_S}


if __name__ == "__main__":
    (TESTS / "seconds.json").write_text(json.dumps(seconds(Path(sys.argv[1])), indent=2) + "\n")
