"""Staging: the inputs of a step on their way to the device, and its results on their way back.

Each copy between host and device costs a launch, and one that the host waits for costs the time of
all kernels before it. So what the host writes in a step is packed into one buffer and copied at
once, and so are the results. On the CPU nothing is copied: tensors share the memory of the arrays.
"""

# pyright: basic
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ingot.core.device import PINNED_MEMORY_DEVICES

_ALIGNMENT = 8


class StagingArray:
    """A part of a staging buffer: for numpy, as single items for Python, and on the device."""

    __slots__ = ("array", "items", "tensor")

    def __init__(self, array: np.ndarray, tensor: Tensor) -> None:
        self.array, self.items, self.tensor = array, array.data, tensor


class StagingBuffer:
    """Memory on the host that is allocated once, and its copy on the device.

    >>> staging = StagingBuffer(64, torch.device("cpu"))
    >>> part = staging.part(8, (2, 3), np.int32)
    >>> part.array[1] = 7
    >>> staging.copy_to_device(32)
    >>> part.tensor
    tensor([[0, 0, 0],
            [7, 7, 7]], dtype=torch.int32)
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._on_host, self._copied = device.type == "cpu", None
        if device.type in PINNED_MEMORY_DEVICES:
            self._host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)
            self._copied = torch.Event(device)
        else:
            self._host = torch.from_numpy(np.zeros(num_bytes, np.uint8))
        self._device = self._host if self._on_host else self._host.to(device)

    def part(self, offset: int, shape: tuple[int, ...], dtype: type[np.generic]) -> StagingArray:
        """Return the part of this shape that begins at a byte."""
        array = self._host.numpy()[offset:][: math.prod(shape) * np.dtype(dtype).itemsize]
        tensor = torch.from_numpy(array.view(dtype).reshape(shape))
        if self._on_host:
            return StagingArray(tensor.numpy(), tensor)
        return StagingArray(tensor.numpy(), _part(self._device, offset, tensor))

    def wait(self) -> None:
        """Wait until the last copy has read the host memory, so that it may be written again.

        A step that samples has waited for its tokens, and with them for the copy; a step that only
        prefills has not.
        """
        if self._copied is not None:
            self._copied.synchronize()

    def copy_to_device(self, num_bytes: int) -> None:
        """Copy the first bytes of the host memory to the device, without waiting."""
        if self._on_host:
            return
        self._device[:num_bytes].copy_(self._host[:num_bytes], non_blocking=True)
        if self._copied is not None:
            self._copied.record()


def _part(packed: Tensor, offset: int, like: Tensor) -> Tensor:
    """Return the bytes from an offset on as a tensor like another."""
    return packed[offset : offset + like.nbytes].view(like.dtype).view(like.shape)


def copy_to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Return arrays as tensors on a device, with one copy and without waiting.

    >>> copy_to_device([np.array([1, 2]), np.array([True])], torch.device("cpu"))
    [tensor([1, 2]), tensor([True])]
    """
    tensors = [torch.from_numpy(array) for array in arrays]
    if device.type == "cpu":
        return tensors
    offsets = [0]
    for tensor in tensors:
        offsets.append(offsets[-1] + -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT)
    # Torch's caching allocator keeps page-locked memory until the copy is done.
    host = torch.empty(
        offsets[-1], dtype=torch.uint8, pin_memory=device.type in PINNED_MEMORY_DEVICES
    )
    for offset, tensor in zip(offsets, tensors, strict=False):
        _part(host, offset, tensor).copy_(tensor)
    packed = host.to(device, non_blocking=True)
    return [_part(packed, o, tensor) for o, tensor in zip(offsets, tensors, strict=False)]


def copy_to_host(*tensors: Tensor) -> list[Any]:
    """Return tensors as nested lists, with one copy; waits for the device.

    >>> copy_to_host(torch.tensor([0.5]), torch.tensor([[1, 2]]))
    [[0.5], [[1, 2]]]
    """
    if len(tensors) == 1 or tensors[0].device.type == "cpu":
        return [tensor.tolist() for tensor in tensors]
    # Wide items first, so that all are aligned without padding.
    order = sorted(range(len(tensors)), key=lambda index: -tensors[index].itemsize)
    parts = [tensors[index].reshape(-1).view(torch.uint8) for index in order]
    host, offset, lists = torch.cat(parts).cpu(), 0, dict.fromkeys(order)
    for index in order:
        tensor = tensors[index]
        lists[index] = _part(host, offset, tensor).tolist()
        offset += tensor.nbytes
    return [lists[index] for index in range(len(tensors))]
