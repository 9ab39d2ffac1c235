"""Bodies are read by path; what is wrong is refused by name, what is only unusual is routed unscored."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.errors import Refusal
from epp.requests.model import ChatPrompt, InferenceRequest
from epp.requests.openai import MAX_PIECES, MAX_PROMPTS
from epp.requests.parse import MAX_CONTAINERS, parse

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
POST = {":method": "POST"}
CANARY = "canary-prompt-text"


def read(path: str, body: Any, **headers: str) -> InferenceRequest:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return parse("r1", path, POST | headers, raw)


def completion(prompt: Any, **fields: Any) -> InferenceRequest:
    return read(COMPLETIONS, {"model": "m", "prompt": prompt, **fields})


def chat(messages: Any, **fields: Any) -> InferenceRequest:
    return read(CHAT, {"model": "m", "messages": messages, **fields})


def refusal(path: str, body: Any) -> Refusal:
    with pytest.raises(Refusal) as raised:
        read(path, body)
    return raised.value


def uint32(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(4, "little") for number in numbers)


USER = [{"role": "user", "content": "hi"}]


# paths


@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat/completions",
        "/v1/chat/completions/",
        "/v1/chat/completions?beta=true",
        "/v1/chat/completions/?a=/v1/completions",
        "/v1/chat/completions#x",
        "/team-a/v1/chat/completions",
        "/chat/completions",
    ],
)
def test_a_chat_is_a_chat_whatever_surrounds_its_path(path: str) -> None:
    request = read(path, {"model": "m", "messages": USER})
    assert isinstance(request.prompts[0], ChatPrompt)
    assert request.path == path, "the path on the wire stays as it is"


@pytest.mark.parametrize("path", ["/v1/completions", "/a/b/v1/completions/?x", "/completions"])
def test_completions_are_not_chats(path: str) -> None:
    assert read(path, {"model": "m", "prompt": "p"}).prompts == ("p",)


@pytest.mark.parametrize(
    "path",
    ["/v1/embeddings", "/v1/mycompletions", "/v1/audio/speech", "/v1/chat/completions/render", "/tokenize", "/"],
)
def test_other_paths_are_routed_unscored_and_not_validated(path: str) -> None:
    request = read(path, b"--boundary\r\n\xff\x00")
    assert (request.unscored, request.prompts, request.model) == ("path", (), "")


def test_the_model_of_other_paths_is_read_where_the_body_is_json() -> None:
    request = read("/v1/embeddings", {"input": [[[1]]], "model": "e", "stream": True})
    assert (request.model, request.target_model, request.stream) == ("e", "e", True)
    assert read("/v1/embeddings", {"model": 5}).model == ""
    assert read("/v1/embeddings", b'{"model": "e"').model == ""
    assert read("/v1/embeddings", b'{"a":' + b"[" * 100_000).model == ""


def test_a_path_may_be_in_a_header_and_no_path_means_completions() -> None:
    body = {"model": "m", "messages": USER}
    assert read("", body, **{"x-original-path": CHAT, "x-forwarded-path": "/x"}).path == CHAT
    assert read("", body, **{"x-forwarded-path": CHAT}).path == CHAT
    assert read("", {"model": "m", "prompt": "p"}).prompts == ("p",)


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "DELETE"])
def test_requests_without_a_body_are_routed_unscored(method: str) -> None:
    assert parse("r1", CHAT, {":method": method}, b"").unscored == "path"


# completions


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("text ü", ("text ü",)),
        (["a", "b"], ("a", "b")),
        ([1, 2**32 - 1], (uint32(1, 2**32 - 1),)),
        ([[1], [2, 3]], (uint32(1), uint32(2, 3))),
    ],
)
def test_prompts_may_be_text_token_ids_or_lists_of_either(prompt: Any, expected: Any) -> None:
    request = completion(prompt)
    assert (request.prompts, request.unscored) == (expected, "")


def test_blanks_between_the_items_of_json_do_not_matter() -> None:
    body = b'{ "model" : "m" , "prompt" : [ \n [ 1 , 2 ] ,\t[ 3 ] ] }'
    assert read(COMPLETIONS, body).prompts == (uint32(1, 2), uint32(3))


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [(b'"prompt":["b"],"prompt":"a"', ("a",)), (b'"prompt":"a","prompt":["b"]', ("b",))],
)
def test_of_a_repeated_prompt_the_last_counts_whatever_its_form(prompts: bytes, expected: tuple[str]) -> None:
    assert parse("r", COMPLETIONS, {}, b'{"model":"m",' + prompts + b"}").prompts == expected


@pytest.mark.parametrize("prompt", [[-1], [1e20], [True], [1.5], [2**32], [10**30], [[1], [-1]]])
def test_numbers_that_are_no_token_ids_are_the_engines_business(prompt: Any) -> None:
    request = completion(prompt)
    assert (request.prompts, request.unscored) == ((), "token ids out of range")


@pytest.mark.parametrize("prompt", [[""], ["a", ""], [[]], [[1], []]])
def test_an_empty_prompt_among_others_is_routed_unscored(prompt: Any) -> None:
    assert completion(prompt).unscored == "empty prompt"


@pytest.mark.parametrize("fields", [{"prompt_embeds": CANARY}, {"prompt_embeds": [CANARY], "prompt": None}])
def test_prompt_embeddings_are_routed_unscored(fields: dict[str, Any]) -> None:
    assert read(COMPLETIONS, {"model": "m", **fields}).unscored == "prompt_embeds"


@pytest.mark.parametrize("body", [{"model": "m"}, {"model": "m", "prompt": ""}, {"model": "m", "prompt": []}])
def test_a_completion_needs_a_prompt(body: Any) -> None:
    assert refusal(COMPLETIONS, body).message == "invalid completions request: must have prompt field"


@pytest.mark.parametrize(
    "prompt", [5, True, {"a": CANARY}, [None], [{}], [1, CANARY], [CANARY, 1], [[1], [CANARY]], [[[1]]]]
)
def test_a_prompt_of_a_wrong_type_is_refused_by_name(prompt: Any) -> None:
    refused = refusal(COMPLETIONS, {"model": "m", "prompt": prompt})
    assert refused.status == 400
    assert "prompt must be a string" in refused.message


def test_more_prompts_than_are_looked_at_are_routed_unscored() -> None:
    for one in ("a", [1]):
        assert completion([one] * MAX_PROMPTS).unscored == ""
        assert completion([one] * (MAX_PROMPTS + 1)).unscored == "too many prompts"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_bodies_of_too_many_values_are_routed_without_being_read(path: str) -> None:
    bomb = b"[" + b"[]," * MAX_CONTAINERS + b"[]]"
    request = parse("r", path, {}, b'{"a":' + bomb + b',"stream":true,"model":"m","prompt":' + bomb + b"}")
    assert (request.unscored, request.model, request.stream, request.prompts) == ("too many values", "m", True, ())
    assert parse("r", path, {}, b'{"model":' + bomb + b"}").model == ""


# chats


@pytest.mark.parametrize(
    "more",
    [
        {"messages": [{"role": "user", "content": ""}] * MAX_PIECES},
        {"messages": [{"role": "user", "content": [""] * MAX_PIECES}]},
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [1] * MAX_PIECES}]},
        {"tools": [1] * MAX_PIECES},
        {"documents": [1] * MAX_PIECES},
    ],
)
def test_chats_of_too_many_pieces_are_routed_unscored(more: dict[str, Any]) -> None:
    messages = [{"role": "system", "content": "x"}, *more.pop("messages", [])]
    assert chat(messages, **more).unscored == "too many messages"


def test_what_follows_a_picture_is_checked_as_well() -> None:
    messages = [{"role": "user", "content": [{"type": "image_url"}]}, {"role": "user", "content": [["a"]]}]
    assert "messages[1].content[0] must be an object" in refusal(CHAT, {"model": "m", "messages": messages}).message


def test_a_chat_keeps_everything_that_changes_the_rendered_prompt_as_sent() -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}], "unknown": 1},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
        {"role": "tool", "content": "x"},
    ]
    fields = {
        "chat_template_kwargs": {"enable_thinking": False},
        "add_generation_prompt": False,
        "continue_final_message": None,
        "documents": [{"title": "t"}],
        "chat_template": "x",
        "reasoning_effort": "low",
    }
    request = chat(messages, tools=[{"type": "function"}], temperature=1, **fields)
    assert request.prompts == (ChatPrompt(messages, [{"type": "function"}], fields),)
    assert request.unscored == ""


@pytest.mark.parametrize("messages", [None, [], {}, "text"])
def test_a_chat_needs_messages(messages: Any) -> None:
    message = "invalid chat completions request: must have valid messages field"
    assert refusal(CHAT, {"model": "m", "messages": messages}).message == message
    assert refusal(CHAT, {"model": "m"}).message == message


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (CANARY, "messages[1] must"),
        ({"content": CANARY}, "messages[1].role must"),
        ({"role": 5, "content": CANARY}, "messages[1].role must"),
        ({"role": "user", "content": 5}, "messages[1].content must"),
        ({"role": "user", "content": {"text": CANARY}}, "messages[1].content must"),
        ({"role": "user", "content": [{"type": "text", "text": CANARY}, 5]}, "messages[1].content[1] must"),
    ],
)
def test_a_wrong_message_is_refused_by_position(message: Any, field: str) -> None:
    refused = refusal(CHAT, {"model": "m", "messages": [*USER, message]})
    assert field in refused.message
    assert CANARY not in refused.message


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:"}},
        {"type": "input_audio", "input_audio": {}},
        {"image_url": "http://…"},
        {"type": "video_url"},
        {"type": ["odd"], "image_url": ""},
    ],
)
def test_pictures_sound_and_films_are_routed_unscored_but_keep_the_prompt_for_an_estimate(part: Any) -> None:
    request = chat([{"role": "user", "content": [{"type": "text", "text": "look"}, part]}])
    assert request.unscored == "multimodal"
    assert isinstance(request.prompts[0], ChatPrompt)


@pytest.mark.parametrize("part", [{"type": "tool_reference", "name": "f"}, {"type": "future"}, {}, {"type": 5}])
def test_parts_of_unknown_type_are_routed_unscored(part: Any) -> None:
    request = chat([{"role": "user", "content": [part]}])
    assert (request.unscored, request.prompts) == ("content part", ())


# fields of both


@pytest.mark.parametrize("model", [None, "", 5, ["m"]])
def test_a_model_is_needed(model: Any) -> None:
    for path, prompt in ((COMPLETIONS, {"prompt": "p"}), (CHAT, {"messages": USER})):
        assert refusal(path, {"model": model, **prompt}).message == "model not found in request body"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"max_tokens": 7}, 7),
        ({"max_completion_tokens": 5, "max_tokens": 7}, 5),
        ({"max_completion_tokens": -1, "max_tokens": 7}, 7),
        ({"max_completion_tokens": 1.5, "max_tokens": 7.0}, 7),
        ({"max_tokens": "7"}, None),
        ({"max_tokens": True}, None),
    ],
)
def test_the_limit_of_a_chats_answer(fields: dict[str, Any], expected: int | None) -> None:
    assert chat(USER, **fields).max_output_tokens == expected


def test_salt_stream_and_special_tokens_are_read() -> None:
    request = completion("p", cache_salt="s", stream=True, add_special_tokens=False)
    assert (request.cache_salt, request.stream, request.add_special_tokens) == ("s", True, False)
    request = completion("p", cache_salt=None, stream="yes")
    assert (request.cache_salt, request.stream, request.add_special_tokens) == ("", False, None)


@pytest.mark.parametrize("field", ["cache_salt", "add_special_tokens"])
def test_fields_of_a_wrong_type_are_refused_by_name(field: str) -> None:
    assert field in refusal(COMPLETIONS, {"model": "m", "prompt": "p", field: 5}).message


@pytest.mark.parametrize(
    "fields",
    [
        {"truncate_prompt_tokens": 5},
        {"kv_transfer_params": {"prompt_token_ids": [1]}},
        {"lora_path": "/loras/poet"},
        {"extra_key": "tenant"},
    ],
    ids=str,
)
def test_prompts_that_the_engine_replaces_or_sets_apart_are_routed_unscored(fields: dict[str, Any]) -> None:
    request = chat(USER, **fields)
    assert (request.unscored, request.prompts) == (next(iter(fields)), ())


@pytest.mark.parametrize("send", [completion, chat])
def test_where_log_probabilities_of_the_prompt_are_wanted_no_cache_is_read(send: Callable[..., Any]) -> None:
    prompt = USER if send is chat else "p"
    assert send(prompt, prompt_logprobs=0).unscored == "prompt_logprobs"
    assert send(prompt, echo=True, logprobs=1).unscored == "prompt_logprobs"
    for ordinary in ({"prompt_logprobs": None}, {"logprobs": 1}, {"echo": False, "logprobs": 1}, {"top_logprobs": 5}):
        assert not send(prompt, **ordinary).unscored
    assert send(prompt, echo=True).unscored == ("prompt_logprobs" if send is chat else "")


# bad bodies


BAD = {
    "empty": b"",
    "truncated": b'{"model":"m","prompt":"' + CANARY.encode(),
    "trailing garbage": b'{"model":"m","prompt":"p"} x',
    "list": b"[]",
    "null": b"null",
    "text": b'"text"',
    "number": b"5",
    "NaN": b'{"model":"m","prompt":"p","temperature":NaN}',
    "deep": b'{"model":"m","prompt":' + b"[" * 100_000,
    "deep in an unread field": b'{"model":"m","prompt":"p","x":' + b"[" * 100_000,
    "deep messages": b'{"model":"m","messages":' + b'{"a":' * 100_000,
    "not UTF-8": b'{"model":"m","prompt":"\xff"}',
    "control character": b'{"model":"m","prompt":"a\x01"}',
    "multipart": b"--boundary\r\n",
}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("case", BAD)
def test_bad_json_is_refused_and_not_quoted(case: str, path: str) -> None:
    refused = refusal(path, BAD[case])
    assert refused.status == 400
    assert CANARY not in refused.message
    json.loads(refused.body)


@pytest.mark.parametrize(("field", "where"), [("prompt", " in prompt"), ("messages", " in messages"), (CANARY, "")])
def test_a_lone_surrogate_is_refused_naming_the_field_if_it_is_one_of_ours(field: str, where: str) -> None:
    body = b'{"model":"m","%s":"%s\\ud800"}' % (field.encode(), CANARY.encode())
    refused = refusal(COMPLETIONS, body)
    assert refused.message == f"error unmarshaling request bodyMap: lone surrogate{where}"


def test_a_body_over_the_limit_is_refused_with_413() -> None:
    with pytest.raises(Refusal) as raised:
        parse("r1", COMPLETIONS, POST, b"x" * 101, max_body_bytes=100)
    assert raised.value.status == 413


def test_the_body_is_kept_byte_for_byte() -> None:
    body = b'{"prompt":"\\u00fc","model":"m","seed":9007199254740993,"seed":1e3}'
    assert read(COMPLETIONS, body).body is body


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(path=st.sampled_from([COMPLETIONS, CHAT, "/v1/embeddings"]), prompt=JSON, messages=JSON, model=JSON, salt=JSON)
def test_any_json_is_parsed_or_refused(path: str, prompt: Any, messages: Any, model: Any, salt: Any) -> None:
    body = {"model": model, "prompt": prompt, "messages": messages, "cache_salt": salt}
    try:
        status = 200 if read(path, body) else 0
    except Refusal as refused:
        status = refused.status
    assert status in (200, 400)


@given(st.binary(max_size=40))
def test_any_bytes_are_refused(body: bytes) -> None:
    assert refusal(CHAT, b"{" + body).status == 400
