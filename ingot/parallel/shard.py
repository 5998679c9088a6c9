"""Fully sharded data parallelism with torch's FSDP2, with the bits of a single process.

Each rank stores a part of the rows of every weight. FSDP2 gathers the weights of a block before the
block is computed and frees them afterwards; the gradients of a block are summed over the ranks as
soon as its backward has computed them, and each rank keeps those of its rows. With several
replicas, the ranks of a replica shard the weights among themselves, and the sums are then added
over the replicas (HSDP). With tensor parallelism, the rows that are sharded are those of the rank
(`ingot.parallel.tensor`).

The sums are those of `ingot.parallel.ranks`, in float32: `set_custom_reduce_scatter` replaces the
library's own, and `set_all_reduce_hook` is where they are taken: FSDP2 would round them to the
dtype of the weight. With `parallel.grad_compression` they are sums of int8 messages
(`ingot.parallel.compression`).
"""

# pyright: basic
from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
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

from ingot.nn.mlp import MoE
from ingot.parallel import ranks as collectives
from ingot.parallel.compression import Int8Messages, Int8Rounding
from ingot.parallel.expert import ExpertDispatcher, check_experts
from ingot.parallel.mesh import Mesh
from ingot.parallel.ranks import Ranks, row_slice
from ingot.parallel.tensor import divide_decoder

_M_MMAP_THRESHOLD = -3  # in malloc.h

OnGrad = Callable[[str, Tensor], None]


class _CountedAllGather(DefaultAllGather):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        with collectives.waiting("all_gather", input_tensor.nbytes * (group.size() - 1)):
            return super().__call__(output_tensor, input_tensor, group, async_op)


class _OrderedReduceScatter(DefaultReduceScatter):
    """Sums in float32 what the ranks send in the dtype of their gradients."""

    def __init__(self, adds: bool) -> None:
        self._adds = adds
        self._sum: Tensor | None = None

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        if not self._adds:
            input_tensor.zero_()
        self._sum = collectives.reduce_scatter(input_tensor, group)

    def sum_over(self, replicas: Ranks, reduced: Tensor) -> Tensor:
        """Return the sum over all ranks, of what FSDP2 has reduced or the reduce-scatter has."""
        total, self._sum = self._sum, None
        if total is None:  # FSDP2 does not scatter on a single rank
            total = reduced.to(torch.float32, copy=True)
        if replicas.group is not None:
            collectives.all_reduce(total, replicas.group)
        return total


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

    def sum_over(self, replicas: Ranks, reduced: Tensor) -> Tensor:
        """Return the sum of all messages."""
        received, self._received = self._received, None
        if received is None:  # FSDP2 does not scatter on a single rank
            received = self._messages.encode(reduced[None])
        return self._messages.all_reduce(received, replicas)


