"""`make fuzz`: hostile bytes against everything that reads what others send. Exit 1 if anything is found.

Options: --inputs N, --seconds S, --seed X, --target NAME (several), --processes N, --findings DIR; --atheris NAME for a
coverage-guided run of one target, where atheris is installed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.fuzz.catalog import TARGETS
from tests.fuzz.engine import Engine, Tally, Targets, all_findings, shares
from tests.fuzz.trial import Finding

INPUTS = 1_000_000


def main(argv: list[str] | None = None) -> int:
    options = _parse(argv)
    if options.atheris:
        from tests.fuzz import guided

        folder = Path(options.findings)
        return guided.run(
            options.atheris, TARGETS[options.atheris], seed=options.seed, inputs=options.inputs, folder=folder
        )
    targets = {name: TARGETS[name] for name in options.target or TARGETS}
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(f"seed {options.seed}, {options.inputs:,} inputs, {options.processes} processes")
    began = time.monotonic()
    engine = _fuzz(targets, options, console)
    console.print(_table(engine.tallies))
    total = sum(tally.inputs for tally in engine.tallies.values())
    found = all_findings(engine.tallies)
    for finding in found:
        _report(finding, Path(options.findings), console)
    seconds = time.monotonic() - began
    console.print(f"{total:,} inputs in {seconds:,.0f} s, seed {options.seed}: {len(found)} findings")
    return 1 if found else 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=INPUTS, help="in all (%(default)s)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end after so many")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32), help="to repeat a run (random)")
    parser.add_argument("--target", action="append", choices=[*TARGETS], help="only this one; may be repeated")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--findings", default=str(Path(tempfile.gettempdir()) / "tierpick-fuzz"), help="folder (%(default)s)"
    )
    parser.add_argument("--atheris", choices=[*TARGETS], metavar="NAME")
    return parser.parse_args(argv)


def _fuzz(targets: Targets, options: argparse.Namespace, console: Console) -> Engine:
    engine = Engine(targets, seed=options.seed, processes=options.processes, seconds=options.seconds)
    with console.status("") as status:

        def progress() -> None:
            status.update(f"{sum(tally.inputs for tally in engine.tallies.values()):,} inputs")

        engine.run(shares(targets, options.inputs), progress)
    return engine


def _table(tallies: Mapping[str, Tally]) -> Table:
    table = Table()
    for column in ("target", "inputs", "refused", "accepted", "µs each", "slowest ms", "peak MiB", "findings"):
        table.add_column(column, justify="left" if column == "target" else "right")
    for name, tally in tallies.items():
        table.add_row(
            name,
            f"{tally.inputs:,}",
            f"{tally.inputs - tally.accepted:,}",
            f"{tally.accepted:,}",
            f"{tally.cpu / max(1, tally.inputs) * 1e6:.0f}",
            f"{tally.slowest * 1e3:.0f}",
            f"{tally.peak >> 20}",
            str(len(tally.findings)),
        )
    return table


def _report(finding: Finding, folder: Path, console: Console) -> None:
    """The input as a literal, in a file and, where it is short, on the screen."""
    literal = repr(finding.script)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{finding.target}-{hashlib.sha256(literal.encode()).hexdigest()[:12]}.txt"
    file.write_text(f"# {finding.what}\n{literal}\n\n{finding.detail}\n")
    console.print(f"\n[bold]{finding.target}: {finding.what}[/bold]  ({file})", highlight=False)
    console.print(finding.detail[-3000:], markup=False, highlight=False)
    if len(literal) < 4000:
        console.print(literal, markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
