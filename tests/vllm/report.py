"""What was proven, on which fleet, with which figures: a line and a JSON object each."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .fleet import Fleet, Probe, tally

SHOWN = 5
"""Requests that did not do as they should, in the text of a failure."""


@dataclass(frozen=True)
class Proof:
    fleet: str
    name: str
    good: int
    of: int
    figures: dict[str, Any]

    @property
    def holds(self) -> bool:
        return self.good == self.of > 0

    def __str__(self) -> str:
        verdict = "holds" if self.holds else "DOES NOT HOLD"
        figures = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in self._telling())
        return f"{self.fleet}: {self.name}: {verdict}, {self.good} of {self.of}" + (f" ({figures})" if figures else "")

    def _telling(self) -> Iterator[tuple[str, Any]]:
        """Figures that a person would miss in the line."""
        for name, value in self.figures.items():
            if value not in (0, []) and name != "requests":
                yield name, value


class Report:
    def __init__(self) -> None:
        self.proofs: list[Proof] = []

    def exact(self, fleet: Fleet, name: str, probes: Sequence[Probe], **figures: Any) -> Proof:
        """As many tokens were delivered as predicted, each time."""
        return self._probed(fleet, f"{name}: predicted = delivered", probes, lambda probe: probe.exact, **figures)

    def never_too_high_while_live(self, fleet: Fleet, name: str, probes: Sequence[Probe], **figures: Any) -> Proof:
        claim = f"{name}: never predicted > delivered while live"
        return self._probed(fleet, claim, probes, lambda probe: not probe.too_high_while_live, **figures)

    def _probed(
        self, fleet: Fleet, claim: str, probes: Sequence[Probe], good: Callable[[Probe], bool], **figures: Any
    ) -> Proof:
        bad = [probe for probe in probes if not good(probe)]
        shown = tally(probes) | figures
        if bad:
            shown["for_example"] = [str(probe) for probe in bad[:SHOWN]]
        return self.add(fleet, claim, len(probes) - len(bad), len(probes), **shown)

    def add(self, fleet: Fleet, name: str, good: int, of: int, **figures: Any) -> Proof:
        proof = Proof(str(fleet.kind), name, good, of, figures)
        self.proofs.append(proof)
        return proof

    def write(self, path: Path) -> None:
        path.write_text(json.dumps([{"holds": proof.holds, **asdict(proof)} for proof in self.proofs], indent=1))
