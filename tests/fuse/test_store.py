"""Outcomes of proofs are kept for the same graph only."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ingot.fuse import proof, store
from ingot.fuse.backend import rewrite_graph
from ingot.fuse.passes import PASSES, Rewrite
from ingot.fuse.report import GraphReport
from ingot.fuse.store import Outcome
from tests.fuse.graphs import capture

LINEAR = next(rewrite for rewrite in PASSES if rewrite.name == "linear")
WRONG = replace(LINEAR, build=lambda b, m: (b.method("neg", LINEAR.build(b, m)[0]),))
X, W = torch.randn(3, 8), torch.randn(8, 8)


def function(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w).sin()


def rewrite(*args: Tensor, passes: Any = (LINEAR,), of: Any = function) -> GraphReport:
    module = fx.GraphModule({}, capture(of, *args))
    return rewrite_graph(module, args, passes, always=True)


@pytest.fixture
def proofs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the graphs that were run to prove them."""
    count: list[int] = []
    run = proof._Prover.prove

    def counted(self: Any, inputs: Any) -> None:
        count.append(1)
        run(self, inputs)

    monkeypatch.setattr(proof._Prover, "prove", counted)
    return count


@pytest.mark.parametrize("of", [LINEAR, WRONG])
def test_the_same_graph_is_proved_once(of: Rewrite, proofs: list[int]) -> None:
    first, second = rewrite(X, W, passes=[of]), rewrite(X + 1, W, passes=[of])
    assert len(proofs) == 1
    assert first == second
    assert dict(second.kept) == ({"linear": 1} if of is LINEAR else {})


def test_another_graph_is_proved_itself(proofs: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    rewrite(X, W)
    rewrite(X, W, passes=[WRONG])  # another replacement
    rewrite(X[:2], W)  # another shape
    rewrite(X, W.t())  # other strides
    rewrite(X.bfloat16(), W.bfloat16())  # another dtype
    rewrite(X, W.clone().requires_grad_())  # with a gradient
    rewrite(X, W, of=lambda x, w: F.linear(x, w).cos())  # another graph
    monkeypatch.setattr(store, "_versions", lambda: "other kernels")
    rewrite(X, W)
    assert len(proofs) == 8


@pytest.mark.parametrize("content", [b"", b"[]", b'[{"error": 0.1}]', b'{"a": 1}'])
def test_an_unusable_file_is_proved_again(
    content: bytes, proofs: list[int], tmp_path: Path
) -> None:
    rewrite(X, W)
    (file,) = (tmp_path / "proofs").iterdir()
    file.write_bytes(content)
    assert dict(rewrite(X, W).kept) == {"linear": 1}
    assert len(proofs) == 2


def test_invalid_inputs_leave_nothing(tmp_path: Path) -> None:
    module = fx.GraphModule({}, capture(lambda t, w: F.embedding(t, w), torch.tensor([0, 1]), W))
    report = rewrite_graph(module, (torch.tensor([0, 99]), W), PASSES, always=True)
    assert [row.name for row in report.dropped] == ["embedding"]
    assert not (tmp_path / "proofs").exists()


def test_old_files_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MAX_FILES", 3)
    outcomes = [Outcome(0.1, None)]
    for i in range(5):
        store.save(str(i), outcomes)
        seconds = time.time() + i - 100
        os.utime(tmp_path / "proofs" / f"{i}.json", (seconds, seconds))
    store.save("new", outcomes)
    assert {file.stem for file in (tmp_path / "proofs").iterdir()} == {"3", "4", "new"}
    os.utime(tmp_path / "proofs" / "4.json", (0, 0))
    store.save("new", outcomes)
    assert store.load("new", 1) == outcomes
    assert store.load("4", 1) is None


def test_nothing_is_kept_where_caches_are_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config

    monkeypatch.undo()
    assert str(store._path("a")).endswith("ingot/a.json")
    with config.patch(force_disable_caches=True):
        assert store._path("a") is None
