"""The demo from start to end: prepare the traffic, run it round-robin and through the picker, judge, report, clean up.

The round-robin run comes first and on a fleet of its own, so both policies start with cold caches and the picker's
fleet is the one that `--keep` leaves behind. The sequential phase follows the concurrent one on the same fleet, whose
HBM is full by then and whose CPU RAM holds what was pushed out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
from rich.console import Console
from tokenizers import Tokenizer

from epp.toolbox.demo import model
from epp.toolbox.demo.chaos import figures as chaos_figures
from epp.toolbox.demo.chaos import report as chaos_report
from epp.toolbox.demo.chaos.run import chaos
from epp.toolbox.demo.drive import Call, Client, run_moves, run_plan
from epp.toolbox.demo.figures import Report, Traffic, as_json, predictions, traffic
from epp.toolbox.demo.keep import curl_lines
from epp.toolbox.demo.moves import Move, exact_moves
from epp.toolbox.demo.report import show
from epp.toolbox.demo.screen import Screen
from epp.toolbox.demo.sizes import BLOCK_SIZE, BLOCKS_PER_CHUNK, Sizes, sizes
from epp.toolbox.demo.stacks import PickerStack, Stack, picker_stack, round_robin_stack
from epp.toolbox.demo.traffic import History, Plan, distinct_tokens, final_histories, plan
from epp.toolbox.demo.verdicts import Judgement, Prediction, judge
from epp.toolbox.processes import PartFailed

T = TypeVar("T")

EXACT_MOVES = 100
SPARE_DECISIONS = 256
"""Kept by the picker beyond what the phases need: what is tried by hand under `--keep`."""
WATCH_S = 0.5
PART_FAILED, INTERRUPTED = 2, 130


def demo(arguments: argparse.Namespace) -> int:
    """Exit code: 0 passed, 1 not passed, 2 a part failed, 130 interrupted."""
    screen = Screen(plain=arguments.json is not None)
    try:
        return asyncio.run(_demo(arguments, screen))
    except PartFailed as error:
        screen.say("[red]The demo stopped.")
        screen.quote(str(error))
        return PART_FAILED
    except (KeyboardInterrupt, asyncio.CancelledError):
        screen.say("Interrupted; everything that was started is stopped.")
        return INTERRUPTED


@dataclass(frozen=True, slots=True)
class Workload:
    """What is sent, and the fleet it is sent to."""

    plan: Plan
    moves: Sequence[Move]
    sizes: Sizes
    model_directory: Path
    tokenizer: Tokenizer

    def judge(self, calls: Sequence[Call], known: Mapping[str, Prediction]) -> list[Judgement]:
        def tokens(call: Call) -> Sequence[int]:
            return _token_ids(self.tokenizer, [call.prompt])[0]

        return judge(calls, known, tokens, BLOCKS_PER_CHUNK * BLOCK_SIZE)


def prepare(directory: Path, seed: int, seconds: float, engines: int) -> Workload:
    tokenizer = model.write_model(directory)
    chosen = plan(seed, seconds)
    prompts = _token_ids(tokenizer, [history.rendered() for history in final_histories(chosen)])
    working_set = distinct_tokens(prompts, BLOCK_SIZE)
    fleet = sizes(engines, working_set, max(map(len, prompts)))
    return Workload(chosen, exact_moves(seed, EXACT_MOVES, chosen.sessions), fleet, directory, tokenizer)


def _token_ids(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    return [encoding.ids for encoding in tokenizer.encode_batch(list(texts), add_special_tokens=False)]


async def _demo(arguments: argparse.Namespace, screen: Screen) -> int:
    _end_on_sigterm()
    return await (_chaos if arguments.chaos else _comparison)(arguments, screen)


async def _chaos(arguments: argparse.Namespace, screen: Screen) -> int:
    report = await chaos(arguments, screen)
    _emit(arguments.json, chaos_figures.as_json(report), lambda console: chaos_report.show(report, console))
    return 0 if report.passed else 1


async def _comparison(arguments: argparse.Namespace, screen: Screen) -> int:
    with tempfile.TemporaryDirectory(prefix="tierpick-demo-") as directory:
        root = Path(directory)
        workload = prepare(root / "model", arguments.seed, arguments.seconds, arguments.engines)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as http:
            return await _phases(arguments, screen, root, workload, http)


def _end_on_sigterm() -> None:
    """SIGTERM ends the demo as Ctrl-C does: in order, with everything stopped."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)


