"""Another vLLM's Python files over the installed one's compiled libraries: a newer release without its GPU stack.

`python overlay.py DIRECTORY`, by the interpreter of the venv with vLLM. DIRECTORY holds the newer wheel, which is
unpacked there and deleted; on PYTHONPATH, the directory then comes before the installed vLLM.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
import zipfile
from pathlib import Path

_WANTED = (".py", ".json", ".jinja")


def lay(directory: Path) -> None:
    [wheel] = directory.glob("vllm-*.whl")
    with zipfile.ZipFile(wheel) as files:
        files.extractall(directory, [name for name in files.namelist() if name.endswith(_WANTED)])
    found = importlib.util.find_spec("vllm")
    assert found is not None
    assert found.submodule_search_locations is not None
    for library in Path(found.submodule_search_locations[0]).glob("*.so"):
        shutil.copy(library, directory / "vllm")
    wheel.unlink()


if __name__ == "__main__":
    lay(Path(sys.argv[1]))
