"""Systems that are real processes and speak the protocol, or violate it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ingot.bench.compare import GenerationSystem
from tests import models

PROTOCOL = Path(__file__).parents[2] / "benchmarks/peers/protocol.py"
SCRIPT = """
import os, signal, subprocess, sys, time
from peers.protocol import LoadedModel, serve

def load(model):
    {load}
    return LoadedModel("1.0", "bf16", generate)

def generate(prompts, output_len):
    {generate}
    return 0.001, [[prompt[0] + i for i in range(output_len)] for prompt in prompts]

serve(load)
"""
Make = Callable[..., GenerationSystem]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Return a function that makes a system which counts upwards from the first token of a prompt.

    `load` and `generate` are statements that the system runs first.
    """
    folder = tmp_path / "scripts" / "peers"
    folder.mkdir(parents=True)
    shutil.copy(PROTOCOL, folder)

    def system(name: str, load: str = "pass", generate: str = "pass") -> GenerationSystem:
        (folder / f"{name}.py").write_text(SCRIPT.format(load=load, generate=generate))
        return GenerationSystem(name=name, python=Path(sys.executable), folder=folder)

    return system


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights with a long context."""
    return models.small(tmp_path_factory.mktemp("models") / "small", max_seq_len=4096)


@pytest.fixture(scope="session")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A very small GPT-2 of random weights."""
    return models.gpt2(tmp_path_factory.mktemp("models") / "gpt2")
