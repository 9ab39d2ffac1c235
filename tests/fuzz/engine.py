"""Many inputs on all cores: tasks to worker processes, and a watchdog for those that come back no more.

Input number n of a target depends on the seed, the target's name and n alone, so every one can be made again.
"""

from __future__ import annotations

import faulthandler
import random
import resource
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import Synchronized
from typing import Any

from tests.fuzz.source import Source
from tests.fuzz.target import Script, Target
from tests.fuzz.trial import Finding, Watch, attempt, minimise, peak_rss

INPUTS_A_TASK = 500
STUCK = 60.0
"""Seconds on the wall after which a worker that is still at the same input is killed."""
ADDRESS_SPACE = 3 << 30
"""Bytes a worker may map beyond what it has at the start: what allocates by a header's word, fails."""
FINDINGS_A_TARGET = 5
WARM = 2
"""Tasks of each target after which a worker has seen everything once."""
GROWTH = 128 << 20
"""Bytes by which a worker's peak may rise from then on."""

Targets = Mapping[str, type[Target]]

_spawn = get_context("spawn")


def make_script(target: Target, seed: int, name: str, number: int) -> Script:
    return target.script(Source(random.Random((seed << 80) + (zlib.crc32(name.encode()) << 40) + number)))


@dataclass(slots=True)
class Tally:
    """Of one target."""

    inputs: int = 0
    accepted: int = 0
    cpu: float = 0.0
    slowest: float = 0.0
    """CPU seconds."""
    peak: int = 0
    """Bytes of resident memory, of the worker that needed most."""
    findings: list[Finding] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        self.inputs += other.inputs
        self.accepted += other.accepted
        self.cpu += other.cpu
        self.slowest = max(self.slowest, other.slowest)
        self.peak = max(self.peak, other.peak)
        known = {finding.what for finding in self.findings}
        self.findings += [finding for finding in other.findings if finding.what not in known]


@dataclass(slots=True, frozen=True)
class Task:
    target: str
    first: int
    count: int


class Runner:
    """The inputs of one process."""

    def __init__(self, targets: Targets, seed: int) -> None:
        self._factories = targets
        self._seed = seed
        self._made: dict[str, Target] = {}
        self._watch = Watch()

    def run(self, task: Task, at: Callable[[int], None] = lambda number: None) -> Tally:
        target = self._target(task.target)
        tally = Tally()
        for number in range(task.first, task.first + task.count):
            at(number)
            seen = attempt(task.target, target, make_script(target, self._seed, task.target, number), self._watch)
            tally.inputs += 1
            tally.accepted += seen.accepted
            tally.cpu += seen.cpu
            tally.slowest = max(tally.slowest, seen.cpu)
            if seen.finding is not None:
                self._found(task.target, seen.finding, tally)
                target = self._target(task.target)
        tally.peak = peak_rss()
        return tally

    def _target(self, name: str) -> Target:
        if name not in self._made:
            self._made[name] = self._factories[name]()
        return self._made[name]

    def _found(self, name: str, finding: Finding, tally: Tally) -> None:
        """After it the target may be in any state, so the next input gets a new one."""
        if finding.what not in {known.what for known in tally.findings}:
            fresh = self._factories[name]()
            script = minimise(name, fresh, finding, self._watch)
            fresh.close()
            tally.findings.append(Finding(name, finding.what, finding.detail, script))
        self._made.pop(name).close()

    def close(self) -> None:
        for target in self._made.values():
            target.close()


def work(targets: Targets, seed: int, pipe: Connection, current: Synchronized[int]) -> None:
    """A worker process: a task in, a tally out, until None."""
    faulthandler.enable()
    _limit_memory()
    runner = Runner(targets, seed)

    def at(number: int) -> None:
        current.value = number

    while (task := pipe.recv()) is not None:
        pipe.send(runner.run(task, at))


def _limit_memory() -> None:
    with open("/proc/self/statm") as statm:
        mapped = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + ADDRESS_SPACE,) * 2)


@dataclass(slots=True)
class _Worker:
    process: BaseProcess
    pipe: Connection
    current: Any
    task: Task | None = None
    number: int = -1
    since: float = 0.0
    tasks: int = 0
    warm: int = 0
    """Peak in bytes, once it has done enough."""


