"""`tierpick check FILE`: is this EndpointPickerConfig right, and what does it amount to? Starts nothing."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from epp.config.environment import Environment
from epp.config.errors import ConfigError
from epp.config.loader import Configuration, load
from epp.fleet.fleet import Fleet
from epp.scheduling.plugin import Plugin
from epp.telemetry import Telemetry


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("check", help="validate a configuration file", description=__doc__)
    parser.add_argument("file", type=Path, help="an EndpointPickerConfig, YAML or JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Exit status 1 where the file is wrong, with every problem in a line of its own on standard error."""
    try:
        configuration = load(arguments.file.read_text(encoding="utf-8"), Environment(Fleet(), Telemetry()))
    except ConfigError as error:
        return _wrong(arguments.file, error.problems)
    except (OSError, UnicodeDecodeError) as error:
        return _wrong(arguments.file, [str(error)])
    print("\n".join(_summary(configuration)))
    return 0


def _wrong(file: Path, problems: Sequence[str]) -> int:
    print("\n".join(f"{file}: {problem}" for problem in problems), file=sys.stderr)
    return 1


def _summary(configuration: Configuration) -> list[str]:
    lines = [
        f"endpoints: {_shown(configuration.discovery) if configuration.discovery else 'by --endpoints'}",
        f"producers: {', '.join(map(_shown, configuration.producers)) or 'none'}",
    ]
    for profile in configuration.profiles:
        parts = [plugin.name for plugin in profile.filters]
        parts += [f"{scorer.name} x {weight:g}" for scorer, weight in profile.scorers]
        lines.append(f"profile {profile.name}: {', '.join(parts)} -> {profile.picker.name}")
    lines += [f"warning: {text}" for text in configuration.warnings]
    return lines + [f"note: {text}" for text in configuration.notes]


def _shown(plugin: Plugin) -> str:
    return plugin.name if plugin.name == plugin.type else f"{plugin.name} ({plugin.type})"
