"""`tierpick sim`: simulated engines with vLLM's cache semantics, events and HTTP surface (see `connector.sim`)."""

from __future__ import annotations

from typing import Any

from connector.sim import cli


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("sim", help="run simulated engines", description=cli.__doc__)
    cli.add_arguments(parser)
    parser.set_defaults(run=cli.run)
