"""A device that is not the CPU, for machines without one: its tensors are "far".

    python -c "from tests import far; torch.zeros(3, device=far.DEVICE)"

A tensor there wraps one of the CPU, which computes for it. What mixes the two in a call, reads a
far tensor as if it were here, or forgets to say where a new one belongs, fails as it would with a
GPU. Indices may come from the CPU, as with CUDA.

Importing this registers the device for the whole process: import it in one of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("far")
DEVICE = torch.device("far:0")
_MIXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::copy_", "aten::_to_copy"}


class Far(Tensor):
    """A tensor that is far."""

    near: Tensor

    @staticmethod
    def __new__(cls, near: Tensor) -> Far:
        with torch.inference_mode(False):  # torch refuses views of other tensors that are not so
            far = Tensor._make_wrapper_subclass(
                cls,
                near.shape,
                strides=near.stride(),
                storage_offset=near.storage_offset(),
                dtype=near.dtype,
                device=DEVICE,
            )
        far.near = near
        return far

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("can't convert a far tensor to numpy")

    def tolist(self) -> Any:
        return self.near.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, *args, **(kwargs or {}))


def _run(func: Any, *args: Any, **kwargs: Any) -> Any:
    here: list[Tensor] = []

    def near(value: Any) -> Any:
        if isinstance(value, Far):
            return value.near
        if isinstance(value, Tensor) and value.dim():
            here.append(value)
        return torch.device("cpu") if value == DEVICE else value

    place = torch.device(kwargs.get("device") or DEVICE)
    inputs, options = tree_map(near, args), tree_map(near, kwargs)
    if here and func._schema.name not in _MIXING:
        raise RuntimeError(f"{func}: expected all tensors to be on the same device")
    into = args[0] if func._schema.name == "aten::copy_" else None
    result = func(*inputs, **options)
    if into is not None:
        return into
    if place.type == "cpu":
        return result
    return tree_map(lambda value: Far(value) if isinstance(value, Tensor) else value, result)


_LIBRARY = torch.library.Library("_", "IMPL")
_LIBRARY.fallback(_run, "PrivateUse1")
_tensor = torch.tensor


def _far_tensor(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:
    """torch makes these where a backend in Python is not asked."""
    made = _tensor(*args, **kwargs)
    return made if device is None else made.to(device)


torch.tensor = _far_tensor
