"""What is wrong with a configuration, said so that it can be put right without the manual: where, what, and the
nearest thing that would have been valid."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


class ConfigError(Exception):
    """The configuration cannot be used. `problems` are complete sentences, each beginning with a path such as
    `plugins[2].parameters.blokSizeTokens`."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """`; did you mean "…"?`, or nothing where no known name is near."""
    near = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.5)
    return f'; did you mean "{near[0]}"?' if near else ""


@dataclass(slots=True)
class Findings:
    """Collects what loading finds, so that one run reports everything it can see."""

    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def error(self, path: str, message: str) -> None:
        self.errors.append(f"{path}: {message}" if path else message)

    def warn(self, path: str, message: str) -> None:
        self.warnings.append(f"{path}: {message}" if path else message)

    def note(self, path: str, message: str) -> None:
        self.notes.append(f"{path}: {message}" if path else message)

    def raise_errors(self) -> None:
        if self.errors:
            raise ConfigError(self.errors)
