"""An exported model runs in a process that has ingot, but not the source of the model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ingot.fuse.export import export
from ingot.fuse.report import recent
from tests.fuse import hf_models

LOAD = """
import sys
sys.modules["transformers"] = sys.modules["tests"] = None
import torch
import ingot.ops
inputs, others, expected = torch.load("calls.pt")
{load}
for args, (name, value) in zip((inputs, others), expected):
    torch.testing.assert_close(model(**args)[name], value, atol=1e-4, rtol=1e-4)
print(sorted(model(**inputs)))
"""
PROGRAM = "model = torch.export.load('model.pt2').module()"
PACKAGE = "model = torch._inductor.aoti_load_package('package.pt2')"


class Gated(nn.Module):
    """Two arguments, of which one is not of floating point."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(11, 8), nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, gate: Tensor, tokens: Tensor) -> dict[str, Tensor]:
        y = nn.functional.silu(self.linear(self.norm(self.table(tokens))))
        return {"y": y * gate[:, None]}


def run(directory: Path, load: str) -> str:
    """Load a file in a new process, call it, and return what that prints."""
    process = subprocess.run(
        [sys.executable, "-c", LOAD.format(load=load)],
        cwd=directory,
        env={"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.strip()


def prepare(name: str, directory: Path) -> torch.export.ExportedProgram:
    """Export a model, and save calls with their results."""
    torch._dynamo.reset()
    if name == "gated":
        model, calls = Gated(), []
        for batch, length in ((3, 5), (2, 7)):
            tokens = torch.randint(0, 11, (batch, length))
            calls.append({"gate": torch.randn(batch, 8), "tokens": tokens})
        key = "y"
    else:
        model = hf_models.build(name)
        calls = [hf_models.inputs(name, *shape) for shape in ((3, 11), (2, 7))]
        key = "logits"
    with torch.no_grad():
        expected = [(key, model(**call)[key]) for call in calls]
    torch.save((*calls, expected), directory / "calls.pt")
    return export(model, calls[0])


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*side effects.*:UserWarning")
@pytest.mark.parametrize(
    "name", ["gated", *(pytest.param(n, marks=pytest.mark.slow) for n in ("llama", "whisper"))]
)
def test_a_program_runs_without_the_source(name: str, tmp_path: Path) -> None:
    program = prepare(name, tmp_path)
    assert recent()[-1].kept
    assert any("ingot" in str(node.target) for node in program.graph.nodes)
    torch.export.save(program, tmp_path / "model.pt2")
    assert run(tmp_path, PROGRAM) == ("['y']" if name == "gated" else "['logits']")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*side effects.*:UserWarning")
@pytest.mark.parametrize("name", ["gated", "llama"])
def test_a_package_of_aotinductor_runs_without_the_source(name: str, tmp_path: Path) -> None:
    program = prepare(name, tmp_path)
    torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "package.pt2"))
    assert run(tmp_path, PACKAGE) == ("['y']" if name == "gated" else "['logits']")
