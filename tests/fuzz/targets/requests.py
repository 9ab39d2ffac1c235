"""What clients send: bodies of every path into parser, template, tokenizer and estimate."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenizers import Tokenizer as Backend

from epp.errors import Refusal
from epp.requests.estimate import estimate
from epp.requests.ids import to_bytes
from epp.requests.local import LocalTokens
from epp.requests.model import InferenceRequest
from epp.requests.parse import parse
from epp.requests.tokenizer import Tokenizer, Untokenisable
from epp.toolbox.demo.model import write_model
from tests.fuzz.source import Source
from tests.fuzz.target import Script, Target, refused
from tests.fuzz.targets import bodies
from tests.fuzz.trial import CANARY

TEMPLATE = """\
{%- if tools %}{{ tools | tojson(indent=2) }}{% endif %}
{%- set ns = namespace(last='') %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{ message.content | trim }}{% else %}
{%- for part in message['content'] %}{{ part.text }}{% endfor %}{% endif %}
{%- for call in message.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}
{%- if message.reasoning_content is defined and loop.last %}
{{- message.reasoning_content.split('</think>')[-1] }}{% endif %}
{%- if message.role == 'tool' and loop.index0 == 0 %}{{ raise_exception('a tool begins') }}{% endif %}
{%- set ns.last = message.role %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- for document in documents or [] %}{{ document.title }}{{ document.text }}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{%- if enable_thinking is false %}<think></think>{% endif %}{% endif %}"""
_REASON = 60
_CACHE_BYTES = 1 << 20
"""Small enough to be full soon."""


@contextmanager
def model_directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_model(directory)
        config = directory / "tokenizer_config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": TEMPLATE}))
        yield directory


class Requests(Target):
    """A path and a body: refused, or a request with tokens, or one with the reason why not."""

    share = 5

    def __init__(self) -> None:
        with model_directory() as directory:
            self._tokens = LocalTokens({"tiny": str(directory)})
            self._backend = Backend.from_file(str(directory / "tokenizer.json"))
        self._tokens._models["tiny"].tokenizer._cache.max_bytes = _CACHE_BYTES
        self._loop = asyncio.new_event_loop()

    def close(self) -> None:
        self._loop.run_until_complete(self._tokens.stop())
        self._loop.close()

    def script(self, source: Source) -> Script:
        path, body = bodies.request(source)
        return path.encode(), body

    def run(self, script: Script) -> bool:
        path, body = script[0].decode("utf-8", "replace"), b"".join(script[1:])
        try:
            request = parse("r", path, {":method": "POST"}, body)
        except Refusal as refusal:
            return self._refused(refusal)
        assert request.unscored or request.prompts
        for prompt in request.prompts:
            assert len(estimate(prompt)) % 4 == 0
        if request.prompts and not request.unscored:
            self._tokenise(request)
        assert len(request.unscored) <= _REASON
        return not request.unscored

    @staticmethod
    def _refused(refusal: Refusal) -> bool:
        assert refusal.status in (400, 413)
        assert CANARY.encode() not in refusal.body
        return refused(refusal)

    def _tokenise(self, request: InferenceRequest) -> None:
        waiting = self._tokens.produce(request)
        if waiting is not None:
            self._loop.run_until_complete(waiting)
        assert bool(request.unscored) != bool(request.tokens)
        for prompt, tokens in zip(request.prompts, request.tokens, strict=False):
            if isinstance(prompt, str) and len(prompt) < 3000 and request.add_special_tokens is not False:
                assert tokens == to_bytes(self._backend.encode(prompt).ids)


class Texts(Target):
    """Text into the tokenizer: the ids are the backend's own, however the text was cut."""

    share = 3

    def __init__(self) -> None:
        with model_directory() as directory:
            self._tokenizer = Tokenizer(directory, cache_bytes=_CACHE_BYTES)
            self._backend = Backend.from_file(str(directory / "tokenizer.json"))

    def script(self, source: Source) -> Script:
        raw = "".join(bodies.text(source) for _ in range(1 + source.below(3))).encode("utf-8", "surrogatepass")
        return (source.mutate(raw) if source.chance(0.3) else raw,)

    def run(self, script: Script) -> bool:
        text = script[0].decode("utf-8", "surrogateescape")
        try:
            ids = self._tokenizer.encode(text, add_special_tokens=True)
        except Untokenisable:
            assert not text.isascii()
            return False
        assert ids == to_bytes(self._backend.encode(text).ids)
        return True
