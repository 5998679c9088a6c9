"""Linear layers with `torch.nn.functional`: a GEMM of oneDNN or MKL, then a separate epilogue.

Groups use `grouped_mm`, without a backward (the next provider's is used): on Blackwell, PyTorch's
gradient of the weight of a group without rows is not 0 (pytorch issue 172439, open in 2026-11).
"""

# pyright: basic
from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ingot import ops
from ingot.kernels.aten import aten, on_gpu
from ingot.kernels.aten.activation import apply_activation
from ingot.ops.dispatch import Override
from ingot.ops.epilogue import ActivationFn, add_lora
from ingot.ops.gradient import differentiate


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: int,
    residual: Tensor | None,
    lora_h: Tensor | None,
    lora_b: Tensor | None,
    lora_index: Tensor | None,
) -> Tensor:
    """Run a GEMM, then the epilogue."""
    z = _add_lora(F.linear(x, weight, bias), lora_h, lora_b, lora_index)
    y = apply_activation(z, activation)
    return y if residual is None else (residual + y).contiguous()


def _add_lora(y: Tensor, h: Tensor | None, b: Tensor | None, index: Tensor | None) -> Tensor:
    """Add the term of LoRA adapters in float32, rounded once more."""
    return y if h is None else add_lora(y.to(h.dtype), h, b, index).to(y.dtype)


_derived_backward = differentiate(linear)
_lora_backward = differentiate(_add_lora)


def linear_backward(
    needs: list[bool],
    grads: list[Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: int,
    residual: Tensor | None,
    *lora: Tensor | None,
) -> Sequence[Tensor | None]:
    """Compute the gradients without the forward's GEMM, which autograd would run again."""
    (grad,) = grads
    lora_h, _, _ = lora
    if activation != ActivationFn.IDENTITY:
        return _derived_backward(needs, grads, x, weight, bias, activation, residual, *lora)
    of_lora: Sequence[Tensor | None] = (None, None, None)
    if lora_h is not None and any(needs[5:]):
        # Independent of the value of y: zeros of its shape without memory.
        y = grad.new_zeros(()).expand(grad.shape)
        _, *of_lora = _lora_backward([False, *needs[5:]], grads, y, *lora)
    rows, grad_rows = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
    return [
        grad @ weight if needs[0] else None,
        grad_rows.T @ rows if needs[1] else None,
        grad_rows.sum(0) if needs[2] else None,
        None,
        grad if needs[4] else None,
        *of_lora,
    ]


aten(ops.linear, backward=linear_backward)(linear)


@aten(ops.gated_linear)
def gated_linear(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    activation: int,
    lora_h: Tensor | None,
    gate_lora_b: Tensor | None,
    up_lora_b: Tensor | None,
    lora_index: Tensor | None,
) -> Tensor:
    """Run two GEMMs, an activation and a multiplication."""
    gate, up = F.linear(x, gate_weight), F.linear(x, up_weight)
    if lora_h is not None:  # in float32 up to the result: three roundings more exceed the bound
        gate_h, up_h = lora_h.chunk(2, dim=-1)
        gate = add_lora(gate.to(lora_h.dtype), gate_h, gate_lora_b, lora_index)
        up = add_lora(up.to(lora_h.dtype), up_h, up_lora_b, lora_index)
    return (apply_activation(gate, activation) * up).to(x.dtype)


def _supports_grouped(x: Tensor, weight: Tensor, *_: object) -> bool:
    """Return whether the call is in bfloat16, with rows aligned to 16 bytes."""
    sizes = (*weight.shape[1:], *weight.stride()[:2], x.stride(0))
    fits = weight.stride(2) == x.stride(1) == 1 and all(size % 8 == 0 for size in sizes)
    return x.dtype == torch.bfloat16 and x.numel() > 0 and weight.numel() > 0 and fits


def _grouped(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    ends = offsets[1:].to(torch.int32)
    return F.grouped_mm(x, weight.transpose(-2, -1), offs=ends)


def grouped_linear(x: Tensor, weight: Tensor, offsets: Tensor, activation: int) -> Tensor:
    """Run one GEMM for all groups, then the activation."""
    return apply_activation(_grouped(x, weight, offsets), activation).contiguous()


def grouped_gated_linear(
    x: Tensor, gate_weight: Tensor, up_weight: Tensor, offsets: Tensor, activation: int
) -> Tensor:
    """Run two GEMMs for all groups, an activation and a multiplication."""
    gate = apply_activation(_grouped(x, gate_weight, offsets), activation)
    return (gate * _grouped(x, up_weight, offsets)).contiguous()


def _supports_both(x: Tensor, gate_weight: Tensor, up_weight: Tensor, *_: object) -> bool:
    return _supports_grouped(x, gate_weight) and _supports_grouped(x, up_weight)


def _on_gpu(x: Tensor, *_: object) -> bool:
    return on_gpu(x)


_PREFERRED = Override(
    when=_on_gpu,
    reason="bfloat16, sizes in multiples of 8: `grouped_mm` uses CUTLASS kernels for each "
    "GPU generation; gradients use Triton",
)
for _op, _forward, _supports in (
    (ops.grouped_linear, grouped_linear, _supports_grouped),
    (ops.grouped_gated_linear, grouped_gated_linear, _supports_both),
):
    _op.provide(
        "aten", _forward, batch_invariant=False, supports=_supports, preferred_for=_PREFERRED
    )
