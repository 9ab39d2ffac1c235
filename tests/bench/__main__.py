"""`make bench`: what tierpick costs, as a table and as bench.json. Options: --quick, --out FILE."""

from __future__ import annotations

import argparse
import json
import platform
import random
import timeit
from collections.abc import Mapping
from pathlib import Path

import uvloop
from rich.console import Console
from rich.table import Table

from tests.bench import bench_connector, bench_ext_proc, bench_feed, bench_index, bench_tokens, picker

BARS: Mapping[str, tuple[str, float, str]] = {
    "cpu_us_small_buffered": ("CPU per small request (200 new tokens in, JSON out), buffered, 64 at once", 400, "µs"),
    "cpu_us_100k_1000chunks_buffered": (
        "CPU per request: 100k tokens (5k new), 1000 chunks, buffered",
        10_000,
        "µs",
    ),
    "cpu_us_per_chunk_duplex": ("CPU per streamed chunk, duplex, 64 streams", 50, "µs"),
    "match_us_512_blocks_64_endpoints": ("match 512 blocks, 64 endpoints", 40, "µs"),
    "ingest_cpu_ns_per_block": ("ingest CPU per block, 32 blocks an event, ZMQ to visible", 1000, "ns"),
    "bytes_per_unique_block_64_holders": ("memory per unique block, 64 holders", 300, "bytes"),
}


def measure(quick: bool) -> dict[str, float]:
    figures = {
        **bench_index.measure(quick=quick),
        **bench_feed.measure(quick=quick),
        **bench_tokens.measure(quick=quick),
        **bench_connector.measure(quick=quick),
    }
    with picker.command() as command:
        figures |= uvloop.run(bench_ext_proc.measure(command))
    transport = uvloop.run(bench_ext_proc.measure(bench_ext_proc.idle()))
    figures |= {f"{key}_of_which_grpc": figure for key, figure in transport.items()}
    figures["machine_us_plain_walk_512_blocks"] = plain_walk()
    return figures


def plain_walk() -> float:
    """How fast this machine and this Python are, today: the simplest loop over 512 blocks, best of many, in
    microseconds. It took 25 where the bars were set."""
    rng = random.Random(1)
    masks = {rng.getrandbits(64): (1 << 64) - 1 for _ in range(512)}
    keys = list(masks)

    def walk() -> None:
        alive = (1 << 64) - 1
        for key in keys:
            alive &= masks.get(key, 0)
            if not alive:
                break

    return min(timeit.repeat(walk, number=10, repeat=200)) / 10 * 1e6


def interpreter() -> str:
    """Figures depend on it: one that was built without optimisation takes a tenth to a quarter more."""
    return f"Python {platform.python_version()} ({', '.join((*platform.python_build(), platform.python_compiler()))})"


def table(figures: Mapping[str, float]) -> Table:
    result = Table(title="what tierpick costs (CPU time; one process)", caption=interpreter())
    for column, justify in (("what", "left"), ("figure", "right"), ("bar", "right"), ("", "left")):
        result.add_column(column, justify=justify)  # type: ignore[arg-type]
    for key, (what, bar, unit) in BARS.items():
        held = "[green]held[/]" if figures[key] <= bar else "[red]missed[/]"
        result.add_row(what, f"{figures[key]:,.1f} {unit}", f"{bar:,g}", held)
    result.add_section()
    for key in sorted(figures.keys() - BARS.keys()):
        result.add_row(key, f"{figures[key]:,.1f}", "", "")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, noisier figures")
    parser.add_argument("--out", type=Path, default=Path("bench.json"))
    arguments = parser.parse_args()
    figures = measure(arguments.quick)
    Console().print(table(figures))
    written = figures | {"python": interpreter()}
    arguments.out.write_text(json.dumps(written, indent=1, sort_keys=True) + "\n")
    print(f"written to {arguments.out}")


if __name__ == "__main__":
    main()
