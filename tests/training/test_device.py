"""Runs on an accelerator, the fake one: the same losses as on the CPU, and few synchronizations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.test_fake_device import run_script

COMMON = """
import json
from pathlib import Path
from ingot.nn import CNNConfig
from ingot.observe.metrics import read
from ingot.training.mixup import MixupConfig
from ingot.training.optimizer import LionConfig, MuonConfig, SGDConfig
from ingot.training.precision import Precision
from ingot.training.trainer import Trainer
from tests.training import runs

path, number = Path(sys.argv[1]), int(sys.argv[2])
cnn = CNNConfig(widths=(4, 8), num_classes=10, dropout=0.1)
recipes = [
    lambda **more: runs.digits(cnn, mixup=MixupConfig(kind="cutmix"), ema_decay=0.9, **more),
    lambda **more: runs.text(path, steps=4, checkpoint_every=2, **more),
    lambda **more: runs.text(path, steps=4, checkpoint_every=2, grad_accum_steps=2,
                             precision=Precision.BF16, **more),
    lambda **more: runs.text(path, steps=3, precision=Precision.FP16, optimizer=MuonConfig(),
                             **more),
    lambda **more: runs.digits(cnn, optimizer=SGDConfig(), **more),
    lambda **more: runs.digits(cnn, optimizer=LionConfig(), **more),
    lambda **more: runs.text(path, steps=3, dropout=0.0, **more),
    lambda **more: runs.text(path, steps=3, dropout=0.0, recompute="selective", **more),
    lambda **more: runs.text(path, steps=3, dropout=0.0, recompute="full",
                             precision=Precision.BF16, grad_accum_steps=2, **more),
]
recipe = recipes[number]

def losses(directory):
    keys = ("loss", "grad_norm", "validation_loss")
    return [line[key] for line in read(directory) for key in keys if key in line]
"""


@pytest.mark.parametrize("number", range(6))
def test_losses_are_those_of_the_cpu(tmp_path: Path, number: int) -> None:
    code = """
device = str(fake_device.DEVICE)
trainers = [Trainer(recipe(device=name), path / name) for name in ("cpu", device)]
for trainer in trainers:
    trainer.run()
assert all(p.device == fake_device.DEVICE for p in trainers[1].model.parameters())
print(json.dumps([losses(trainer.directory) for trainer in trainers]))
"""
    cpu, device = json.loads(run_script(COMMON + code, str(tmp_path), str(number)))
    assert len(cpu) > 6
    # Kernels for the CPU against reference implementations: equal up to rounding.
    assert device == pytest.approx(cpu, rel=2e-2 if number in (2, 3) else 1e-4)


@pytest.mark.parametrize("number", range(3))
def test_a_stopped_run_resumes_bitwise_from_its_checkpoint(tmp_path: Path, number: int) -> None:
    code = """
whole = Trainer(recipe(device=str(fake_device.DEVICE)), path / "whole")
whole.run()
stopped = Trainer(whole.recipe, path / "stopped")
stopped.run(lambda line: stopped.stop() if line["step"] == 2 else None)
resumed = Trainer(whole.recipe, path / "stopped")
assert resumed.resume() and resumed.step == 2
resumed.run()
assert losses(resumed.directory) == losses(whole.directory)
for name, tensor in runs.state(whole).items():
    assert torch.equal(tensor.cpu(), runs.state(resumed)[name].cpu()), name
"""
    run_script(COMMON + code, str(tmp_path), str(number))


def count_step(tmp_path: Path, number: int) -> dict[str, Any]:
    code = """
trainer = Trainer(recipe(device=str(fake_device.DEVICE)), path / "run")
counts = []
run_step = trainer.run_step

def counted():
    before = fake_device.COUNTS.snapshot()
    metrics = run_step()
    counts.append(vars(fake_device.COUNTS.since(before)))
    return metrics

trainer.run_step = counted
trainer.run()
print(json.dumps(counts[-1]))
"""
    return json.loads(run_script(COMMON + code, str(tmp_path), str(number)))


@pytest.mark.parametrize("number", [4, 5])
def test_a_step_reads_one_tensor_from_the_device(tmp_path: Path, number: int) -> None:
    """Images and labels go to the device, losses and gradient norms come back in one tensor."""
    counts = count_step(tmp_path, number)
    assert counts["to_host"] == counts["syncs"] == 1


@pytest.mark.parametrize(
    ("number", "micro_batches", "masks"),
    [(1, 1, 4), (2, 2, 4), (6, 1, 0), (7, 1, 0), (8, 2, 0)],
    ids=["dropout", "bf16, dropout", "plain", "recompute selective", "bf16, recompute full"],
)
def test_a_decoder_step_copies_its_inputs_and_reads_one_tensor(
    tmp_path: Path, number: int, micro_batches: int, masks: int
) -> None:
    """A micro-batch is tokens, targets, positions and cu_seqlens, and a mask for each dropout."""
    counts = count_step(tmp_path, number)
    assert counts["to_device"] == micro_batches * (4 + masks)
    assert counts["to_host"] == counts["syncs"] == 1
