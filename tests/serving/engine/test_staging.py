from __future__ import annotations

import numpy as np
import torch

from ingot.serving.engine.staging import StagingBuffer, copy_to_device, copy_to_host
from tests.test_fake_device import run_script

CPU = torch.device("cpu")


def test_parts_share_the_memory_of_a_buffer_on_the_cpu() -> None:
    staging = StagingBuffer(64, CPU)
    counts = staging.part(0, (3,), np.int64)
    scales = staging.part(24, (2, 2), np.float32)
    counts.items[1] = 7
    scales.array[1] = 0.5
    staging.copy_to_device(40)
    staging.wait()
    assert counts.tensor.tolist() == [0, 7, 0]
    assert scales.tensor.tolist() == [[0.0, 0.0], [0.5, 0.5]]


def test_arrays_of_several_types_keep_their_values_on_the_cpu() -> None:
    arrays = [np.array([True]), np.arange(3), np.ones((1, 2), np.float32)]
    tensors = copy_to_device(arrays, CPU)
    assert [tensor.dtype for tensor in tensors] == [torch.bool, torch.int64, torch.float32]
    assert copy_to_host(*tensors) == [[True], [0, 1, 2], [[1.0, 1.0]]]


def test_a_device_gets_one_copy_and_returns_one() -> None:
    code = """
import numpy as np
from ingot.serving.engine.staging import StagingBuffer, copy_to_device, copy_to_host

counts = fake_device.COUNTS
staging = StagingBuffer(64, fake_device.DEVICE)
first, second = staging.part(0, (3,), np.int64), staging.part(24, (2, 2), np.float32)
before = counts.snapshot()
first.array[:], second.array[1] = 7, 0.5
assert first.tensor.cpu().tolist() == [0, 0, 0], "not copied yet"
staging.copy_to_device(40)
staging.wait()
print(counts.since(before).to_device)
assert first.tensor.device == second.tensor.device == fake_device.DEVICE
assert first.tensor.cpu().tolist() == [7, 7, 7]
assert second.tensor.cpu().tolist() == [[0.0, 0.0], [0.5, 0.5]]

before = counts.snapshot()
arrays = [np.array([True]), np.arange(3), np.ones((1, 2), np.float32)]
tensors = copy_to_device(arrays, fake_device.DEVICE)
print(counts.since(before).to_device)
before = counts.snapshot()
assert copy_to_host(*tensors) == [[True], [0, 1, 2], [[1.0, 1.0]]]
print(counts.since(before).to_host)
"""
    assert run_script(code).split() == ["1", "1", "1"]
