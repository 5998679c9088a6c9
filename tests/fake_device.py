"""A fake accelerator, for machines without a real one.

    python -c "from tests import fake_device; torch.zeros(3, device=fake_device.DEVICE)"

A tensor on it wraps a CPU tensor, which does the computing. A call that mixes the two devices,
reads a device tensor as if it were on the host, or creates a tensor without naming the device fails
as it would on a GPU. Index tensors may be on the CPU; as with CUDA, they are copied.

`COUNTS` counts the transfers between host and device and the points at which CUDA would make the
host wait:

    before = fake_device.COUNTS.snapshot()
    train_step(...)
    print(fake_device.COUNTS.since(before))

Importing this module registers the device for the whole process: use it in a subprocess.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("fake")
DEVICE = torch.device("fake:0")
_CONVERTING = {"aten::_to_copy", "aten::to"}  # `to` and `item` are not decomposed in inference mode
_MIXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::copy_", *_CONVERTING}
# Ops whose result depends on values on the device: its shape, or a number on the host.
_SYNCHRONIZING = {
    "aten::_local_scalar_dense",
    "aten::item",
    "aten::allclose",
    "aten::argwhere",
    "aten::nonzero_numpy",
    "aten::equal",
    "aten::is_nonzero",
    "aten::masked_select",
    "aten::nonzero",
    "aten::_unique2",
    "aten::unique_consecutive",
    "aten::unique_dim",
}


@dataclass
class Counts:
    """Transfers and synchronizations since the process began.

    `syncs` counts every point at which the host waits for the device: blocking copies in either
    direction, `.item()` and `.tolist()`, and ops whose output shape depends on values.
    """

    to_device: int = 0
    to_host: int = 0
    syncs: int = 0

    def snapshot(self) -> Counts:
        """Return a copy of the counts."""
        return Counts(*astuple(self))

    def since(self, before: Counts) -> Counts:
        """Return what was counted after the snapshot `before`."""
        return Counts(
            *(now - then for now, then in zip(astuple(self), astuple(before), strict=True))
        )


COUNTS = Counts()


class DeviceTensor(Tensor):
    """A tensor on the fake device; `host` holds its values."""

    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor) -> DeviceTensor:
        # Under inference mode torch would refuse views of tensors that were created outside it.
        with torch.inference_mode(False):
            tensor = Tensor._make_wrapper_subclass(
                cls,
                host.shape,
                strides=host.stride(),
                storage_offset=host.storage_offset(),
                dtype=host.dtype,
                device=DEVICE,
            )
        tensor.host = host
        return tensor

    @property
    def data(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The values without their history; assigning replaces them, as `Module.to` does."""
        return DeviceTensor(self.host)

    @data.setter
    def data(self, value: Tensor) -> None:
        assert isinstance(value, DeviceTensor)
        Tensor.data.__set__(self, value)  # pyright: ignore[reportAttributeAccessIssue]
        self.host = value.host.detach()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("can't convert a fake device tensor to numpy")

    def tolist(self) -> Any:
        COUNTS.to_host += 1
        COUNTS.syncs += 1
        return self.host.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, *args, **(kwargs or {}))


def _run(func: Any, *args: Any, **kwargs: Any) -> Any:
    on_host: list[Tensor] = []

    def to_host(value: Any) -> Any:
        if isinstance(value, DeviceTensor):
            return value.host
        if isinstance(value, Tensor) and value.dim():
            on_host.append(value)
        return torch.device("cpu") if value == DEVICE else value

    given = dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | kwargs
    device = torch.device(given.get("device") or DEVICE)
    inputs, options = tree_map(to_host, args), tree_map(to_host, kwargs)
    name = func._schema.name
    if on_host and name not in _MIXING:
        raise RuntimeError(f"{func}: expected all tensors to be on the same device")
    _count(name, args, given, device)
    destination = args[0] if name == "aten::copy_" else None
    result = func(*inputs, **options)
    if destination is not None:
        return destination
    if device.type == "cpu":
        return result
    return tree_map(
        lambda value: DeviceTensor(value) if isinstance(value, Tensor) else value, result
    )


def _count(name: str, args: Any, given: dict[str, Any], device: torch.device) -> None:
    """Count a transfer between devices, and whether the host waits."""
    blocking = not given.get("non_blocking")
    if name in _CONVERTING:
        source, to_device = args[0], device.type != "cpu"
    elif name == "aten::copy_":
        source, to_device = args[1], isinstance(args[0], DeviceTensor)
    else:
        waits = name in _SYNCHRONIZING or _has_mask(name, args)
        copies = _count_host_indices(name, args)
        COUNTS.to_device += copies
        COUNTS.syncs += waits + copies
        COUNTS.to_host += waits
        return
    if to_device is isinstance(source, DeviceTensor):
        return
    COUNTS.to_device += to_device
    COUNTS.to_host += not to_device
    COUNTS.syncs += blocking


def _indices(name: str, args: Any) -> list[Tensor]:
    indexing = name.startswith("aten::index") and isinstance(args[1], list | tuple)
    return [index for index in args[1] if isinstance(index, Tensor)] if indexing else []


def _has_mask(name: str, args: Any) -> bool:
    return any(index.dtype in (torch.bool, torch.uint8) for index in _indices(name, args))


def _count_host_indices(name: str, args: Any) -> int:
    return sum(not isinstance(index, DeviceTensor) for index in _indices(name, args))


_LIBRARY = torch.library.Library("_", "IMPL")
_LIBRARY.fallback(_run, "PrivateUse1")
_tensor = torch.tensor


def _tensor_on_device(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:
    """Create on the host, then copy: torch does not ask a Python backend for these tensors."""
    tensor = _tensor(*args, **kwargs)
    return tensor if device is None else tensor.to(device)


torch.tensor = _tensor_on_device
