"""Fully sharded data parallelism with torch's FSDP2, with the bits of a single process.

Each rank stores a part of the rows of every weight. FSDP2 gathers the weights of a block before the
block is computed and frees them afterwards; the gradients of a block are summed over the ranks as
soon as its backward has computed them, and each rank keeps those of its rows. With several
replicas, the ranks of a replica shard the weights among themselves, and the sums are then added
over the replicas (HSDP).

The sums are those of `ingot.parallel.ranks`, in float32: `set_custom_reduce_scatter` replaces the
library's own, and `set_all_reduce_hook` sees the result before FSDP2 rounds it to the dtype of the
weight. With `parallel.grad_compression` they are sums of int8 messages
(`ingot.parallel.compression`).
"""

# pyright: basic
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)
from torch.distributed.tensor import DTensor

from ingot.parallel import ranks as collectives
from ingot.parallel.compression import Int8Messages, Int8Rounding
from ingot.parallel.mesh import Mesh
from ingot.parallel.ranks import Ranks

OnGrad = Callable[[str, Tensor], None]


class _CountedAllGather(DefaultAllGather):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        collectives.count_sent(input_tensor.nbytes * (group.size() - 1))
        return super().__call__(output_tensor, input_tensor, group, async_op)


class _OrderedReduceScatter(DefaultReduceScatter):
    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        collectives.reduce_scatter(output_tensor, input_tensor, group, self._dtype)

    def sum_over(self, replicas: Ranks, reduced: Tensor) -> None:
        """Add the sums of all replicas to those that the reduce-scatter has computed."""
        if replicas.group is not None:
            collectives.all_reduce(reduced, replicas.group)


class _Int8ReduceScatter(DefaultReduceScatter):
    """Exchanges messages; they are summed over the ranks of all replicas at once."""

    def __init__(self, messages: Int8Messages) -> None:
        self._messages = messages
        self._received: Tensor | None = None

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        sent = self._messages.encode(input_tensor.view(group.size(), -1))
        self._received = collectives.all_to_all(sent, group)

    def sum_over(self, replicas: Ranks, reduced: Tensor) -> None:
        """Write the sum of all messages."""
        received, self._received = self._received, None
        if received is None:  # FSDP2 does not scatter on a single rank
            received = self._messages.encode(reduced[None])
        reduced.copy_(self._messages.all_reduce(received, replicas))


class ShardedModel:
    """A model whose weights are sharded over ranks; `on_grad` takes the gradients of its rows.

    The ranks of `fsdp` store different rows, those of `dp` the same. `grad_dtype` is the dtype of
    what a rank adds to a sum: a gradient of one backward has that of the weights, and is sent in
    it, or in int8 with a `rounding`. The module itself is changed: its parameters become DTensors
    of the same names.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        on_grad: OnGrad,
        grad_dtype: torch.dtype = torch.float32,
        rounding: Int8Rounding | None = None,
    ) -> None:
        assert mesh.device_mesh is not None
        self.model: Any = model
        self.mesh = mesh
        self._rows = {n: len(p) if p.dim() else 1 for n, p in model.named_parameters()}
        self._on_grad, self._grad_dtype, self._rounding = on_grad, grad_dtype, rounding
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        for module in (*getattr(model, "blocks", ()), model):
            fully_shard(module, mesh=mesh.device_mesh["fsdp"], mp_policy=policy)
        self._names = {id(p): name for name, p in model.named_parameters()}
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_drop_grad)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                self._install(module)

    def _install(self, module: Any) -> None:
        group = module._get_fsdp_state()._fsdp_param_groups[0]
        parameters = [p.sharded_param for p in group.fsdp_params if p.sharded_param.requires_grad]
        if self._rounding:
            shapes = {self._names[id(p)]: self._padded(p) for p in parameters}
            scatter = _Int8ReduceScatter(Int8Messages(shapes, self._rounding))
        else:
            scatter = _OrderedReduceScatter(self._grad_dtype)

        def take(reduced: Tensor) -> None:
            scatter.sum_over(self.mesh.dp, reduced)
            self._split(parameters, reduced)

        module.set_custom_all_gather(_CountedAllGather())
        module.set_custom_reduce_scatter(scatter)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        module.set_all_reduce_hook(take)

    def _split(self, parameters: list[Tensor], reduced: Tensor) -> None:
        """Take the gradients of a block from the flat vector that FSDP2 has reduced."""
        begin = 0
        for parameter in parameters:
            name, own = self._names[id(parameter)], local(parameter)
            self._on_grad(name, reduced[begin : begin + own.numel()].view(own.shape))
            begin += self._padded(parameter).numel()
        assert begin == reduced.numel(), "every weight of a block has a gradient"

    def _padded(self, parameter: Tensor) -> torch.Size:
        """Return the shape of a rank's rows of a weight; FSDP2 pads the last ones to it."""
        rows = -(-self._rows[self._names[id(parameter)]] // self.mesh.fsdp.size)
        return torch.Size((rows, *parameter.shape[1:]))

    @property
    def is_first_replica(self) -> bool:
        """Whether this rank's rows are those that are saved, and counted in norms."""
        return self.mesh.dp.is_main

    def has_rows(self, name: str, tensor: Tensor) -> bool:
        """Return whether a tensor has the rows of a weight: `weight`, or `weight|moment`."""
        return tensor.dim() > 0 and name.partition("|")[0] in self._rows

    def rows(self, name: str) -> slice:
        """Return which rows of a weight, or of its optimizer state, this rank stores."""
        return row_slice(
            self._rows[name.partition("|")[0]], self.mesh.fsdp.rank, self.mesh.fsdp.size
        )

    def set_sync(self, sync: bool) -> None:
        """Set whether the next backward sums the gradients over the ranks, or only adds its own."""
        self.model.set_requires_gradient_sync(sync)

    def reshard(self) -> None:
        """Free gathered weights, so that the next forward gathers updated ones."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def row_slice(rows: int, rank: int, size: int) -> slice:
    """Return which rows FSDP2 gives to a rank: equal parts, the last may have fewer or none.

    >>> [row_slice(10, rank, 4) for rank in range(4)]
    [slice(0, 3, None), slice(3, 6, None), slice(6, 9, None), slice(9, 10, None)]
    """
    part = -(-rows // size)
    begin = min(part * rank, rows)
    return slice(begin, min(begin + part, rows))


def _drop_grad(parameter: Tensor) -> None:
    parameter.grad = None  # taken already, before it was rounded


def local(tensor: Tensor) -> Tensor:
    """Return the rows that this rank stores of a tensor; the tensor itself if it is not sharded.

    >>> local(torch.ones(2))
    tensor([1., 1.])
    """
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