class ShardedModel:
    """A model whose weights are sharded over ranks; `on_grad` takes the gradients of its rows.

    The ranks of `fsdp` and `tp` store different rows, those of `dp` the same. `grad_dtype` is the
    dtype of what a rank adds to a sum: a gradient of one backward has that of the weights, and is
    sent in it, or in int8 with a `rounding`. With `expert_parallel`, experts are computed by the
    ranks that store them. The module itself is changed: its parameters become DTensors of the same
    names, those of experts local ones.

    `stages` are the parts of the model that are called on their own, if it is a pipeline: their
    weights stay gathered from the first micro-batch of a step to the last (`add_grads`).
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        on_grad: OnGrad,
        grad_dtype: torch.dtype = torch.float32,
        expert_parallel: bool = False,
        stages: Sequence[nn.Module] | None = None,
        rounding: Int8Rounding | None = None,
        tp_bitwise: bool = True,
    ) -> None:
        assert mesh.fsdp_mesh is not None
        _unmap_freed_memory()
        self.model: Any = model
        self.mesh = mesh
        self._divided = (
            divide_decoder(model, mesh.tp, bitwise=tp_bitwise) if mesh.tp.size > 1 else {}
        )
        self._rows = {n: len(p) if p.dim() else 1 for n, p in model.named_parameters()}
        self.on_grad, self._rounding = on_grad, rounding
        self._experts = self._dispatch_experts() if expert_parallel else []
        options: dict[str, Any] = {
            "mesh": mesh.fsdp_mesh,
            # An int8 message rounds float32. A gradient of one backward is reduced as it is.
            "mp_policy": MixedPrecisionPolicy(
                reduce_dtype=torch.float32 if rounding else grad_dtype
            ),
            "ignored_params": {weight for experts in self._experts for weight in experts.weights},
        }
        if stages is not None:
            options["reshard_after_forward"] = False
        called = (model,) if stages is None else stages
        self._units: list[Any] = [u for c in called for u in (*getattr(c, "blocks", ()), c)]
        for module in self._units:
            fully_shard(module, **options)
        self._names = {id(p): name for name, p in model.named_parameters()}
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_drop_grad)
        for module in self._units:
            for group in _param_groups(module):
                self._install(module, group)

    def _dispatch_experts(self) -> list[ExpertDispatcher]:
        check_experts(getattr(self.model, "config", None), self.mesh.fsdp.size)
        layers = {n: m for n, m in self.model.named_modules() if isinstance(m, MoE)}

        def take(layer: str, weight: str, grad: Tensor) -> None:
            self.on_grad(f"{layer}.{weight}", grad)

        return [ExpertDispatcher(moe, self.mesh, partial(take, n)) for n, moe in layers.items()]

    def _install(self, module: Any, group: Any) -> None:
        parameters = [p.sharded_param for p in group.fsdp_params if p.sharded_param.requires_grad]
        if self._rounding:
            shapes = {self._names[id(p)]: self._padded(p) for p in parameters}
            scatter = _Int8ReduceScatter(Int8Messages(shapes, self._rounding))
        else:
            # Outside of the blocks, the ranks of `cp` compute the same gradients.
            adds = module is not self.model or self.mesh.cp.is_main
            scatter = _OrderedReduceScatter(adds)

        def take(reduced: Tensor) -> None:
            self._split(parameters, scatter.sum_over(self.mesh.dp, reduced))

        module.set_custom_all_gather(_CountedAllGather())
        module.set_custom_reduce_scatter(scatter)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        module.set_all_reduce_hook(take)

    def _split(self, parameters: list[Tensor], reduced: Tensor) -> None:
        """Take the gradients of a block from the flat vector of its sums."""
        begin = 0
        for parameter in parameters:
            name, own = self._names[id(parameter)], local(parameter)
            self.on_grad(name, reduced[begin : begin + own.numel()].view(own.shape))
            begin += self._padded(parameter).numel()
        assert begin == reduced.numel(), "every weight of a block has a gradient"

    def _padded(self, parameter: Tensor) -> torch.Size:
        """Return the shape of a rank's rows of a weight; FSDP2 pads the last ones to it."""
        rows = -(-self._rows[self._names[id(parameter)]] // self.mesh.fsdp.size)
        return torch.Size((rows, *parameter.shape[1:]))

    def owns(self, name: str) -> bool:
        """Return whether this rank's rows of a weight are those that are saved, and counted in
        norms: other ranks may have the same."""
        divided = name.partition("|")[0] in self._divided
        return self.mesh.dp.is_main and (divided or self.mesh.tp.is_main)

    def has_weight(self, name: str) -> bool:
        """Return whether this rank's layers have a weight: `weight`, or `weight|moment` of it."""
        return name.partition("|")[0] in self._rows

    def has_rows(self, name: str, tensor: Tensor) -> bool:
        """Return whether a tensor has the rows of a weight: `weight`, or `weight|moment`."""
        return tensor.dim() > 0 and self.has_weight(name)

    def rows(self, name: str) -> list[slice]:
        """Return which rows of a weight, or of its optimizer state, this rank stores."""
        weight = name.partition("|")[0]
        count = self._rows[weight]
        stored = row_slice(count, self.mesh.fsdp.rank, self.mesh.fsdp.size)
        return cut_rows(self._divided.get(weight, [slice(0, count)]), stored)

    def split_rows(self, name: str, tensor: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield the ranges of `rows(name)`, each with its part of the tensor that has them all."""
        begin = 0
        for rows in self.rows(name):
            end = begin + rows.stop - rows.start
            yield rows, tensor[begin:end]
            begin = end

    def set_sync(self, sync: bool) -> None:
        """Set whether the next backward sums the gradients over the ranks, or only adds its own."""
        self.model.set_requires_gradient_sync(sync)
        for experts in self._experts:
            experts.sync = sync

    def add_grads(self, stage: Any, *, sync: bool, last: bool) -> None:
        """Add the gradients of a backward of a stage to those before; `sync` sums them over ranks.

        FSDP2 does so itself after a whole backward, but not after one of the weights alone. After
        the last one of a step the weights are freed.
        """
        stage.set_requires_gradient_sync(sync)
        stage.set_reshard_after_backward(last)
        stage.set_is_last_backward(last)
        for module in stage.modules():
            if isinstance(module, FSDPModule):
                for group in _param_groups(module):
                    group.post_backward()
        stage._get_fsdp_state()._root_post_backward_final_callback()

    def reshard(self) -> None:
        """Free gathered weights, so that the next forward gathers updated ones."""
        for module in self._units:
            module.reshard()


def _unmap_freed_memory() -> None:
    """Let glibc return gathered weights and other large blocks to the system when they are freed.

    It would keep them for blocks of the same size, which rarely fit: a rank of GPT-2 124M took 1.4x
    the memory. It raises its threshold by itself, up to 32 MB, unless it is set.
    """
    with suppress(AttributeError, OSError):  # not glibc
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**22)


def _param_groups(module: Any) -> list[Any]:
    """Return the weights that FSDP2 gathers before this module: none if its blocks have all."""
    return module._get_fsdp_state()._fsdp_param_groups


def cut_rows(rows: Sequence[slice], part: slice) -> list[slice]:
    """Return the rows at some positions of these ranges, which are counted one after another.

    >>> cut_rows([slice(0, 4), slice(8, 10), slice(20, 30)], slice(2, 8))
    [slice(2, 4, None), slice(8, 10, None), slice(20, 22, None)]
    """
    found: list[slice] = []
    first = 0
    for some in rows:
        begin = some.start + max(part.start - first, 0)
        end = min(some.start + part.stop - first, some.stop)
        if begin < end:
            found.append(slice(begin, end))
        first += some.stop - some.start
    return found


def _drop_grad(parameter: Tensor) -> None:
    parameter.grad = None  # taken already, before it was rounded


def local(tensor: Tensor) -> Tensor:
    """Return the rows that this rank stores of a tensor; the tensor itself if it is not sharded.

    >>> local(torch.ones(2))
    tensor([1., 1.])
    """
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
