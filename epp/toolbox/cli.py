"""`tierpick`: the toolbox around the picker. One module a command; each has `add_parser(commands)` and `run(args)`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from epp.toolbox import bootstrap, check, replay, sim
from epp.toolbox.demo import cli as demo

COMMANDS = (demo, replay, sim, bootstrap, check)


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog="tierpick", description="Tools around the tierpick endpoint picker.")
    commands = result.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in COMMANDS:
        module.add_parser(commands)
    return result


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    return int(arguments.run(arguments))


if __name__ == "__main__":
    sys.exit(main())
