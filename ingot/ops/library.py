"""Registration of ops with `torch.library`.

Ops are registered for `CompositeExplicitAutograd`, the backend key with the lowest precedence. The
C++ kernels register for the `CPU` key of the same op when they are loaded; the dispatcher then
calls them without Python: 3 us per call instead of 9.
"""

# pyright: basic
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ingot.ops.arguments import tensors

LIBRARY = torch.library.Library("ingot", "DEF")
# The same ops without C++ kernels. C++ kernels call these for calls they do not support.
PYTHON_LIBRARY = torch.library.Library("ingot_python", "DEF")

# Prefix of the messages of InvalidArgument in kernels/cpu/tensor.h.
_INVALID_ARGUMENT = "invalid argument: "


def define(name: str, schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Define `ingot::name` with a kernel and a fake, and return its overload."""
    for library in (LIBRARY, PYTHON_LIBRARY):
        library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"ingot::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.ingot, name).default


def backward_schema(schema: str) -> str:
    """Return the schema of the backward op from that of the op.

    >>> backward_schema("(Tensor x, float eps) -> Tensor")
    '(bool[] needs, Tensor[] grads, Tensor x, float eps) -> Tensor[]'
    """
    arguments = schema[1:].rsplit(") -> ", 1)[0]
    return f"(bool[] needs, Tensor[] grads, {arguments}) -> Tensor[]"


def invalid_argument(error: RuntimeError) -> str | None:
    """Return the condition that a C++ kernel says is violated; None for other errors.

    >>> invalid_argument(RuntimeError("invalid argument: x must be 2D\\nfrom kernel"))
    'x must be 2D'
    """
    message = str(error)
    if not message.startswith(_INVALID_ARGUMENT):
        return None
    return message.removeprefix(_INVALID_ARGUMENT).partition("\n")[0]


def outside_autocast(function: Callable[..., Any], *args: Any) -> Any:
    """Call a kernel without autocast: ops compute in the dtypes of their arguments."""
    device = tensors(args)[0].device.type
    if not torch.is_autocast_enabled(device):
        return function(*args)
    with torch.autocast(device, enabled=False):
        return function(*args)
