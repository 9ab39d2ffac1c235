"""Children are started, waited for and stopped: with trivial children, and for every way of leaving the block."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path

import pytest

from epp.toolbox.processes import Children, PartFailed, free_ports, tail

SLEEPER = [sys.executable, "-c", "import time; print('ready', flush=True); time.sleep(60)"]
STUBBORN = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)",
]
PARENT_OF_A_SLEEPER = [sys.executable, "-c", """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])
print(child.pid, flush=True)
time.sleep(60)
"""]  # fmt: skip


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A process that nobody has reaped yet is dead, too.
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"


async def ended(pid: int) -> None:
    """Returns once a process that is not our child has ended."""
    loop = asyncio.get_running_loop()
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    over = loop.create_future()
    loop.add_reader(descriptor, over.set_result, None)
    try:
        await asyncio.wait_for(over, 10)
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


async def first_line(path: Path) -> str | None:
    return _first_line(path)


def _first_line(path: Path) -> str | None:
    text = path.read_text()
    return text.partition("\n")[0] if "\n" in text else None


async def test_what_a_child_prints_can_be_waited_for(tmp_path: Path) -> None:
    async with Children(tmp_path) as children:
        child = await children.start("sleeper", SLEEPER)
        assert await child.until(lambda: first_line(child.output), timeout_s=10) == "ready"


async def test_leaving_the_block_stops_every_child(tmp_path: Path) -> None:
    async with Children(tmp_path) as children:
        pids = [(await children.start(f"sleeper-{i}", SLEEPER)).pid for i in range(3)]
        assert all(map(alive, pids))
    assert not any(map(alive, pids))


async def test_an_error_in_the_block_stops_every_child(tmp_path: Path) -> None:
    pids = []

    async def block() -> None:
        async with Children(tmp_path) as children:
            pids.append((await children.start("sleeper", SLEEPER)).pid)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await block()
    assert not alive(pids[0])


async def test_cancelling_the_block_stops_every_child(tmp_path: Path) -> None:
    started: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def block() -> None:
        async with Children(tmp_path) as children:
            started.set_result((await children.start("sleeper", SLEEPER)).pid)
            await asyncio.Event().wait()

    task = asyncio.create_task(block())
    pid = await started
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not alive(pid)


async def test_a_child_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epp.toolbox.processes.STOP_GRACE_S", 0.2)
    async with Children(tmp_path) as children:
        child = await children.start("stubborn", STUBBORN)
        await child.until(lambda: first_line(child.output), timeout_s=10)
    assert child.exit_code == -signal.SIGKILL


async def test_grandchildren_are_stopped_with_their_parent(tmp_path: Path) -> None:
    async with Children(tmp_path) as children:
        child = await children.start("parent", PARENT_OF_A_SLEEPER)
        grandchild = int(await child.until(lambda: first_line(child.output), timeout_s=10))
        assert alive(grandchild)
    await ended(grandchild)


async def test_children_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    program = (
        "import asyncio, pathlib, sys\n"
        "from epp.toolbox.processes import Children\n"
        "async def main():\n"
        "    async with Children(pathlib.Path(sys.argv[1])) as children:\n"
        "        child = await children.start('sleeper', [sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "        print(child.pid, flush=True)\n"
        "        await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    (tmp_path / "inner").mkdir()
    async with Children(tmp_path) as children:
        parent = await children.start("parent", [sys.executable, "-c", program, str(tmp_path / "inner")])
        orphan = int(await parent.until(lambda: first_line(parent.output), timeout_s=10))
        os.kill(parent.pid, signal.SIGKILL)
        await ended(orphan)


async def test_a_child_that_ends_too_early_is_named_with_the_end_of_its_log(tmp_path: Path) -> None:
    async with Children(tmp_path) as children:
        child = await children.start("picker", [sys.executable, "-c", "raise SystemExit('no such plugin: foo')"])

        async def never() -> None:
            return None

        with pytest.raises(PartFailed, match=r"(?s)picker: ended with exit code 1.*no such plugin: foo"):
            await child.until(never, timeout_s=10)


async def test_a_child_that_never_gets_ready_is_given_up(tmp_path: Path) -> None:
    async with Children(tmp_path) as children:
        child = await children.start("engine", SLEEPER)

        async def never() -> None:
            return None

        with pytest.raises(PartFailed, match=r"engine: not ready after 0.1 s"):
            await child.until(never, timeout_s=0.1)


async def test_a_program_that_does_not_exist_is_a_failed_part(tmp_path: Path) -> None:
    async with Children(tmp_path) as children:
        with pytest.raises(PartFailed, match="envoy: cannot be started"):
            await children.start("envoy", ["/nonexistent/envoy"])


async def test_check_finds_the_child_that_ended(tmp_path: Path) -> None:
    async with Children(tmp_path) as children:
        await children.start("sleeper", SLEEPER)
        children.check()
        short = await children.start("short", [sys.executable, "-c", ""])
        with pytest.raises(PartFailed):
            await short.until(lambda: first_line(short.log), timeout_s=10)
        with pytest.raises(PartFailed, match="short: ended with exit code 0"):
            children.check()


def test_free_ports_are_different_and_can_be_bound() -> None:
    ports = free_ports(8)
    assert len(set(ports)) == 8
    for port in ports:
        with socket.socket() as each:
            each.bind(("127.0.0.1", port))


def test_tail_is_the_last_lines_only(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("".join(f"line {i}\n" for i in range(100_000)))
    assert tail(path, 2) == "line 99998\nline 99999"
    assert tail(tmp_path / "absent") == ""


async def test_a_child_that_is_killed_on_purpose_does_not_fail_the_others(tmp_path: Path) -> None:
    async with Children(tmp_path) as children:
        child = await children.start("sleeper", SLEEPER)
        children.release(child)
        await child.kill()
        assert child.exit_code == -signal.SIGKILL
        children.check()
