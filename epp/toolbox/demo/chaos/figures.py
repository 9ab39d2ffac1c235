"""The figures of the chaos demo: from episodes, probes and findings to one value and its JSON. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from epp.toolbox.demo.chaos.faults import Kind
from epp.toolbox.demo.chaos.judge import Finding, Probe, Standing
from epp.toolbox.demo.figures import percentile
from epp.toolbox.demo.verdicts import Verdict


@dataclass(frozen=True, slots=True)
class Seen:
    """What one fault did, as seen from outside."""

    kind: Kind
    engine: str
    """Struck, or looked at."""
    noticed_s: float | None
    """From its beginning until a feed was not live; None if that was not seen."""
    live_s: float | None
    """From its end until the feeds concerned were live again; None if they were not in time."""
    probes: tuple[Probe, ...]


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds; NaN without any."""

    p50: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Times:
        known = [value for value in values if value is not None]
        return cls(percentile(known, 0.5), max(known, default=math.nan))


@dataclass(frozen=True, slots=True)
class Group:
    """The faults of one kind, or all."""

    seen: tuple[Seen, ...]

    @property
    def noticed(self) -> Times:
        return Times.of(each.noticed_s for each in self.seen)

    @property
    def live(self) -> Times:
        return Times.of(each.live_s for each in self.seen)

    @property
    def probes(self) -> Counter[Verdict]:
        return Counter(probe.verdict for each in self.seen for probe in each.probes)


@dataclass(frozen=True, slots=True)
class Report:
    seed: int
    engines: int
    seconds: float
    """Of traffic."""
    faults: Group
    findings: tuple[Finding, ...]
    """Of every request through Envoy."""
    retries: int
    """Times that Envoy tried another engine."""
    not_live: tuple[str, ...]
    """Endpoints whose feeds were not live at the end."""

    @property
    def standings(self) -> Counter[Standing]:
        return Counter(finding.standing for finding in self.findings)

    @property
    def reasons(self) -> Counter[tuple[Standing, str]]:
        return Counter((finding.standing, finding.why) for finding in self.findings)

    def by_kind(self) -> Mapping[Kind, Group]:
        """Of the kinds that occurred."""
        groups = {kind: Group(tuple(s for s in self.faults.seen if s.kind is kind)) for kind in Kind}
        return {kind: group for kind, group in groups.items() if group.seen}

    @property
    def wrong(self) -> int:
        """Predictions higher than what was delivered, made while the feed said `live`, that nothing explains."""
        return self.standings[Standing.WRONG] + self.faults.probes[Verdict.ABOVE]

    @property
    def found(self) -> int:
        """Cached tokens predicted after faults: where there are none, nothing was tested."""
        return sum(probe.predicted or 0 for seen in self.faults.seen for probe in seen.probes)

    @property
    def failures(self) -> list[str]:
        return [f"{f.call.id}: {f.why}" for f in self.findings if f.standing is Standing.FAILED]

    @property
    def misses(self) -> list[str]:
        """Predictions that had to be right and were not, in words."""
        return [*map(_finding_in_words, self._of(Standing.WRONG)), *map(_probe_in_words, self._missed_probes())]

    def _of(self, standing: Standing) -> Iterator[Finding]:
        return (finding for finding in self.findings if finding.standing is standing)

    def _missed_probes(self) -> Sequence[Probe]:
        return [probe for seen in self.faults.seen for probe in seen.probes if probe.verdict is not Verdict.EXACT]

    @property
    def passed(self) -> bool:
        return not self.shortcomings

    @property
    def shortcomings(self) -> list[str]:
        """Why the demo has not passed, in words; empty if it has."""
        probes = self.faults.probes
        inexact = probes.total() - probes[Verdict.EXACT]
        late = sum(seen.live_s is None for seen in self.faults.seen)
        counted = (
            (self.standings[Standing.FAILED], "requests failed"),
            (self.wrong, "predictions too high while live"),
            (inexact, f"of {probes.total()} predictions after faults not exact"),
            (late, "faults after which a feed was not live again in time"),
            (len(self.not_live), "feeds not live at the end"),
        )
        reasons = [f"{count} {text}" for count, text in counted if count]
        return reasons if self.found else [*reasons, "nothing was found after a fault, so nothing was tested"]


def _finding_in_words(finding: Finding) -> str:
    predicted = finding.pick.prediction.cached if finding.pick else None
    return f"{finding.call.id}: predicted {predicted}, delivered {finding.call.cached_tokens} by {finding.call.served}"


def _probe_in_words(probe: Probe) -> str:
    return f"{probe.id}: predicted {probe.predicted}, delivered {probe.delivered} by {probe.engine}"


def as_json(report: Report) -> dict[str, Any]:
    """All figures, as values that JSON knows. Times are seconds."""
    return {
        "passed": report.passed,
        "not_passed_because": report.shortcomings,
        "seed": report.seed,
        "engines": report.engines,
        "seconds": round(report.seconds, 3),
        "faults": _group_json(report.faults) | {
            "kinds": {kind.name.lower(): _group_json(group) for kind, group in report.by_kind().items()}
        },
        "requests": {
            "total": len(report.findings),
            **{standing.name.lower(): report.standings[standing] for standing in Standing},
            "tried_again_by_envoy": report.retries,
            "reasons": {
                f"{standing.name.lower()}: {why}": count
                for (standing, why), count in report.reasons.items()
                if why and standing is not Standing.FAILED
            },
        },
        "wrong_by_too_much_while_live": report.wrong,
        "predicted_tokens_after_faults": report.found,
        "failures": report.failures,
        "misses": report.misses,
        "not_live_at_the_end": list(report.not_live),
    }  # fmt: skip


def _group_json(group: Group) -> dict[str, Any]:
    return {
        "injected": len(group.seen),
        "noticed_s": _times_json(group.noticed),
        "live_again_s": _times_json(group.live),
        "predictions_after": {verdict.name.lower(): group.probes[verdict] for verdict in Verdict},
    }


def _times_json(times: Times) -> dict[str, float | None]:
    # JSON has no NaN.
    figures = {"p50": times.p50, "max": times.max}
    return {name: None if math.isnan(value) else round(value, 3) for name, value in figures.items()}
