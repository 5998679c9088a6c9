"""Copies of batches to a device."""

from __future__ import annotations

import json

import torch

from ingot.data.transfer import copy_to_device
from tests.test_fake_device import run_script


def test_on_the_cpu_the_tensors_are_returned_without_a_copy() -> None:
    x, y = torch.ones(2), torch.arange(3)
    copies = copy_to_device(torch.device("cpu"), x, y)
    assert copies[0] is x
    assert copies[1] is y


def test_copies_have_the_same_values_and_do_not_make_the_host_wait() -> None:
    code = """
import json
from ingot.data.transfer import copy_to_device

tensors = torch.ones(2), torch.arange(3)
before = fake_device.COUNTS.snapshot()
copies = copy_to_device(fake_device.DEVICE, *tensors)
counts = vars(fake_device.COUNTS.since(before))
assert all(copy.device == fake_device.DEVICE for copy in copies)
assert all(torch.equal(copy.cpu(), x) for copy, x in zip(copies, tensors, strict=True))
print(json.dumps(counts))
"""
    assert json.loads(run_script(code)) == {"to_device": 2, "to_host": 0, "syncs": 0}
