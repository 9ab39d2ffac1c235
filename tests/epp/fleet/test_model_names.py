from __future__ import annotations

import json
from typing import Any

import pytest

from epp.fleet.model_names import MAX_NAME, MAX_NAMES, Kind, ModelList, ModelNames, read_models


def page(*cards: dict[str, Any]) -> bytes:
    return json.dumps({"object": "list", "data": cards}).encode()


def vllm(name: str, root: str = "/models/8b", parent: str | None = None) -> dict[str, Any]:
    """As vLLM 0.32 writes it."""
    return {
        "id": name, "object": "model", "created": 1, "owned_by": "vllm", "root": root, "parent": parent,
        "max_model_len": 4096, "permission": [],
    }  # fmt: skip


def listing(*bases: str, any_name: bool = False, **adapters: str) -> ModelList:
    return ModelList(frozenset(bases), adapters, any_name)


class TestReading:
    def test_an_adapter_says_what_it_adapts_and_aliases_have_no_parent(self) -> None:
        models = read_models(page(vllm("8b"), vllm("alias"), vllm("poet", "/loras/poet", parent="8b")))
        assert models == listing("8b", "alias", poet="/loras/poet")

    def test_a_model_that_is_its_own_parent_is_a_base_model(self) -> None:
        assert read_models(page(vllm("8b", parent="8b"))) == listing("8b")

    def test_little_need_be_said(self) -> None:
        assert read_models(b'{"data":[{"id":"8b"}]}') == listing("8b")

    def test_sglang_answers_to_any_name(self) -> None:
        assert read_models(page({"id": "8b", "owned_by": "sglang", "root": "8b"})) == listing("8b", any_name=True)

    @pytest.mark.parametrize(
        "card", [None, 7, {}, {"id": 7}, {"id": ""}, {"id": "x" * (MAX_NAME + 1)}, {"id": "x", "parent": 7}, ["x"]]
    )
    def test_a_card_that_cannot_be_read_is_left_out(self, card: Any) -> None:
        assert read_models(page(vllm("8b"), card, vllm("alias"))) == listing("8b", "alias")  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        "answer",
        [
            b"", b"null", b"[]", b"{}", b'{"data":null}', b'{"data":{}}', b'{"data":[]}', b'{"data":[7]}',
            b"<html>not here</html>", b'{"data":[{"id":"8b"', b'{"data":[{"id":"8b"}]} x', b"\xff\xfe",
            b"[" * 100_000, b'{"data":' + b"[" * 100_000,
        ],
    )  # fmt: skip
    def test_what_names_no_model_is_no_list(self, answer: bytes) -> None:
        with pytest.raises(ValueError, match="list of models"):
            read_models(answer)

    def test_of_too_many_names_the_first_count(self) -> None:
        models = read_models(page(vllm("8b"), *(vllm(f"lora-{n}", parent="8b") for n in range(5 * MAX_NAMES))))
        assert len(models.bases) + len(models.adapters) == MAX_NAMES


class TestMeaning:
    def test_without_lists_nothing_is_known(self) -> None:
        names = ModelNames()
        assert names.kind("poet") is Kind.UNKNOWN
        names.asked("a")
        assert names.kind("poet") is Kind.UNLISTED
        names.failed("a")
        assert names.kind("poet") is Kind.UNKNOWN

    def test_a_name_is_what_the_lists_say(self) -> None:
        names = ModelNames()
        names.listed("a", listing("8b", "alias", poet="/p"))
        assert [names.kind(name) for name in ("8b", "alias", "poet", "other")] == [
            Kind.BASE, Kind.BASE, Kind.ADAPTER, Kind.UNLISTED
        ]  # fmt: skip

    def test_an_adapter_anywhere_is_an_adapter(self) -> None:
        names = ModelNames()
        names.listed("a", listing("8b", "poet"))
        names.listed("b", listing("8b", poet="/p"))
        assert names.kind("poet") is Kind.ADAPTER
        names.forget("b")
        assert names.kind("poet") is Kind.BASE

    def test_a_list_takes_the_place_of_the_one_before(self) -> None:
        names = ModelNames()
        names.listed("a", listing("8b", poet="/p"))
        names.listed("a", listing("8b", lawyer="/l"))
        assert names.kind("poet") is Kind.UNLISTED
        assert names.kind("lawyer") is Kind.ADAPTER

    def test_an_engine_that_gives_no_list_any_more_keeps_what_it_said(self) -> None:
        names = ModelNames()
        names.listed("a", listing("8b"))
        names.asked("a")
        names.failed("a")
        assert names.kind("8b") is Kind.BASE
        assert names.kind("other") is Kind.UNLISTED

    def test_with_the_last_engine_everything_is_gone(self) -> None:
        names = ModelNames()
        for engine in range(50):
            names.listed(engine, listing("8b", any_name=True, **{f"lora{engine}": "/p", "shared": "/s"}))
        for engine in range(50):
            names.forget(engine)
        assert len(names) == 0
        assert {names.kind(name) for name in ("8b", "lora7", "shared", "x")} == {Kind.UNKNOWN}

    def test_where_any_name_is_served_only_adapters_are_not_the_base_model(self) -> None:
        names = ModelNames()
        names.listed("a", listing("8b", any_name=True, poet="/p"))
        assert names.kind("default") is Kind.BASE
        assert names.kind("poet") is Kind.ADAPTER
        assert names.kind("8b:poet") is Kind.UNLISTED

    def test_only_misses_are_counted(self) -> None:
        names = ModelNames()
        names.listed("a", listing("8b", poet="/p"))
        for name in ("8b", "poet", "8b"):
            names.kind(name)
        assert names.missed == 0
        names.kind("other")
        assert names.missed == 1


class TestRepointing:
    """vLLM hashes an adapter's path besides its name: under a new path, nothing of the old one is found."""

    def of(self, *lists: ModelList) -> list[str]:
        told: list[str] = []
        names = ModelNames(told.append)
        for models in lists:
            names.listed("a", models)
        return told

    def test_a_name_that_gets_another_path_is_told_of(self) -> None:
        assert self.of(listing(poet="/p1"), listing(poet="/p2", lawyer="/l")) == ["poet"]

    def test_also_if_it_was_unloaded_in_between(self) -> None:
        assert self.of(listing("8b", poet="/p1"), listing("8b"), listing("8b", poet="/p2")) == ["poet"]

    def test_the_same_path_again_is_the_same_adapter(self) -> None:
        assert self.of(listing("8b", poet="/p1"), listing("8b"), listing("8b", poet="/p1")) == []

    def test_each_engine_is_compared_with_itself_alone(self) -> None:
        told: list[str] = []
        names = ModelNames(told.append)
        names.listed("a", listing(poet="/p1"))
        names.listed("b", listing(poet="/p2"))
        assert told == []

    def test_what_is_remembered_of_an_engine_is_bounded(self) -> None:
        names = ModelNames()
        for n in range(10):
            names.listed("a", listing(**{f"lora-{n}-{i}": "/p" for i in range(MAX_NAMES)}))
        assert sum(map(len, names._sources.values())) <= 2 * MAX_NAMES
        assert len(names._adapters) == MAX_NAMES
