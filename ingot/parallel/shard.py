"""Fully sharded data parallelism with torch's FSDP2, with the bits of a single process.

Each rank stores a part of the rows of every weight. FSDP2 gathers the weights of a block before the
block is computed and frees them afterwards; the gradients of a block are summed over the ranks as
soon as its backward has computed them, and each rank keeps those of its rows. With several
replicas, the ranks of a replica shard the weights among themselves, and the sums are then added
over the replicas (HSDP). With tensor parallelism, the rows that are sharded are those of the rank
(`ingot.parallel.tensor`).

The sums are those of `ingot.parallel.ranks`, in float32: `set_custom_reduce_scatter` replaces the
library's own, and `set_all_reduce_hook` sees the result before FSDP2 rounds it to the dtype of the
weight.
"""

# pyright: basic
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.tensor import DTensor

from ingot.core.errors import ConfigError
from ingot.nn.mlp import MoE
from ingot.parallel import ranks as collectives
from ingot.parallel.expert import ExpertDispatcher
from ingot.parallel.mesh import Mesh
from ingot.parallel.ranks import row_slice
from ingot.parallel.tensor import divide_decoder

OnGrad = Callable[[str, Tensor], None]


class _OrderedReduceScatter(DefaultReduceScatter):
    def __init__(self, dtype: torch.dtype, adds: bool) -> None:
        self._dtype, self._adds = dtype, adds

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        values = input_tensor if self._adds else torch.zeros_like(input_tensor)
        collectives.reduce_scatter(output_tensor, values, group, self._dtype)


class ShardedModel:
    """A model whose weights are sharded over ranks; `on_grad` takes the gradients of its rows.

    The ranks of `fsdp` and `tp` store different rows, those of `dp` the same. `grad_dtype` is the
    dtype of what a rank adds to a sum: a gradient of one backward has that of the weights, and is
    sent in it. With `expert_parallel`, experts are computed by the ranks that store them. The
    module itself is changed: its parameters become DTensors of the same names, those of experts
    local ones.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        on_grad: OnGrad,
        grad_dtype: torch.dtype = torch.float32,
        expert_parallel: bool = False,
    ) -> None:
        assert mesh.fsdp_mesh is not None
        self.model: Any = model
        self.mesh = mesh
        self._divided = divide_decoder(model, mesh.tp) if mesh.tp.size > 1 else {}
        self._rows = {n: len(p) if p.dim() else 1 for n, p in model.named_parameters()}
        self._on_grad, self._grad_dtype = on_grad, grad_dtype
        self._experts = self._dispatch_experts() if expert_parallel else []
        ignored = {weight for experts in self._experts for weight in experts.weights}
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        for module in (*getattr(model, "blocks", ()), model):
            fully_shard(module, mesh=mesh.fsdp_mesh, mp_policy=policy, ignored_params=ignored)
        self._names = {id(p): name for name, p in model.named_parameters()}
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_drop_grad)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                self._install(module)

    def _dispatch_experts(self) -> list[ExpertDispatcher]:
        layers = {n: m for n, m in self.model.named_modules() if isinstance(m, MoE)}
        if not layers:
            raise ConfigError("parallel.ep: the model has no experts", hint="remove parallel.ep")

        def take(layer: str, weight: str, grad: Tensor) -> None:
            self._on_grad(f"{layer}.{weight}", grad)

        return [ExpertDispatcher(moe, self.mesh, partial(take, n)) for n, moe in layers.items()]

    def _install(self, module: Any) -> None:
        replicas = self.mesh.dp.group
        assert replicas is not None
        group = module._get_fsdp_state()._fsdp_param_groups[0]
        parameters = [p.sharded_param for p in group.fsdp_params if p.sharded_param.requires_grad]

        def take(reduced: Tensor) -> None:
            collectives.all_reduce(reduced, replicas)
            self._split(parameters, reduced)

        # Outside of the blocks, the ranks of `cp` compute the same gradients.
        adds = module is not self.model or self.mesh.cp.is_main
        module.set_custom_reduce_scatter(_OrderedReduceScatter(self._grad_dtype, adds))
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        module.set_all_reduce_hook(take)

    def _split(self, parameters: list[Tensor], reduced: Tensor) -> None:
        """Take the gradients of a block from the flat vector that FSDP2 has reduced."""
        begin = 0
        for parameter in parameters:
            name, own = self._names[id(parameter)], local(parameter)
            rows = self._rows[name]
            self._on_grad(name, reduced[begin : begin + own.numel()].view(own.shape))
            begin += -(-rows // self.mesh.fsdp.size) * (parameter.numel() // rows)
        assert begin == reduced.numel(), "every weight of a block has a gradient"

    def owns(self, name: str) -> bool:
        """Return whether this rank's rows of a weight are those that are saved, and counted in
        norms: other ranks may have the same."""
        divided = name.partition("|")[0] in self._divided
        return self.mesh.dp.is_main and (divided or self.mesh.tp.is_main)

    def has_rows(self, name: str, tensor: Tensor) -> bool:
        """Return whether a tensor has the rows of a weight: `weight`, or `weight|moment`."""
        return tensor.dim() > 0 and name.partition("|")[0] in self._rows

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

    def reshard(self) -> None:
        """Free gathered weights, so that the next forward gathers updated ones."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


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
