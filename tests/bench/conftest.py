"""Systems that are real processes and speak the protocol, or break it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ingot.bench.peers import System
from tests import models

TALK = Path(__file__).parents[2] / "benchmarks/peers/talk.py"
SCRIPT = """
import os, signal, subprocess, sys, time
from peers.talk import Peer, serve

def load(model):
    {load}
    return Peer("1.0", "bf16", generate)

def generate(prompts, new):
    {generate}
    return 0.001, [[prompt[0] + i for i in range(new)] for prompt in prompts]

serve(load)
"""
TensorMaker = Callable[..., System]


@pytest.fixture
def make(tmp_path: Path) -> TensorMaker:
    """Makes a system that counts upwards from the first token of a prompt.

    `load` and `generate` are statements it runs before it does its work.
    """
    folder = tmp_path / "scripts" / "peers"
    folder.mkdir(parents=True)
    shutil.copy(TALK, folder)

    def system(name: str, load: str = "pass", generate: str = "pass") -> System:
        (folder / f"{name}.py").write_text(SCRIPT.format(load=load, generate=generate))
        return System(name=name, python=Path(sys.executable), folder=folder)

    return system


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights with a long context."""
    return models.small(tmp_path_factory.mktemp("models") / "small", max_seq_len=4096)


@pytest.fixture(scope="session")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A very small GPT-2 of random weights."""
    return models.gpt2(tmp_path_factory.mktemp("models") / "gpt2")
