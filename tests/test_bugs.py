from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
NAMED = re.compile(r"`([\w/]+\.py)::(test_\w+)`")


def test_every_test_that_bugs_md_names_exists() -> None:
    named = NAMED.findall((HERE / "BUGS.md").read_text())
    assert len(named) > 50
    assert [(file, name) for file, name in named if f"def {name}(" not in (HERE / file).read_text()] == []
