"""`tierpick replay`: a recording of a real engine's events and requests through the indexer, prediction by prediction.

A recording is `X.jsonl` (the raw ZMQ messages) with `X.requests.jsonl` beside it (what was asked, what the engine
reported as cached). Exit code 1 if any prediction differs from the report.
"""

from __future__ import annotations

import argparse
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from indexer import BadPayload, Batch, BlocksCleared, Event, PrefixIndex, Prompt, decode_batch, match, parse_topic

_REQUESTS = ".requests.jsonl"
_RESET = ("gpu",)
_RESET_EXTERNAL = ("gpu", "cpu")  # a shared file system survives it


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "replay",
        help="predict cached tokens from a recording of KV events and compare with what the engine reported",
        description="Feed recordings through the indexer in recorded order. Exit code 1 if a prediction is not exact.",
    )
    parser.add_argument("recordings", nargs="+", type=Path, metavar="RECORDING.jsonl")
    parser.add_argument(
        "--ignore-actions",
        action="store_true",
        help="do not tell the indexer which tiers a reset cleared; a bare AllBlocksCleared then clears all of them",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    total = exact = 0
    for path in args.recordings:
        if path.name.endswith(_REQUESTS):
            continue  # so that a glob over a folder of recordings works
        try:
            predictions = list(replay(path, ignore_actions=args.ignore_actions))
        except (OSError, msgspec.DecodeError, BadPayload) as error:
            print(f"{path} cannot be replayed: {error}", file=sys.stderr)
            return 2
        for prediction in predictions:
            print(f"{path.stem}  {prediction}")
        checked = [prediction for prediction in predictions if prediction.reported is not None]
        total += len(checked)
        exact += sum(prediction.predicted == prediction.reported for prediction in checked)
    print(f"exact {exact} of {total}")
    return 0 if exact == total else 1


@dataclass(slots=True, frozen=True)
class Prediction:
    label: str
    tokens: int
    gpu: int
    cpu: int
    storage: int
    """Blocks from each tier."""
    predicted: int
    """Cached tokens."""
    reported: int | None
    """None if the recording does not have it."""

    def __str__(self) -> str:
        verdict = "" if self.reported is None else "exact" if self.predicted == self.reported else "WRONG"
        reported = "-" if self.reported is None else self.reported
        return (
            f"{self.label:<58.58} {self.tokens:>6} tokens  blocks gpu {self.gpu} cpu {self.cpu} storage {self.storage}"
            f"  predicted {self.predicted:>5}  reported {reported:>5}  {verdict}"
        )


def replay(path: Path, *, ignore_actions: bool = False) -> Iterator[Prediction]:
    """A prediction per request, each after all messages that had arrived when it was sent."""
    engine, *steps = _read_lines(path.with_suffix(_REQUESTS))
    messages = _read_lines(path)
    replayed = _Replay(int(engine["engine"].get("blocks_per_chunk", 0)))
    at = 0
    for step in steps:
        while at < len(messages) and messages[at]["t_recv"] < step["t"]:
            replayed.message(messages[at])
            at += 1
        if "action" not in step:
            yield replayed.request(step)
        elif not ignore_actions:
            replayed.reset(_RESET_EXTERNAL if step["reset_external"] else _RESET)


class _Replay:
    def __init__(self, blocks_per_chunk: int) -> None:
        self._index = PrefixIndex()
        self._residency = self._index.publisher("recorded")
        self._residency.blocks_per_chunk = blocks_per_chunk
        self._reset_tiers: tuple[str, ...] | None = None
        """What the next AllBlocksCleared means, if the recording says so: engines announce a reset with their next
        step, without its extent."""

    def message(self, line: dict[str, Any]) -> None:
        topic, _sequence, payload = (bytes.fromhex(frame) for frame in line["frames"])
        self._residency.model = parse_topic(topic.decode())[1]
        self._residency.apply(self._with_extent(decode_batch(payload)))

    def _with_extent(self, batch: Batch) -> Iterator[Event]:
        for event in batch.events:
            if isinstance(event, BlocksCleared) and event.tiers is None:
                event = BlocksCleared(self._reset_tiers)
                self._reset_tiers = None
            yield event

    def reset(self, tiers: tuple[str, ...]) -> None:
        self._residency.clear(tiers)
        self._reset_tiers = tiers

    def request(self, line: dict[str, Any]) -> Prediction:
        ids = line["prompt_token_ids"]
        prompt = Prompt(struct.pack(f"<{len(ids)}I", *ids), salt=line.get("cache_salt") or "")
        found = match(self._index, prompt, [self._residency])
        return Prediction(
            label=line.get("label", ""),
            tokens=len(ids),
            gpu=found.gpu[0],
            cpu=found.cpu[0],
            storage=found.storage[0],
            predicted=found.cached_tokens(0),
            reported=line.get("cached_tokens"),
        )


def _read_lines(path: Path) -> list[dict[str, Any]]:
    with path.open("rb") as file:
        return [msgspec.json.decode(line) for line in file]
