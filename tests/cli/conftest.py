"""Runs the real command in a process of its own, with a cache of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import tokenizers

from ingot.interop import hf
from ingot.nn import Decoder, preset

Run = Callable[..., subprocess.CompletedProcess[str]]
COMMAND = str(Path(sys.executable).parent / "ingot")
# The kernels that are built already, and a thread: tests run beside each other.
READY = {"XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", ""), "OMP_NUM_THREADS": "1"}
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<answer>"


@pytest.fixture
def ingot(tmp_path: Path) -> Run:
    def run(
        *arguments: str, stdin: str | None = None, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "COLUMNS": "80", **variables}
        environment = {name: value for name, value in environment.items() if value}
        return subprocess.run(
            [COMMAND, *arguments],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            input=stdin,
        )

    return run


@pytest.fixture
def ready(ingot: Run) -> Run:
    """The command with the kernels that are built already."""
    return partial(ingot, **READY)


@pytest.fixture
def environment() -> dict[str, str]:
    """For a process with the kernels that are built already."""
    return {name: value for name, value in {**os.environ, **READY}.items() if value}


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A model of random weights that has a token for each byte, and chats."""
    directory = tmp_path / "tiny"
    hf.save(Decoder.new(preset("tiny"), seed=0), directory)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[])
    )
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.save(str(directory / "tokenizer.json"))
    settings = {"chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory
