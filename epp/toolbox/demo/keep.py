"""What to try by hand while `--keep` leaves the demo running. Pure."""

from __future__ import annotations

import json

from epp.toolbox.demo import model

_QUESTION = "Which tier holds this prefix? " * 20


def curl_lines(base_url: str, metrics_url: str) -> str:
    """Commands that can be pasted into a shell."""
    completion = {"model": model.NAME, "prompt": _QUESTION, "max_tokens": 16}
    chat = {"model": model.NAME, "messages": [{"role": "user", "content": _QUESTION}], "max_tokens": 16}
    stream = chat | {"stream": True, "stream_options": {"include_usage": True}}
    posts = (
        (
            "A completion; send it twice and look at usage.prompt_tokens_details.cached_tokens",
            "completions",
            completion,
        ),
        ("A chat", "chat/completions", chat),
        ("The same chat, streamed", "chat/completions", stream),
    )
    lines = [f"# {text}\n{_post(f'{base_url}/v1/{path}', body)}" for text, path, body in posts]
    lines += [
        f"# Why the last requests went where they went\ncurl -s {metrics_url}/debug/decisions",
        f"# What the picker counts\ncurl -s {metrics_url}/metrics | grep -v '^#'",
    ]
    return "\n\nEverything keeps running until Ctrl-C. Try:\n\n" + "\n\n".join(lines) + "\n"


def _post(url: str, body: dict[str, object]) -> str:
    return f"curl -sN {url} -H 'content-type: application/json' -d '{json.dumps(body)}'"