class Engine:
    """`seconds`: no task is begun after them. `targets` must be picklable."""

    def __init__(self, targets: Targets, *, seed: int, processes: int, seconds: float = float("inf")) -> None:
        self._targets = targets
        self._seed = seed
        self._processes = processes
        self._deadline = time.monotonic() + seconds
        self.tallies = {name: Tally() for name in targets}

    def run(self, inputs: Mapping[str, int], progress: Callable[[], None] = lambda: None) -> None:
        """`inputs`: how many of each target."""
        tasks = _tasks(inputs)
        workers = [self._start() for _ in range(self._processes)]
        for worker in workers:
            self._give(worker, tasks)
        while any(worker.task for worker in workers):
            ready = wait([worker.pipe for worker in workers if worker.task], timeout=1.0)
            for n, worker in enumerate(workers):
                if worker.pipe in ready:
                    workers[n] = self._take(worker, tasks)
                elif self._is_stuck(worker):
                    workers[n] = self._replace(worker, tasks, "no end in sight")
            progress()
        for worker in workers:
            worker.pipe.send(None)
            worker.process.join()

    def _start(self) -> _Worker:
        ours, theirs = _spawn.Pipe()
        current = _spawn.Value("q", -1, lock=False)
        process = _spawn.Process(target=work, args=(self._targets, self._seed, theirs, current), daemon=True)
        process.start()
        theirs.close()
        return _Worker(process, ours, current)

    def _give(self, worker: _Worker, tasks: Iterator[Task]) -> None:
        worker.task = None
        if time.monotonic() > self._deadline:
            return
        for task in tasks:
            if len(self.tallies[task.target].findings) < FINDINGS_A_TARGET:
                worker.task, worker.since = task, time.monotonic()
                worker.pipe.send(task)
                return

    def _take(self, worker: _Worker, tasks: Iterator[Task]) -> _Worker:
        assert worker.task is not None
        try:
            tally = worker.pipe.recv()
        except (EOFError, ConnectionResetError):
            return self._replace(worker, tasks, "the process died")
        self.tallies[worker.task.target].add(tally)
        worker.tasks += 1
        if worker.tasks == WARM * len(self._targets):
            worker.warm = tally.peak
        elif worker.warm and tally.peak > worker.warm + GROWTH:
            return self._replace(worker, tasks, "memory grows")
        self._give(worker, tasks)
        return worker

    def _is_stuck(self, worker: _Worker) -> bool:
        now, number = time.monotonic(), worker.current.value
        if number != worker.number:
            worker.number, worker.since = number, now
        return worker.task is not None and now - worker.since > STUCK

    def _replace(self, worker: _Worker, tasks: Iterator[Task], why: str) -> _Worker:
        """The input at which it ended is made again and becomes a finding."""
        assert worker.task is not None
        worker.process.kill()
        worker.process.join()
        name = worker.task.target
        target = self._targets[name]()
        script = make_script(target, self._seed, name, worker.current.value)
        target.close()
        detail = f"exit code {worker.process.exitcode}, input {worker.current.value}"
        self.tallies[name].add(Tally(inputs=1, findings=[Finding(name, why, detail, script)]))
        fresh = self._start()
        self._give(fresh, tasks)
        return fresh


def _tasks(inputs: Mapping[str, int]) -> Iterator[Task]:
    """All targets by turns, so that every one has had its part whenever the run ends."""
    left = dict(inputs)
    done = dict.fromkeys(inputs, 0)
    while left:
        for name in list(left):
            count = min(INPUTS_A_TASK, left[name])
            if count:
                yield Task(name, done[name], count)
            done[name] += count
            left[name] -= count
            if not left[name]:
                del left[name]


def shares(targets: Targets, inputs: int) -> dict[str, int]:
    """So many in all, by the targets' shares."""
    weights = {name: factory.share for name, factory in targets.items()}
    total = sum(weights.values())
    counts = {name: inputs * weight // total for name, weight in weights.items()}
    counts[next(iter(counts))] += inputs - sum(counts.values())
    return counts


def all_findings(tallies: Mapping[str, Tally]) -> Sequence[Finding]:
    return [finding for tally in tallies.values() for finding in tally.findings]
