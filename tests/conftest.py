"""One thread a test process, a real model, and the counts of what was generated."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from tests import models

GENERATED = "tests/ops/test_records.py"
# Importing them registers a device for good, which `--doctest-modules` would do in every process.
collect_ignore = ["fake_device.py", "serving/on_fake_device.py"]

torch.set_num_threads(1)
# The first call of an op builds its kernels, and machines that test are busy.
settings.register_profile("ingot", deadline=None)
settings.load_profile("ingot")
# A shell that runs tests in the background has them, and what they start, ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    return models.smollm2_gguf()


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return models.smollm2()


@pytest.fixture(scope="session")
def minilm() -> Path:
    return models.minilm()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    ran = [
        report
        for outcome in ("passed", "failed")
        for report in terminalreporter.stats.get(outcome, [])
    ]
    cases = [report for report in ran if report.nodeid.startswith(GENERATED)]
    if cases:
        terminalreporter.write_line(f"generated from the op records: {len(cases)} cases")
    # Each test says how many it tried: see `explore` in tests/kernels/conftest.py.
    for kind in ("schedules", "strange calls"):
        tried = sum(
            count for report in ran for name, count in report.user_properties if name == kind
        )
        if tried:
            terminalreporter.write_line(f"{kind} tried on the CPU kernels: {tried}")
    for kind in ("strange frames", "strange requests"):
        tried = sum(
            count for report in ran for name, count in report.user_properties if name == kind
        )
        if tried:
            terminalreporter.write_line(f"{kind} sent to the server: {tried}, none led to a crash")
