"""Copies of batches from the host to an accelerator, without making the host wait."""

from __future__ import annotations

import torch
from torch import Tensor

from ingot.core.device import PINNED_MEMORY_DEVICES


def copy_to_device(device: torch.device, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Copy host tensors to a device; on the CPU they are returned as they are.

    For GPUs the tensors are staged in page-locked memory, from torch's caching allocator, which
    keeps it until the copy is done. Torch orders the copy before the kernels that follow.

    >>> copy_to_device(torch.device("cpu"), torch.tensor([1, 2]))
    (tensor([1, 2]),)
    """
    if device.type == "cpu":
        return tensors
    if device.type in PINNED_MEMORY_DEVICES:
        tensors = tuple(tensor.pin_memory() for tensor in tensors)
    return tuple(tensor.to(device, non_blocking=True) for tensor in tensors)
