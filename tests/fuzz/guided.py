"""The same targets under atheris, which looks for inputs that reach new code. It is not among the project's
dependencies: `pip install atheris`, where it has a wheel for the Python in use."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType

from tests.fuzz.engine import make_script
from tests.fuzz.target import Script, Target
from tests.fuzz.trial import Watch, attempt

_BETWEEN = b"\xfe\xfdNEXT"
"""Between two pieces of a script."""
_FIRST = 500
"""Inputs to begin with."""
_LOOKED_AT = ("epp", "indexer", "connector")


def split(data: bytes) -> Script:
    return tuple(data.split(_BETWEEN))


def join(script: Script) -> bytes:
    return _BETWEEN.join(script)


def run(name: str, factory: type[Target], *, seed: int, inputs: int, folder: Path) -> int:
    """Ends the process itself: after so many inputs, or at the first finding. `folder` keeps what reached new code, for
    the next run."""
    import atheris

    target, watch = factory(), Watch()
    for function in set(_functions()):
        atheris.instrument_func(function)

    def one(data: bytes) -> None:
        finding = attempt(name, target, split(data), watch).finding
        if finding is not None:
            raise AssertionError(f"{finding.what}\n{finding.script!r}\n{finding.detail}")

    corpus = folder / f"corpus-{name}"
    corpus.mkdir(parents=True, exist_ok=True)
    for number in range(_FIRST):
        (corpus / f"first-{number}").write_bytes(join(make_script(target, seed, name, number)))
    options = [f"-atheris_runs={inputs}", f"-seed={seed}", "-max_len=20000", "-timeout=30"]
    atheris.Setup([sys.argv[0], *options, str(corpus)], one)
    atheris.Fuzz()
    return 0


def _functions() -> Iterator[FunctionType]:
    """Those of the packages, as far as they are imported."""
    modules = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] in _LOOKED_AT]
    for module in modules:
        for _, member in inspect.getmembers(module):
            if inspect.isfunction(member):
                yield member
            elif inspect.isclass(member) and member.__module__ == module.__name__:
                yield from (function for _, function in inspect.getmembers(member, inspect.isfunction))
