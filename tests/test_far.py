"""What is written for GPUs, on a device that is not the CPU: everything is where it belongs.

Each test is a process of its own, since the device is registered for good.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", f"from tests import far\nimport sys, torch\n{code}"]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, cwd=ROOT)


def works(code: str, *arguments: str) -> str:
    done = run(code, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("torch.zeros(2, device=far.DEVICE) + torch.zeros(2)", "same device"),
        ("torch.zeros(2, device=far.DEVICE).numpy()", "to numpy"),
        ("torch.mv(torch.zeros(2, 2), torch.zeros(2, device=far.DEVICE))", "same device"),
    ],
)
def test_the_device_is_as_strict_as_a_gpu(code: str, error: str) -> None:
    assert error in run(code).stderr


def test_it_computes_and_gives_back() -> None:
    code = "x = torch.arange(6, device=far.DEVICE).view(2, 3)[:, 1:]\nprint((x * 2).sum(1).cpu())"
    assert works(code) == "tensor([ 6, 18])\n"


def test_serving_there_is_certified() -> None:
    code = """
from ingot.nn import Decoder, preset
from ingot.serve.verify import verify
found = verify(Decoder.new(preset("tiny"), seed=0).to(far.DEVICE), schedules=6)
print(found.bits_equal, found.logprobs > 100, found.accepted_tokens > 0)
"""
    assert works(code) == "True True True\n"


def test_penalties_bias_and_tokens_told_work_there() -> None:
    """What is drawn is what is drawn here."""
    code = """
from ingot.nn import Decoder, preset
from ingot.serve.engine import Engine
from ingot.serve.request import Options, Request
from ingot.serve.scheduler import Limits

def tokens(device):
    engine = Engine(Decoder.new(preset("tiny"), seed=0).to(device), limits=Limits(blocks=16))
    plain = Options(temperature=1.0, seed=3, logprobs=2, prompt_logprobs=1)
    special = Options(temperature=1.0, seed=3, presence_penalty=1.0, repetition_penalty=1.3,
                      bias=((5, 3.0),), logprobs=2, processed=True)
    for id, options in enumerate((plain, special)):
        engine.add(Request(id=id, prompt=(5, 6, 7, 5), max_tokens=6, options=options))
    found = []
    while engine.busy:
        for output in engine.step():
            assert output.error is None, output.error
            found.append((output.id, output.tokens, output.logprobs, output.prompt_logprobs))
    return found

assert tokens(far.DEVICE) == tokens("cpu")
"""
    works(code)
