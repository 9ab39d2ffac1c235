from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from epp.toolbox.demo.model import write_model


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_model(directory)
    return directory


@pytest.fixture(scope="session")
def tokenizer(model_directory: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_directory / "tokenizer.json"))
