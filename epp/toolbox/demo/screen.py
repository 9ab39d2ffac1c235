"""What is seen while the demo runs: a progress bar on a terminal, a line every few seconds elsewhere. On stderr."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from epp.toolbox.demo.drive import Call

LINE_EVERY_S = 5.0


class _Tally:
    """Running figures of one phase, in a few words."""

    def __init__(self) -> None:
        self.done = 0
        self._failed = 0
        self._prompt = 0
        self._cached = 0

    def add(self, call: Call) -> None:
        self.done += 1
        self._failed += call.failed
        self._prompt += call.prompt_tokens
        self._cached += call.cached_tokens or 0

    def __str__(self) -> str:
        share = f"{self._cached / self._prompt:.0%} of prompt tokens cached" if self._prompt else ""
        return f"{share}, [red]{self._failed} failed[/]" if self._failed else share


class Screen:
    def __init__(self, *, plain: bool) -> None:
        """`plain`: lines even on a terminal."""
        self._console = Console(stderr=True)
        self._bars = self._console.is_terminal and not plain

    def say(self, text: str) -> None:
        """`text` may hold rich's markup, but not where it quotes others: see `quote`."""
        self._console.print(text, highlight=False)

    def quote(self, text: str) -> None:
        """As it is: logs and messages of other programs."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    @contextlib.contextmanager
    def phase(self, title: str, total: int) -> Iterator[Callable[[Call], None]]:
        """A phase of `total` calls; the block gets the function to tell each finished call to."""
        with self._bar(title, total) if self._bars else self._lines(title, total) as on_done:
            yield on_done

    @contextlib.contextmanager
    def _bar(self, title: str, total: int) -> Iterator[Callable[[Call], None]]:
        columns = (
            TextColumn("{task.description:<34}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[figures]}"),
        )
        tally = _Tally()
        with Progress(*columns, console=self._console) as progress:
            task = progress.add_task(title, total=total, figures="")

            def on_done(call: Call) -> None:
                tally.add(call)
                progress.update(task, completed=tally.done, figures=str(tally))

            yield on_done

    @contextlib.contextmanager
    def _lines(self, title: str, total: int) -> Iterator[Callable[[Call], None]]:
        tally, said_at = _Tally(), time.monotonic()

        def on_done(call: Call) -> None:
            nonlocal said_at
            tally.add(call)
            if tally.done == total or time.monotonic() - said_at > LINE_EVERY_S:
                said_at = time.monotonic()
                self.say(f"{title}: {tally.done}/{total} {tally}")

        self.say(f"{title}: {total} requests")
        yield on_done
