"""Fleets of real engines, one at a time, and what is proven on them: a line each at the end, and vllm-report.json."""

from __future__ import annotations

import os
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from epp.toolbox.processes import Children

from ..envoy.chain import Reply
from .engines import Engine, Kind
from .fleet import Fleet, running
from .report import Report
from .tiny_model import write_tiny_qwen3

ROOT = Path(__file__).parents[2]
REQUIRED = "VLLM_PYTHON"
"""The interpreter of the venv with vLLM. Where it is named, its absence is a failure."""

session = pytest_asyncio.fixture(scope="session", loop_scope="session")


@pytest.fixture(scope="session")
def python():
    named = os.environ.get(REQUIRED)
    python = Path(named or ROOT / ".venv-vllm/bin/python")
    if python.exists():
        return python
    if named:
        pytest.fail(f"{REQUIRED}: there is no {python}")
    return pytest.skip("no vLLM: `make .venv-vllm/.ready` installs it, `make test-vllm` runs these")


@session
async def http():
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        yield session


@session
async def fleet(request, python, http, tmp_path_factory):
    """Of the test's kind. Shared by all tests of that kind, which come one after another."""
    directory = tmp_path_factory.mktemp("fleet")
    async with running(request.param, python, directory, http) as fleet:
        yield fleet


@session
async def plainly_answered(python, http, tmp_path_factory):
    """What an engine without offloading answers: `await plainly_answered(ask)`."""
    directory = tmp_path_factory.mktemp("plain")
    write_tiny_qwen3(directory / "model")
    async with Children(directory) as children:
        engine = Engine(children, python, Kind("plain"), "plain", directory)
        await engine.start(http)

        async def answered(ask):
            async with http.post(engine.url + ask.path, json=ask.body) as response:
                return Reply("", response.status, response.headers, await response.read()).text

        yield answered


@pytest.fixture(scope="session")
def report(request):
    return request.config.stash[_REPORT]


_REPORT = pytest.StashKey[Report]()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    config.stash[_REPORT] = Report()
    items.sort(key=_fleet_order)


def _fleet_order(item):
    """Tests of one fleet together, whatever file they are in; tests of other directories keep their place."""
    callspec = getattr(item, "callspec", None)
    kind = callspec.params.get("fleet") if callspec else None
    return str(kind) if kind else ""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    fleet = getattr(item, "funcargs", {}).get("fleet")
    if report.failed and isinstance(fleet, Fleet):
        report.sections.append(("logs of the fleet", fleet.tails()))
    return report


def pytest_terminal_summary(terminalreporter, config):
    report = config.stash.get(_REPORT, None)
    if report is None or not report.proofs:
        return
    terminalreporter.section("proven on a real vLLM")
    for proof in report.proofs:
        terminalreporter.write_line(str(proof))
    report.write(config.rootpath / "vllm-report.json")
