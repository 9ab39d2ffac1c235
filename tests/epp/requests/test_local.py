"""Exact tokens without holding up the loop, and a reason wherever there are none."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from epp.requests import local
from epp.requests.local import LocalTokens
from epp.requests.model import ChatPrompt, InferenceRequest, Prompt
from epp.requests.model_files import TokenizerError
from epp.requests.tokenizer import Tokenizer

LONG = "the quick brown fox jumps over the lazy dog. " * 2000
CHAT = ChatPrompt([{"role": "user", "content": "hi"}])


def asked(*prompts: Prompt, model: str = "m", **fields: Any) -> InferenceRequest:
    request = InferenceRequest("r1", "/v1/completions", {}, b"", model=model, target_model=model, prompts=prompts)
    for name, value in fields.items():
        setattr(request, name, value)
    return request


@pytest_asyncio.fixture
async def tokens(tiny_directory: Path) -> AsyncIterator[LocalTokens]:
    service = LocalTokens({"m": str(tiny_directory)})
    await service.start()
    yield service
    await service.stop()


@pytest.fixture
def expected(tiny_directory: Path, oracle: Callable[[Path], Any]) -> Callable[[str, bool], bytes]:
    def encode(text: str, special: bool) -> bytes:
        numbers = oracle(tiny_directory)(text, add_special_tokens=special)["input_ids"]
        return b"".join(number.to_bytes(4, "little") for number in numbers)

    return encode


async def test_short_prompts_are_encoded_at_once(tokens: LocalTokens, expected: Callable[[str, bool], bytes]) -> None:
    request = asked("hello", b"\1\0\0\0", "world")
    assert tokens.produce(request) is None
    assert request.tokens == [expected("hello", True), b"\1\0\0\0", expected("world", True)]


async def test_long_prompts_are_encoded_in_a_thread(
    tokens: LocalTokens, expected: Callable[[str, bool], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []
    encode_batch = Tokenizer.encode_batch

    def watched(self: Tokenizer, pieces: list[str]) -> list[bytes]:
        threads.append(threading.current_thread())
        return encode_batch(self, pieces)

    monkeypatch.setattr(Tokenizer, "encode_batch", watched)
    request = asked(LONG, "short")
    later = tokens.produce(request)
    assert later is not None
    await later
    assert request.tokens == [expected(LONG, True), expected("short", True)]
    assert threading.current_thread() not in threads
    assert tokens.produce(asked(LONG + "more")) is None, "only the end is new"


async def test_the_client_decides_about_special_tokens(
    tokens: LocalTokens, expected: Callable[[str, bool], bytes]
) -> None:
    request = asked("hello", add_special_tokens=False)
    tokens.produce(request)
    assert request.tokens == [expected("hello", False)]
    plain, special = asked(CHAT), asked(CHAT, add_special_tokens=True)
    tokens.produce(plain)
    tokens.produce(special)
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert plain.tokens == [expected(text, False)]
    assert special.tokens == [expected(text, True)]


async def test_large_chats_are_rendered_in_a_thread(
    tokens: LocalTokens, expected: Callable[[str, bool], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "RENDER_INLINE_BYTES", 10)
    request, refused = asked(CHAT, body=bytes(11)), asked(ChatPrompt(CHAT.messages, []), body=bytes(11))
    for each in (request, refused):
        later = tokens.produce(each)
        assert later is not None
        await later
    assert request.tokens == [expected("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", False)]
    assert refused.unscored == "empty tools"


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        (ChatPrompt(CHAT.messages, None, {"chat_template": "{{ 1 }}"}), "chat_template"),
        (ChatPrompt([{"role": "assistant", "content": "\ud800"}]), "lone surrogate"),
    ],
)
async def test_without_exact_tokens_a_request_is_unscored(tokens: LocalTokens, prompt: Prompt, reason: str) -> None:
    request = asked(prompt)
    assert tokens.produce(request) is None
    assert (request.unscored, request.tokens) == (reason, ())


async def test_one_directory_serves_every_model_name(tokens: LocalTokens) -> None:
    request = asked("hello", model="an-adapter")
    tokens.produce(request)
    assert request.tokens


async def test_of_several_directories_the_model_chooses(tiny_directory: Path, deepseek_directory: Path) -> None:
    service = LocalTokens({"tiny": str(tiny_directory), "deep": str(deepseek_directory), "alias": str(tiny_directory)})
    tiny, deep, alias, unknown = (asked("hello", model=model) for model in ("tiny", "deep", "alias", "other"))
    for request in (tiny, deep, alias, unknown):
        service.produce(request)
    assert tiny.tokens == alias.tokens != deep.tokens
    assert unknown.unscored == "no tokenizer for this model"
    await service.stop()


async def test_it_shows_how_full_its_caches_are(deepseek_directory: Path) -> None:
    service = LocalTokens({"m": str(deepseek_directory)})
    assert service.occupancy == {"queue": 0, "pieces": 0, "words": 0}
    service.produce(asked("three more words"))
    assert 0 < service.occupancy["pieces"] < 0.001
    assert service.occupancy["words"] == 3 / (1 << 16)
    await service.stop()


async def test_when_too_much_is_queued_a_request_is_unscored(
    tokens: LocalTokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "QUEUE", 1)
    free = threading.Event()
    monkeypatch.setattr(Tokenizer, "encode_batch", lambda self, pieces: free.wait(10) and [b""] * len(pieces))
    first = asyncio.ensure_future(tokens.produce(asked(LONG)))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    second = asked(LONG)
    later = tokens.produce(second)
    assert later is not None
    await later
    assert second.unscored == "tokenizer busy"
    assert tokens.occupancy["queue"] == 1
    free.set()
    await first
    assert tokens.queued == 0


async def test_a_client_that_leaves_gives_its_place_back(tokens: LocalTokens) -> None:
    waiting = asyncio.ensure_future(tokens.produce(asked(LONG)))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    assert tokens.queued == 1
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert tokens.queued == 0


def test_a_broken_template_is_an_error_at_once(tmp_path: Path, tiny_directory: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((tiny_directory / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(TokenizerError, match="chat template"):
        LocalTokens({"m": str(tmp_path)})


async def test_a_text_too_long_to_be_encoded_in_time_is_not(
    tokens: LocalTokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "MAX_CHARS", 10)
    request = asked("12345", "123456")
    assert tokens.produce(request) is None
    assert request.unscored == "prompt too long"


async def test_a_chat_of_many_messages_is_rendered_in_a_thread(tokens: LocalTokens) -> None:
    request = asked(ChatPrompt(CHAT.messages, pieces=local.RENDER_INLINE_PIECES + 1))
    waiting = tokens.produce(request)
    assert waiting is not None
    await waiting
    assert request.tokens
