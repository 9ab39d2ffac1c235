"""`tierpick demo`: its flags. What it needs beyond the picker is imported when it runs."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_NEEDED = ("rich", "envoy", "envoy_data_plane")


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "demo",
        help="a simulated fleet, a real Envoy and the picker on this machine",
        description="Starts simulated engines with an HBM and a CPU tier, a real Envoy and the picker; sends them the "
        "same traffic round-robin and through the picker; ends with a table. Exit code 1 if a request failed, or if "
        "predictions for requests sent one after another were wrong or did not concern both tiers.",
    )
    parser.add_argument("--engines", type=_between(1, 16), default=4, help="simulated engines (default: 4)")
    parser.add_argument(
        "--seconds",
        type=_between(5, 600),
        default=20,
        help="about how long each of the two runs of concurrent traffic takes (default: 20)",
    )
    parser.add_argument("--seed", type=int, default=1, help="of the traffic; the same seed is the same traffic")
    parser.add_argument(
        "--chaos",
        action="store_true",
        help="instead: kill, cut and restart engines, event connections and the picker under traffic. Exit code 1 if a "
        "request failed, a prediction was too high while its feed was live, or a feed was not live again",
    )
    parser.add_argument("--faults", type=_between(1, 200), default=12, help="how many, with --chaos (default: 12)")
    parser.add_argument("--keep", action="store_true", help="leave all running until Ctrl-C, and print curl lines")
    parser.add_argument(
        "--json", metavar="FILE", type=_output, help="write all figures to FILE (- for stdout) instead of a table"
    )
    parser.set_defaults(run=run)


def _between(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{value} is not between {low} and {high}")
        return value

    return parse


def _output(text: str) -> str:
    """A file that can be written, which is better known before the demo than after it."""
    if text != "-":
        try:
            open(text, "a").close()
        except OSError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
    return text


def run(arguments: argparse.Namespace) -> int:
    """0 = passed, 1 = not passed, 2 = a part is missing or did not start, 130 = interrupted."""
    if arguments.chaos and arguments.keep:
        print("--keep is not for --chaos, whose fleet is left as the last fault has it", file=sys.stderr)
        return 2
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        print(f"the demo needs {', '.join(missing)}: pip install 'tierpick[demo]'", file=sys.stderr)
        return 2
    from epp.toolbox.demo.run import demo

    return demo(arguments)
