"""One thread a test process, and the count of what the records generated."""

from __future__ import annotations

import pytest
import torch

GENERATED = "tests/ops/test_records.py"

torch.set_num_threads(1)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    ran = [
        report
        for outcome in ("passed", "failed")
        for report in terminalreporter.stats.get(outcome, [])
        if report.nodeid.startswith(GENERATED)
    ]
    if ran:
        terminalreporter.write_line(f"generated from the op records: {len(ran)} cases")
