"""The threads that all CPU kernels share: `ingot/kernels/cpu/threads.h`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch

from ingot import ops
from ingot.core.device import detect

pytestmark = pytest.mark.skipif(detect().compiler is None, reason="no C++ compiler")

RANDOM = torch.Generator().manual_seed(0)
X = torch.randn(3, 256, generator=RANDOM)
WEIGHT = torch.randn(700, 256, generator=RANDOM)


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_callers_at_the_same_time_do_not_disturb_each_other() -> None:
    expected, wrong = ops.linear(X, WEIGHT), []

    def call() -> None:
        wrong.extend(i for i in range(300) if not torch.equal(ops.linear(X, WEIGHT), expected))

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


def test_thousands_of_short_jobs_end() -> None:
    x = torch.ones(40_000)
    expected = ops.silu(x)
    assert all(torch.equal(ops.silu(x), expected) for _ in range(5000))


def test_a_forked_process_has_threads_of_its_own() -> None:
    expected = ops.linear(X, WEIGHT)
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        same = all(torch.equal(ops.linear(X, WEIGHT), expected) for _ in range(20))
        os._exit(0 if same else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_there_are_as_many_threads_as_torch_says(threads: int) -> None:
    code = f"""
import os, torch
from ingot import ops
torch.set_num_threads({threads})
before = len(os.listdir("/proc/self/task"))
ops.silu(torch.ones(4_000_000))
print(len(os.listdir("/proc/self/task")) - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) == threads - 1


def test_a_signal_reaches_python() -> None:
    """The workers leave signals to Python's threads, whose sleep they interrupt."""
    ops.linear(X, WEIGHT)
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
    try:
        for _ in range(20):
            os.kill(os.getpid(), signal.SIGUSR1)
        assert len(heard) == 20
    finally:
        signal.signal(signal.SIGUSR1, before)
