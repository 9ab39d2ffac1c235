"""The tables at the end of the chaos demo, for a person."""

from __future__ import annotations

import math

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from epp.toolbox.demo.chaos.figures import Group, Report, Times
from epp.toolbox.demo.chaos.judge import Standing
from epp.toolbox.demo.verdicts import Verdict

MISSES_SHOWN = 10


def show(report: Report, console: Console) -> None:
    console.print(_faults(report))
    console.print(_requests(report))
    console.print(_summary(report))
    console.print(_conclusion(report))


def _table(title: str) -> Table:
    return Table(title=f"\n[bold]{title}", title_justify="left", title_style="")


def _faults(report: Report) -> Table:
    table = _table("Faults, one at a time under traffic; after each, one request after another")
    table.add_column("what was done")
    for title in (
        "times",
        "noticed\np50, s",
        "live again\np50 / max, s",
        "predictions after it\nexact / too little / too much",
    ):
        table.add_column(title, justify="right")
    for kind, group in report.by_kind().items():
        table.add_row(kind.value, *_cells(group))
    table.add_section()
    table.add_row("all", *_cells(report.faults), style="bold")
    return table


def _cells(group: Group) -> tuple[str, str, str, str]:
    probes = group.probes
    verdicts = f"{probes[Verdict.EXACT]} / {probes[Verdict.BELOW]} / {probes[Verdict.ABOVE]}"
    if unknown := probes[Verdict.UNKNOWN]:
        verdicts += f" ({unknown} unknown)"
    return str(len(group.seen)), _seconds(group.noticed.p50), _times(group.live), verdicts


def _times(times: Times) -> str:
    return f"{_seconds(times.p50)} / {_seconds(times.max)}"


def _seconds(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}"


def _requests(report: Report) -> Table:
    standings = report.standings
    table = _table("Requests meanwhile")
    table.add_column("")
    table.add_column("requests", justify="right")
    table.add_column("why")
    rows = (
        ("sent", len(report.findings), f"in {report.seconds:.0f} s; none was streamed"),
        ("failed", standings[Standing.FAILED], ""),
        ("tried again by Envoy", report.retries, "on another engine that the picker had named"),
        (Standing.ELSEWHERE.value, standings[Standing.ELSEWHERE], "predictions not compared"),
        (Standing.UNPICKED.value, standings[Standing.UNPICKED], "Envoy fails open while the picker is down"),
        (Standing.UNSURE.value, standings[Standing.UNSURE], _why(report, Standing.UNSURE)),
    )
    for title, count, why in rows:
        table.add_row(title, f"{count:,}", why)
    table.add_section()
    table.add_row("feed live when picked", f"{_live(report):,}", "")
    for standing in Standing:
        if standing.is_of_live:
            table.add_row(f"  {standing.value}", f"{standings[standing]:,}", _why(report, standing))
    return table


def _why(report: Report, standing: Standing) -> str:
    return ", ".join(f"{count} {why}" for (of, why), count in report.reasons.items() if of is standing and why)


def _summary(report: Report) -> Table:
    standings = report.standings
    probes = report.faults.probes.total()
    table = _table("In short")
    table.show_header = False
    table.add_column("")
    table.add_column("", justify="right")
    table.add_row("faults injected", str(len(report.faults.seen)))
    table.add_row("requests failed", f"{standings[Standing.FAILED]} of {len(report.findings):,}")
    table.add_row("predicted too much while live", f"{report.wrong} of {_live(report) + probes:,}")
    table.add_row("time to live again, p50 / max", f"{_times(report.faults.live)} s")
    return table


def _live(report: Report) -> int:
    return sum(count for standing, count in report.standings.items() if standing.is_of_live)


def _conclusion(report: Report) -> str:
    if report.passed:
        return (
            "\n[green]Passed: no request failed, nothing was predicted too high while live, every feed is live again."
        )
    shown = "".join(f"\n  {escape(text)}" for text in [*report.failures, *report.misses][:MISSES_SHOWN])
    return f"\n[red]Not passed: {escape('; '.join(report.shortcomings))}.{shown}"
