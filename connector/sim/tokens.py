"""Text to tokens and back: a model's own tokenizer directory, or a built-in one that needs no files.

The built-in tokenizer is UTF-8 bytes + 3 (0 to 2 are left for special tokens), with a plain chat form:
`<|role|>`, newline, text, newline for each message, then `<|assistant|>` and a newline. Answers are made of tokens
whose text encodes back to the same tokens, so a conversation that quotes them shares the engine's blocks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

Message = Mapping[str, Any]
BYTE_OFFSET = 3
WORD = re.compile(r"^[Ġ▁][a-z]{2,}$")
"""A whole word with its leading space, in the two usual vocabulary spellings."""


class Codec(Protocol):
    """What the server needs of a tokenizer."""

    @property
    def vocabulary(self) -> Sequence[int]:
        """The token ids that answers are made of."""

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Token ids of `text`, with the tokens that the model puts around a prompt if `special`."""

    def text(self, token: int) -> str:
        """What one token of an answer reads as."""

    def render(self, messages: Sequence[Message], **options: Any) -> str:
        """The prompt of a conversation; raises ValueError if the template refuses it."""


def flatten(content: object) -> str:
    """The text of a message's content: a string, null, or a list of parts of which only text counts."""
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return "" if content is None else str(content)


def render_plainly(messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
    turns = "".join(f"<|{message.get('role')}|>\n{flatten(message.get('content'))}\n" for message in messages)
    return turns + ("<|assistant|>\n" if add_generation_prompt else "")


class ByteCodec:
    """The built-in tokenizer."""

    vocabulary: Sequence[int] = tuple(byte + BYTE_OFFSET for byte in b"abcdefghijklmnopqrstuvwxyz      ")

    def encode(self, text: str, *, special: bool) -> list[int]:
        return [byte + BYTE_OFFSET for byte in text.encode("utf-8", "replace")]

    def text(self, token: int) -> str:
        byte = token - BYTE_OFFSET
        return chr(byte) if 0 <= byte < 128 else "\ufffd"

    def render(self, messages: Sequence[Message], **options: Any) -> str:
        return render_plainly(messages, options.get("add_generation_prompt", True))


class DirectoryCodec:
    """A Hugging Face tokenizer directory: `tokenizer.json` and, where there is one, its chat template."""

    def __init__(self, directory: Path) -> None:
        self._tokenizer = Tokenizer.from_str((directory / "tokenizer.json").read_text("utf-8"))
        config = _read_config(directory)
        self._specials = {name: _content(config.get(name)) for name in ("bos_token", "eos_token")}
        template = _read_template(directory, config)
        self._template = None if template is None else _environment().from_string(template)
        vocabulary = self._tokenizer.get_vocab()
        words = sorted(token for piece, token in vocabulary.items() if WORD.match(piece))
        self.vocabulary: Sequence[int] = words or sorted(vocabulary.values())

    def encode(self, text: str, *, special: bool) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=special).ids)

    def text(self, token: int) -> str:
        piece = self._tokenizer.id_to_token(token) or ""
        return " " + piece[1:] if WORD.match(piece) else self._tokenizer.decode([token])

    def render(self, messages: Sequence[Message], **options: Any) -> str:
        if self._template is None:
            return render_plainly(messages, options.get("add_generation_prompt", True))
        turns = [{**message, "content": flatten(message.get("content"))} for message in messages]
        try:
            return self._template.render(messages=turns, **self._specials, **options)
        except (jinja2.TemplateError, TypeError) as error:
            raise ValueError(f"the chat template refuses this conversation: {error}") from error


def load_codec(directory: str | None) -> Codec:
    return ByteCodec() if directory is None else DirectoryCodec(Path(directory))


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / "tokenizer_config.json"
    config: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    return config


def _read_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.exists():
        return path.read_text("utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
    return template


def _content(token: object) -> str:
    """A special token is a string or an object that holds one."""
    return str(token["content"]) if isinstance(token, dict) else str(token or "")


def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.globals["raise_exception"] = _raise
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    return environment


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
