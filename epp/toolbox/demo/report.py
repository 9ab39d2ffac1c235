"""The table at the end of the demo: the figures, for a person."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from epp.toolbox.demo.counters import EngineCounters, Found
from epp.toolbox.demo.figures import Latency, Place, Predictions, Report, Traffic
from epp.toolbox.demo.sizes import Sizes
from epp.toolbox.demo.verdicts import Reason, Verdict

MISSES_SHOWN = 10

_COLUMNS: tuple[tuple[str, Callable[[EngineCounters], str]], ...] = (
    ("requests", lambda c: f"{c.requests:,}"),
    ("in HBM", lambda c: _part(c.hbm_tokens, c.prompt_tokens)),
    ("in CPU RAM", lambda c: _part(c.lower_tokens, c.prompt_tokens)),
    ("recomputed", lambda c: _part(c.recomputed_tokens, c.prompt_tokens)),
)


def show(report: Report, console: Console) -> None:
    console.print(_scale(report.sizes))
    console.print(_pods("round-robin", report.round_robin))
    console.print(_pods("tierpick", report.tierpick, report.concurrent))
    console.print(_comparison(report))
    console.print(_concurrent(report.concurrent))
    console.print(_exact_pods(report))
    console.print(*_exact(report), sep="\n")
    console.print(_conclusion(report))


def _scale(sizes: Sizes) -> str:
    return (
        f"\nThe prompts come to {sizes.working_set_tokens:,} distinct tokens; the {sizes.engines} engines hold "
        f"{sizes.fleet_hbm_tokens:,} in HBM and {sizes.fleet_cpu_tokens:,} in CPU RAM, all together.\n"
    )


def _part(tokens: int, total: int) -> str:
    return f"{tokens:,} ({tokens / total:.0%})" if total else f"{tokens:,}"


def _table(title: str) -> Table:
    return Table(title=f"[bold]{title}", title_justify="left", title_style="")


def _pods(policy: str, figures: Traffic, predictions: Predictions | None = None) -> Table:
    """`predictions` adds what the picker expected to be found, in HBM and CPU RAM together."""
    table = _table(f"{policy}: where the pods found their prompt tokens")
    table.add_column("pod")
    for title, _ in _COLUMNS:
        table.add_column(title, justify="right")
    if predictions:
        table.add_column("predicted", justify="right")

    def row(counters: EngineCounters, predicted: int) -> list[str]:
        cells = [cell(counters) for _, cell in _COLUMNS]
        return [*cells, f"{predicted:,}"] if predictions else cells

    by_pod = predictions.found_by_pod if predictions else {}
    for name, counters in figures.pods.items():
        table.add_row(name, *row(counters, by_pod.get(name, Found()).total))
    table.add_section()
    table.add_row("all", *row(figures.total, predictions.found.total if predictions else 0), style="bold")
    return table


def _comparison(report: Report) -> Table:
    sides = (report.round_robin, report.tierpick)
    table = _table("The same traffic, side by side")
    table.add_column("")
    for title in ("round-robin", "tierpick"):
        table.add_column(title, justify="right")
    rows: tuple[tuple[str, Callable[[Traffic], str]], ...] = (
        ("requests (failed)", lambda t: f"{t.requests:,} ({len(t.failures)})"),
        ("prompt tokens recomputed", lambda t: _part(t.total.recomputed_tokens, t.total.prompt_tokens)),
        ("time to first token p50 / p90", lambda t: _latency(t.ttft)),
        ("whole answer p50 / p90", lambda t: _latency(t.whole)),
    )
    for title, cell in rows:
        table.add_row(title, *(cell(side) for side in sides))
    return table


def _latency(latency: Latency) -> str:
    return f"{latency.p50:,.0f} / {latency.p90:,.0f} ms" if latency.count else "-"


def _concurrent(figures: Predictions) -> Table:
    table = _table("tierpick: predicted against delivered, concurrent traffic")
    table.add_column("prediction")
    table.add_column("requests", justify="right")
    table.add_column("why")
    for verdict in Verdict:
        if figures.verdicts[verdict] or verdict is Verdict.EXACT:
            table.add_row(verdict.value, f"{figures.verdicts[verdict]:,}", _why(figures, verdict))
    table.add_section()
    table.add_row("cached tokens", "", _tokens(figures))
    return table


def _why(figures: Predictions, verdict: Verdict) -> str:
    counts = {reason: figures.reasons.get((verdict, reason), 0) for reason in Reason}
    return ", ".join(f"{count} {reason.value}" for reason, count in counts.items() if count)


def _tokens(figures: Predictions) -> str:
    return (
        f"predicted {figures.predicted_tokens:,}, delivered {figures.delivered_tokens:,} "
        f"(best pod for each prompt: {figures.best_tokens:,})"
    )


def _exact_pods(report: Report) -> Table:
    """Predicted, by the picker, against delivered, by the engines' counters."""
    table = _table("tierpick: predicted / delivered tokens, one request after another")
    table.add_column("pod")
    for title in ("requests", "in HBM", "in CPU RAM", "recomputed"):
        table.add_column(title, justify="right")

    def add(name: str, predicted: Found, counters: EngineCounters, style: str = "") -> None:
        delivered = counters.found
        hbm, lower = _pair(predicted.hbm, delivered.hbm), _pair(predicted.lower, delivered.lower)
        table.add_row(name, f"{counters.requests:,}", hbm, lower, f"{counters.recomputed_tokens:,}", style=style)

    for name, counters in report.exact_traffic.pods.items():
        add(name, report.exact.found_by_pod.get(name, Found()), counters)
    table.add_section()
    add("all", report.exact.found, report.exact_traffic.total, "bold")
    return table


def _pair(predicted: int, delivered: int) -> str:
    text = f"{predicted:,} / {delivered:,}"
    return text if predicted == delivered else f"[red]{text}[/]"


def _exact(report: Report) -> list[str]:
    figures = report.exact
    places = ", ".join(f"{figures.places[place]} {place.value}" for place in Place)
    lines = [
        f"\n[bold]One request after another:[/] {figures.exact} of {figures.total} exact; {_tokens(figures)}",
        f"Their prompts began {places}.",
    ]
    lines += [f"  [red]{escape(miss)}" for miss in figures.misses[:MISSES_SHOWN]]
    if len(figures.misses) > MISSES_SHOWN:
        lines.append(f"  … and {len(figures.misses) - MISSES_SHOWN} more")
    return lines


def _conclusion(report: Report) -> str:
    if report.passed:
        return "[green]Passed: no request failed, and every sequential prediction was exact, in HBM and in CPU RAM."
    shown = "".join(f"\n  {escape(failure)}" for failure in report.failures[:MISSES_SHOWN])
    return f"[red]Not passed: {escape('; '.join(report.shortcomings))}.{shown}"
