"""vLLM's own KV-cache manager and offloading scheduler say what is found; the picker says it before."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

pytest.importorskip("vllm", reason="runs in the vLLM venv: make test-vllm")

from .walks import LAYOUTS, Tally, prepare, walk

if TYPE_CHECKING:
    from .walks import Layout

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]  # vLLM and torch warn a lot

SEED = 7
FINE_AND_OFFLOADED = "hits inside blocks, offloaded"


@pytest.fixture(scope="module", autouse=True)
def _prepared() -> None:
    prepare()


def tally(layout: Layout, *, told: bool) -> Tally:
    result = Tally()
    result.add(walk(layout, SEED, told=told, steps=120))
    assert result.hits
    return result


@pytest.mark.parametrize(
    "name", [name for name, layout in LAYOUTS.items() if layout.has_full_attention and name != FINE_AND_OFFLOADED]
)
def test_of_an_engine_that_tells_of_its_groups_every_hit_is_predicted_exactly_also_after_a_snapshot(name: str) -> None:
    assert not tally(LAYOUTS[name], told=True).odd


@pytest.mark.parametrize(
    "name", [name for name, layout in LAYOUTS.items() if layout.has_full_attention and layout.is_known_by_events]
)
def test_of_one_that_does_not_every_hit_in_blocks_of_one_size_is_predicted_exactly(name: str) -> None:
    assert not tally(LAYOUTS[name], told=False).odd


@pytest.mark.parametrize(
    "name", [FINE_AND_OFFLOADED, "window, offloaded", "state", "local", "windows only, of two sizes"]
)
def test_without_full_attention_or_below_hbm_inside_blocks_none_is_predicted_that_is_not_found(name: str) -> None:
    assert not tally(LAYOUTS[name], told=True).too_high


@pytest.mark.parametrize(
    "name", [name for name, layout in LAYOUTS.items() if not layout.is_known_by_events and not layout.eagle]
)
def test_of_one_that_does_not_tell_none_is_predicted_that_is_not_found(name: str) -> None:
    assert not tally(LAYOUTS[name], told=False).too_high
