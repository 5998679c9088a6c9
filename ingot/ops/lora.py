"""LoRA adapters (Hu et al. 2021): a low-rank term that is added to the output of a linear layer.

    h = s (x A^T)                          lora_shrink, in float32
    y = residual + act(x W^T + h B + b)    linear and gated_linear, which take h and B

A is (R, in) and B (R, out), with a small rank R. The term is added to the GEMM's accumulator before
it is rounded, so an adapter whose B is 0 gives the bits of the base model.

Each row has its own adapter of E, or none, selected by an index. The bits of a row depend neither
on the other rows nor on their adapters: a row of a batch with several adapters has the same bits as
in training, where there is one.
"""

# pyright: basic
from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ingot.core.errors import OpError
from ingot.ops.arguments import accum_dtype
from ingot.ops.check import check_same_dtype
from ingot.ops.epilogue import adapter_mask, check_adapters
from ingot.ops.inputs import SampleInput, TensorMaker
from ingot.ops.op import op
from ingot.ops.record import Cost, Tolerance


def _samples(make: TensorMaker) -> Iterator[SampleInput]:
    def call(name: str, x: Tensor, adapters: int, rank: int, indexed: bool) -> SampleInput:
        a = make(adapters, rank, x.shape[-1], scale=x.shape[-1] ** -0.5)
        scale = (make(adapters).abs() + 0.5).to(accum_dtype(make.dtype))
        index = make.ints(adapters + 1, *x.shape[:-1], dtype=torch.int32) - 1
        return SampleInput(name, (x, a, scale, index if indexed else None))

    yield call("typical", make(6, 64), 1, 8, False)
    yield call("typical_index", make(6, 64), 3, 8, True)
    yield call("large", make(131, 259), 1, 48, False)
    yield call("large_index", make(131, 259), 3, 16, True)
    yield call("odd", make(5, 37), 2, 3, True)
    yield call("one_row", make(1, 48), 1, 16, False)
    x, a, scale, index = call("strided", make.strided(4, 24), 2, 5, True).args
    yield SampleInput("strided", (x, a.transpose(0, 1).contiguous().transpose(0, 1), scale, index))
    yield call("extreme", make.spread(4, 33), 1, 4, False)
    yield call("batched", make(2, 3, 16), 2, 4, True)
    yield call("first_of_two", make(3, 16), 2, 4, False)


def _check(x: Tensor, a: Tensor, scale: Tensor, index: Tensor | None) -> None:
    check_same_dtype("lora_shrink", x=x, a=a)
    if a.dim() != 3 or a.shape[2] != x.shape[-1]:
        raise OpError(
            f"lora_shrink: a must be (adapters, rank, {x.shape[-1]}), got {tuple(a.shape)}",
            hint="stack the A of each adapter, (rank, in)",
        )
    if scale.shape != a.shape[:1] or scale.dtype != accum_dtype(x.dtype):
        raise OpError(
            f"lora_shrink: scale must be {accum_dtype(x.dtype)} ({len(a)},), "
            f"got {scale.dtype} {tuple(scale.shape)}",
            hint="pass alpha / rank of each adapter",
        )
    check_adapters("lora_shrink", x, index, len(a))


def _fake(x: Tensor, a: Tensor, *_: object) -> Tensor:
    return x.new_empty((*x.shape[:-1], a.shape[1]), dtype=accum_dtype(x.dtype))


def _cost(x: Tensor, a: Tensor, scale: Tensor, index: Tensor | None = None) -> Cost:
    h = x.numel() // x.shape[-1] * a.shape[1]
    used = 1 if index is None else len(index.unique())
    read = min(used, len(a)) * a[0].nbytes
    return Cost(bytes=x.nbytes + read + 4 * h, flops=2 * h * x.shape[-1])


@op(
    check=_check,
    fake=_fake,
    samples=_samples,
    tolerance=Tolerance(),
    cost=_cost,
    row_args=("x", "index"),
)
def lora_shrink(x: Tensor, a: Tensor, scale: Tensor, index: Tensor | None = None) -> Tensor:
    """Return `scale * (x @ a[index].T)`, (T, R), in float32: the `lora_h` of `linear`.

    `a` (E, R, in) and `scale` (E) belong to E adapters; `index` (T) selects that of each row, -1
    for none (zeros). Without an index, all rows have adapter 0.

    >>> a, scale = torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]]), torch.tensor([1.0, 0.5])
    >>> lora_shrink(torch.ones(3, 2), a, scale, torch.tensor([0, 1, -1], dtype=torch.int32))
    tensor([[3.0000],
            [3.5000],
            [0.0000]])
    """
    every = (x @ a.flatten(0, 1).T).unflatten(-1, a.shape[:2]) * scale.unsqueeze(-1)
    is_own = adapter_mask(x, index, len(a))
    return (every * is_own.unsqueeze(-1)).sum(-2)
