"""The files of a model directory that say how text becomes tokens, read the way `transformers` reads them.

`tokenizer.json` is the tokenizer; named special tokens that only `tokenizer_config.json` (or the older
`special_tokens_map.json`) knows are added to it; a chat template comes from `chat_template.jinja`,
`additional_chat_templates/` or the config. Nothing is downloaded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TokenizerError(ValueError):
    """The directory does not hold a usable tokenizer; the message names the file."""


def load_backend(path: Path, config: Mapping[str, Any]) -> Backend:
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the library raises bare Exceptions
        raise TokenizerError(f"{path}: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    _add_missing(backend, config)
    return backend


def read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    if optional and not path.exists():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: not a JSON object")
    return value


def merged_config(directory: Path) -> dict[str, Any]:
    config = read_json(directory / "tokenizer_config.json", optional=True)
    if "added_tokens_decoder" not in config:  # else the older file is not read
        config |= read_json(directory / "special_tokens_map.json", optional=True)
    return config


def content_of(token: Any) -> str:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _add_missing(backend: Backend, config: Mapping[str, Any]) -> None:
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    declared = config.get("added_tokens_decoder") or {}
    added = [_added_token(declared[index], special=False) for index in sorted(declared, key=int)]
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    special = [config[name] for name in _NAMED if name in config]
    special += extra.values() if isinstance(extra, dict) else extra
    added += [_added_token(token, special=True) for token in special if content_of(token)]
    backend.add_tokens([token for token in added if token.content not in known])


def _added_token(token: str | Mapping[str, Any], *, special: bool) -> AddedToken:
    if isinstance(token, str):
        return AddedToken(token, special=special, normalized=not special)
    flags = {name: token[name] for name in ("lstrip", "rstrip", "single_word", "normalized") if name in token}
    return AddedToken(token["content"], special=special or bool(token.get("special")), **flags)


_OWN_RENDERERS = frozenset({"gpt_oss", "deepseek_v32", "deepseek_v4", "kimi_k3", "inkling"})
"""Model types whose chats vLLM writes by code of its own, whatever template the directory holds."""


def chat_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Files win over the config, as in transformers."""
    templates: dict[str, str] = {}
    if read_json(directory / "config.json", optional=True).get("model_type") in _OWN_RENDERERS:
        return templates
    if (directory / "tekken.json").exists() or (directory / "chat_template.json").exists():
        return templates  # Mistral's own format; a processor's template, which wins over the tokenizer's only at times
    if (single := directory / "chat_template.jinja").exists():
        templates["default"] = single.read_text("utf-8")
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = path.read_text("utf-8")
    declared = config.get("chat_template")
    if templates or not declared:
        return templates
    if isinstance(declared, str):
        return {"default": declared}
    return {entry["name"]: entry["template"] for entry in declared}
