"""Checkpoints: bitwise, of the moment of the call, and ignored unless they are intact."""

from __future__ import annotations

import errno
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from ingot.core.errors import IngotError
from ingot.training import checkpoint as module
from ingot.training.checkpoint import NAME, CheckpointError, Checkpoints


def save(kept: Checkpoints, step: int, loss: float | None = None) -> None:
    weights = {"w": torch.full((3, 2), float(step)), "step": torch.tensor(float(step))}
    rng = {"state": torch.arange(5, dtype=torch.uint8)}
    kept.save(step, {"weights": weights, "rng": rng}, {"sample": step * 10}, loss)
    kept.wait()


def test_a_checkpoint_is_read_back_bitwise(tmp_path: Path) -> None:
    tensors = {
        "a.b|mean": torch.tensor([float("nan"), -0.0, 1e-45]),
        "half": torch.randn(3, 5).bfloat16(),
        "strided": torch.randn(4, 6).T,
        "count": torch.tensor(7, dtype=torch.int64),
        "double": torch.randn(2, dtype=torch.float64),
        "empty": torch.empty(0, 3),
    }
    kept = Checkpoints(tmp_path, keep=1)
    kept.save(3, {"x": tensors, "xy": {"other": torch.ones(1)}}, {"guard": {"losses": [0.1]}})
    found = kept.latest()
    assert found is not None
    assert (found.step, found.metadata) == (3, {"guard": {"losses": [0.1]}})
    read = found.tensors("x")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert read[name].shape == tensor.shape
        bits = [t.contiguous().view(-1).view(torch.uint8) for t in (read[name], tensor)]
        assert torch.equal(*bits), name


def test_values_are_those_of_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the write is delayed, the run continues and changes both tensors and metadata."""
    go, write = threading.Event(), module.write

    def slow(*args: Any) -> None:
        assert go.wait(10)
        write(*args)

    monkeypatch.setattr(module, "write", slow)
    kept, tensor, metadata = Checkpoints(tmp_path, keep=1), torch.zeros(4), {"losses": [1.0]}
    kept.save(1, {"w": {"w": tensor}}, metadata)
    tensor += 1
    metadata["losses"].append(2.0)
    go.set()
    found = kept.latest()
    assert found is not None
    assert found.tensors("w")["w"].tolist() == [0.0] * 4
    assert found.metadata == {"losses": [1.0]}


@pytest.mark.parametrize("damage", ["cut", "flip", "missing", "no json", "half json", "extra"])
def test_a_torn_one_is_passed_over(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    kept = Checkpoints(tmp_path, keep=3)
    save(kept, 1)
    save(kept, 2)
    newest = kept.latest()
    assert newest is not None
    assert newest.step == 2
    file = newest.path / "model.safetensors"
    match damage:
        case "cut":
            file.write_bytes(file.read_bytes()[:-1])
        case "flip":
            content = bytearray(file.read_bytes())
            content[-1] ^= 1
            file.write_bytes(content)
        case "missing":
            file.unlink()
        case "no json":
            (newest.path / NAME).unlink()
        case "half json":
            (newest.path / NAME).write_text((newest.path / NAME).read_text()[:40])
        case _:
            (newest.path / "other").touch()
    found = kept.latest()
    assert found is not None
    assert found.step == 1
    assert "skipped corrupt checkpoint" in caplog.text
    kept.quarantine_after(found.step)
    assert not newest.path.exists()
    save(kept, 2)
    assert (again := kept.latest()) is not None
    assert again.step == 2


def test_none_is_none(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "missing", keep=1).latest() is None


def test_the_last_few_and_the_best_are_kept(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path, keep=2)
    for step, loss in [(1, 3.0), (2, 1.0), (3, None), (4, 2.0), (5, 1.5)]:
        save(kept, step, loss)
    assert sorted(path.name[-1] for path in tmp_path.iterdir()) == ["2", "4", "5"]


def test_a_full_disk_is_an_error_and_keeps_earlier_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Checkpoints(tmp_path, keep=1)
    save(kept, 1)

    def full(*args: Any) -> None:
        (args[0] / "model.safetensors").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "write", full)
    kept.save(2, {"w": {"w": torch.zeros(1)}}, {})
    with pytest.raises(IngotError, match="No space left") as raised:
        kept.wait()
    assert "make room" in raised.value.hint
    kept.raise_pending_error()  # it is raised only once
    found = kept.latest()
    assert found is not None
    assert found.step == 1
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_leftovers_of_a_killed_process_are_deleted(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path, keep=1)
    save(kept, 1)
    (tmp_path / ".step-00000002.0123.tmp").mkdir()
    found = kept.latest()
    assert found is not None
    kept.quarantine_after(found.step)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    kept.quarantine_after(0)
    assert [path.name[:16] for path in tmp_path.iterdir()] == ["corrupt-00000001"]


def test_another_format_is_passed_over(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path, keep=1)
    save(kept, 1)
    path = tmp_path / "step-00000001" / NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 2}))
    assert kept.latest() is None


def saved_rows(directory: Path, parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    kept = Checkpoints(directory, keep=1)
    kept.save(1, {"weights": parts}, {})
    latest = kept.latest()
    assert latest is not None
    return latest.tensors("weights")


def test_rows_of_several_ranks_are_joined_in_their_order(tmp_path: Path) -> None:
    w = torch.arange(12.0).view(6, 2)
    parts = {"w[4:6]": w[4:], "w[0:1]": w[:1], "w[1:4]": w[1:4], "w[6:6]": w[6:], "step": w[0, 1]}
    found = saved_rows(tmp_path, parts)
    assert found.keys() == {"w", "step"}
    assert torch.equal(found["w"], w)
    assert found["step"].shape == ()


@pytest.mark.parametrize(
    "names",
    [
        ("w[0:1]", "w"),
        ("w[0:1]", "w[3:5]"),
        ("w[0:2]", "w[1:3]"),
        ("w[1:2]", "w[2:4]"),
        ("w[0:1]", "w[1:9999999999]"),
    ],
)
def test_rows_that_are_missing_or_claimed_twice_are_an_error(
    tmp_path: Path, names: tuple[str, str]
) -> None:
    parts = {names[0]: torch.ones(1, 2), names[1]: torch.ones(2, 2)}
    with pytest.raises(CheckpointError, match="rows of 'weights/w' are missing"):
        saved_rows(tmp_path, parts)
