from __future__ import annotations

import json
import shlex

from epp.toolbox.demo.keep import curl_lines


def test_every_command_can_be_pasted_into_a_shell() -> None:
    lines = [line for line in curl_lines("http://h:1", "http://h:2").splitlines() if line.startswith("curl")]
    words = [shlex.split(line) for line in lines]
    assert [w[2] for w in words] == [
        "http://h:1/v1/completions", "http://h:1/v1/chat/completions", "http://h:1/v1/chat/completions",
        "http://h:2/debug/decisions", "http://h:2/metrics",
    ]  # fmt: skip
    bodies = [json.loads(w[w.index("-d") + 1]) for w in words if "-d" in w]
    assert [body.get("stream", False) for body in bodies] == [False, False, True]
