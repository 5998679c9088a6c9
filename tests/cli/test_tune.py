from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="GPU kernels need Triton, if only to be compiled")

from ingot.bench import cpu_tuning
from ingot.cli import tune as command
from ingot.core import log
from ingot.core.device import detect
from ingot.core.errors import IngotError, UnknownName
from ingot.kernels import triton as package
from ingot.kernels import tuned
from ingot.kernels.cpu import tuning
from ingot.kernels.triton import autotune, config_store
from ingot.kernels.triton.autotune import TuneResult, TuneTask
from ingot.kernels.triton.launch import KernelConfig
from ingot.kernels.triton.target import TARGETS

Run = Callable[..., subprocess.CompletedProcess[str]]
PREVIOUS, FASTEST = KernelConfig.of(4), KernelConfig.of(8)


@pytest.fixture(autouse=True)
def _own_console() -> Iterator[None]:
    """Other tests have a console of another width."""
    log.stdout.cache_clear()
    yield
    log.stdout.cache_clear()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_error_without_a_gpu_has_a_hint(ready: Run) -> None:
    result = ready("tune", "silu", "--device", "gpu")
    assert result.returncode == 2
    assert "error: " in result.stderr
    assert "GPU" in result.stderr
    assert "hint: " in result.stderr


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mock a GPU and the results of tuning."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(command, "resolve", lambda device: None)
    monkeypatch.setattr(config_store, "current_target", lambda: (TARGETS["sm_90"], "H100"))

    def tune(task: TuneTask, timer: Any, device: str) -> TuneResult:
        backward = task.sites[0].direction == "backward"
        return TuneResult(
            name=task.name,
            config=None if backward else FASTEST,
            seconds=math.nan if backward else 2e-6,
            previous=PREVIOUS,
            previous_seconds=math.nan if backward else 3e-6,
            num_tried=3,
            rejected=("num_warps=2 num_stages=1: error is 7.00 times the tolerance",),
        )

    monkeypatch.setattr(autotune, "tune", tune)


@pytest.mark.usefixtures("gpu")
def test_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    command.tune(("silu",), device="gpu")
    first, second, *_, last = capsys.readouterr().out.splitlines()[3:]
    assert first.split() == [
        *("silu.forward.activation", "num_warps=8", "num_stages=1", "2.0"),
        *("num_warps=4", "num_stages=1", "3.0", "1.50x", "3", "1"),
    ]
    assert "none accurate" in second
    assert last.startswith("stored for H100 in ")


@pytest.mark.usefixtures("gpu")
def test_json_rows(capsys: pytest.CaptureFixture[str]) -> None:
    command.tune(("silu",), device="gpu", json=True)
    forward, backward = json.loads(capsys.readouterr().out)
    assert (forward["config"], forward["us"], forward["previous_us"]) == (
        "num_warps=8 num_stages=1",
        2.0,
        3,
    )
    assert (backward["config"], backward["us"]) == (None, None)
    assert len(forward["rejected"]) == 1


@pytest.mark.usefixtures("gpu")
def test_unknown_op_is_an_error() -> None:
    with pytest.raises(UnknownName, match="silo"):
        command.tune(("silo",), device="gpu")


@pytest.mark.usefixtures("gpu")
def test_tuning_in_the_interpreter_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(IngotError, match="TRITON_INTERPRET"):
        command.tune(device="gpu")


@pytest.mark.usefixtures("gpu")
def test_error_without_triton_has_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package, "find_spec", lambda name: None)
    with pytest.raises(IngotError, match="not installed"):
        command.tune(device="gpu")


@pytest.fixture
def cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty database, and two workloads of each group, timed briefly."""
    pytest.importorskip("optuna")
    workloads = cpu_tuning.workloads
    monkeypatch.setattr(tuned, "database_path", lambda: tmp_path / "tuned.db")
    monkeypatch.setattr(cpu_tuning, "workloads", lambda group: workloads(group)[:2])
    monkeypatch.setattr(cpu_tuning.Bench.__init__, "__defaults__", (0.01,))
    yield
    tuning._load_stored.cache_clear()


@pytest.mark.usefixtures("cpu")
@pytest.mark.skipif(detect().compiler is None, reason="no C++ compiler")
def test_the_cpu_is_tuned_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    command.tune(("tasks",), trials=3, json=True)
    (row,) = json.loads(capsys.readouterr().out)
    assert row["group"] == "tasks"
    assert 1 <= row["trials"] <= 3
    assert row["worst"] <= row["speedup"] <= row["best"]
    assert tuning.stored("tasks").items() >= row["changed"].items()


@pytest.mark.usefixtures("cpu")
@pytest.mark.skipif(detect().compiler is None, reason="no C++ compiler")
def test_table_of_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    command.tune(("tasks",), device="cpu", trials=1)
    out = capsys.readouterr().out
    assert "tasks" in out
    assert "stored in" in out


@pytest.mark.usefixtures("cpu")
def test_mistakes_are_errors() -> None:
    with pytest.raises(UnknownName, match="matmull"):
        command.tune(("matmull",), device="cpu")
    with pytest.raises(IngotError, match="at least 1, got 0"):
        command.tune(device="cpu", trials=0)
    with pytest.raises(IngotError, match="cannot read tuned configurations"):
        command.tune(import_=Path("missing.json"))


@pytest.mark.usefixtures("cpu")
def test_what_was_found_is_exported_and_imported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tuning.save("tasks", {"tasks_per_thread": 8}, 0.9)
    command.tune(export=tmp_path / "tuned.json")
    (tmp_path / "tuned.db").unlink()
    command.tune(import_=tmp_path / "tuned.json")
    assert tuning.stored("tasks") == {"tasks_per_thread": 8}
    assert capsys.readouterr().out.count("1 configurations") == 2