async def _phases(
    arguments: argparse.Namespace, screen: Screen, root: Path, workload: Workload, http: aiohttp.ClientSession
) -> int:
    screen.say(f"Starting {arguments.engines} simulated engines and Envoy, round-robin …")
    async with round_robin_stack(root / "round-robin", http, workload.sizes, workload.model_directory) as stack:
        _, _, round_robin = await _concurrent(stack, workload, screen, "round-robin")
    screen.say(f"Starting {arguments.engines} fresh engines, the picker and Envoy …")
    decisions = workload.plan.requests + len(workload.moves) + SPARE_DECISIONS
    async with picker_stack(root / "tierpick", http, workload.sizes, workload.model_directory, decisions) as stack:
        report = await _picker_phases(arguments.seed, stack, workload, screen, round_robin)
        _emit(arguments.json, as_json(report), lambda console: show(report, console))
        if not report.passed:
            screen.quote(stack.logs())
        if arguments.keep:
            await _keep(stack, screen)
    return 0 if report.passed else 1


async def _picker_phases(
    seed: int, stack: PickerStack, workload: Workload, screen: Screen, baseline: Traffic
) -> Report:
    histories, calls, tierpick = await _concurrent(stack, workload, screen, "tierpick")
    _, exact_calls, exact_traffic = await _exact(stack, workload, histories, screen)
    known = await stack.predictions()
    return Report(
        seed=seed,
        sizes=workload.sizes,
        round_robin=baseline,
        tierpick=tierpick,
        concurrent=predictions(workload.judge(calls, known)),
        exact_traffic=exact_traffic,
        exact=predictions(workload.judge(exact_calls, known)),
    )


async def _concurrent(
    stack: Stack, workload: Workload, screen: Screen, label: str
) -> tuple[dict[str, History], list[Call], Traffic]:
    async def work(client: Client) -> dict[str, History]:
        return await run_plan(client, workload.plan, label)

    return await _measured(stack, work, screen, f"concurrent, {label}", workload.plan.requests)


async def _exact(
    stack: PickerStack, workload: Workload, histories: Mapping[str, History], screen: Screen
) -> tuple[None, list[Call], Traffic]:
    async def work(client: Client) -> None:
        await run_moves(client, workload.moves, histories, "exact", stack.until_quiet)

    return await _measured(stack, work, screen, "one request after another", len(workload.moves))


async def _measured(
    stack: Stack, work: Callable[[Client], Awaitable[T]], screen: Screen, title: str, requests: int
) -> tuple[T, list[Call], Traffic]:
    """Run one phase of `requests` requests; what it came to, its calls, and what the engines counted meanwhile."""
    before = await stack.counters()
    with screen.phase(title, requests) as on_done:
        client = stack.client(on_done)
        result = await _while_all_run(stack, work(client))
    after = await stack.counters()
    return result, client.calls, traffic(client.calls, {name: after[name] - before[name] for name in after})


async def _while_all_run(stack: Stack, work: Awaitable[T]) -> T:
    """Raises `PartFailed` as soon as a process of the stack ends."""
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=WATCH_S)
            stack.check()
    finally:
        task.cancel()
        await asyncio.wait({task})
    return task.result()


def _emit(file: str | None, figures: Mapping[str, Any], show: Callable[[Console], None]) -> None:
    if file is None:
        show(Console())
        return
    text = json.dumps(figures, indent=1) + "\n"
    if file == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        Path(file).write_text(text)


async def _keep(stack: PickerStack, screen: Screen) -> None:
    screen.quote(curl_lines(stack.base_url, stack.metrics_url))
    try:
        while True:
            await asyncio.sleep(WATCH_S)
            stack.check()
    except asyncio.CancelledError:
        screen.say("Stopping …")
