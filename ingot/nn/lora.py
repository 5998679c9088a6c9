"""LoRA adapters of a decoder: one that is trained, or slots for many that are served.

    decoder.add_lora(LoraConfig(rank=16), seed=0)    # freezes the base and adds one to train
    decoder.lora_weights()                           # its A and B by layer and target

    decoder.add_lora_slots(max_loras=8, max_rank=16)
    decoder.set_adapter(3, weights, scale=2.0)       # rows with layout.adapters == 3 use it

Targets have PEFT's names: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj. A fused
layer holds the adapters of its parts: A's are stacked along the rank, and the B of a part has zeros
in the columns of the others. `qkv_proj` is one adapter of the whole fused projection, as in GPT-2,
whose checkpoints have a single weight for it (c_attn).

A row has the same bits in both forms: a slot is padded with zeros to its rank, and adding 0 to an
accumulator does not change it.

Legend: T tokens, R rank, E slots, P parts of a layer, D channels.
"""

# pyright: basic
from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ingot import ops
from ingot.core.config import check_bounds
from ingot.core.errors import ConfigError, IngotError, UnknownName
from ingot.nn.dropout import Dropout
from ingot.ops.arguments import accum_dtype

MAX_RANK = 1024
MAX_LORAS = 4096
QKV = "qkv_proj"


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """A LoRA adapter to train: `scale * (x A^T) B` is added to linear layers.

    >>> LoraConfig(rank=8, alpha=16.0).scale
    2.0
    """

    kind: Literal["lora"] = "lora"
    rank: int = 16
    """Rows of A and B."""
    alpha: float = 32.0
    """What A and B compute is multiplied by alpha / rank."""
    targets: Literal["all"] | tuple[str, ...] = "all"
    """Layers to adapt: "all", or names of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj and
    down_proj."""
    dropout: float = 0.0
    """Dropout of the input of A."""

    def __post_init__(self) -> None:
        check_bounds(self, rank=(1, MAX_RANK), alpha=(1e-6, 1e6), dropout=(0.0, 0.99))
        names = () if self.targets == "all" else self.targets
        if not self.targets or len(set(names)) < len(names):
            raise ConfigError(
                f"targets: must be distinct names, got {self.targets!r}"[:300],
                hint='give "all" or a list of layers, each once',
            )

    @property
    def scale(self) -> float:
        """Factor of what A and B compute."""
        return self.alpha / self.rank


class LoraWeights(NamedTuple):
    """A (R, in) and B (R, out) of one target; PEFT stores the transpose of this B."""

    a: Tensor
    b: Tensor


LoraKey = tuple[int, str]
"""Index of the layer, and target."""


@dataclass(frozen=True)
class LoraPart:
    """Columns of the output of a linear layer that have an adapter of their own."""

    target: str
    first: int
    width: int


@dataclass(frozen=True)
class LoraShape:
    """The targets of a layer and the columns that they adapt."""

    in_features: int
    outputs: tuple[tuple[LoraPart, ...], ...]
    """The parts of each weight: one weight, or those of gate and up."""

    @staticmethod
    def of(linear: nn.Linear, *targets: str, widths: Sequence[int] | None = None) -> LoraShape:
        """Describe a linear layer with one target, or with several that share its columns."""
        widths = [linear.out_features] if widths is None else widths
        firsts = [sum(widths[:i]) for i in range(len(widths))]
        parts = tuple(map(LoraPart, targets, firsts, widths))
        return LoraShape(linear.in_features, (parts,))

    @property
    def targets(self) -> tuple[str, ...]:
        """The targets in the order in which their A's are stacked."""
        return tuple(part.target for parts in self.outputs for part in parts)

    def find(self, target: str) -> LoraPart | None:
        """Return the columns of a target; None if it is not here."""
        parts = [part for parts in self.outputs for part in parts]
        if target == QKV and len(self.outputs[0]) > 1:
            return LoraPart(QKV, 0, sum(part.width for part in parts))
        return next((part for part in parts if part.target == target), None)


LoraSite = tuple[nn.Module, LoraShape]
"""A module that takes adapters as its attribute `lora`, and their shape."""


class LoraTerm(NamedTuple):
    """The LoRA arguments of `ops.linear` (one B) or `ops.gated_linear` (two)."""

    h: Tensor
    bs: tuple[Tensor, ...]
    index: Tensor | None


class LoraAdapter(nn.Module):
    """The adapter of one layer, to train: A and B of each target as parameters.

    >>> shape = LoraShape.of(nn.Linear(8, 4), "o_proj")
    >>> adapter = LoraAdapter(shape, ["o_proj"], LoraConfig(rank=2), torch.Generator(), 0)
    >>> adapter(torch.ones(3, 8), None).h.shape
    torch.Size([3, 2])
    """

    def __init__(
        self,
        shape: LoraShape,
        targets: Sequence[str],
        config: LoraConfig,
        random: torch.Generator,
        dropout_layer: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self._outputs, self._rank, self._scale = shape.outputs, config.rank, config.scale
        self._widths = [sum(part.width for part in parts) for parts in shape.outputs]
        self.dropout = Dropout(config.dropout, dropout_layer) if config.dropout else None
        a, b = {}, {}
        self._parts: dict[str, LoraPart] = {}
        bound = 1 / math.sqrt(shape.in_features)  # Kaiming's for a = sqrt(5), as in PEFT
        for target in targets:
            part = shape.find(target)
            assert part is not None
            values = torch.empty(config.rank, shape.in_features)
            a[target] = values.uniform_(-bound, bound, generator=random).to(device, dtype)
            b[target] = torch.zeros(config.rank, part.width, dtype=dtype, device=device)
            self._parts[target] = part
        self.a, self.b = (nn.ParameterDict(values) for values in (a, b))

    def weights(self) -> dict[str, LoraWeights]:
        """Return A and B of each target: the parameters themselves, detached."""
        pairs = {target: (self.a[target], self.b[target]) for target in self._parts}
        return {t: LoraWeights(a.detach(), b.detach()) for t, (a, b) in pairs.items()}

    def forward(self, x_TD: Tensor, adapters_T: Tensor | None) -> LoraTerm:
        """Compute the arguments for these rows; `adapters_T` may exclude some of them by -1."""
        if self.dropout is not None:
            x_TD = self.dropout(x_TD)
        a = torch.cat([self.a[target] for target in self._parts])
        scale = torch.full((1,), self._scale, dtype=accum_dtype(a.dtype), device=a.device)
        h = ops.lora_shrink(x_TD, a[None], scale, adapters_T)
        if len(self._outputs) == 1:
            return LoraTerm(h, (self._fused(),), adapters_T)
        return self._gated(h, adapters_T)

    def _fused(self) -> Tensor:
        """Return the B of one weight, with zeros in the columns of other parts."""
        width = self._widths[0]
        padded = [
            F.pad(self.b[target], (part.first, width - part.first - part.width))
            if part.width < width
            else self.b[target]
            for target, part in self._parts.items()
        ]
        return (padded[0] if len(padded) == 1 else torch.cat(padded))[None]

    def _gated(self, h: Tensor, adapters_T: Tensor | None) -> LoraTerm:
        """Return the B of gate and up; 0 for one that is not a target."""
        rank = self._rank
        present = [parts[0].target in self._parts for parts in self._outputs]
        if not all(present):
            h = F.pad(h, (0, rank) if present[0] else (rank, 0))
        bs = tuple(
            self.b[parts[0].target][None] if here else h.new_zeros(1, rank, width, dtype=self.dtype)
            for parts, here, width in zip(self._outputs, present, self._widths, strict=True)
        )
        return LoraTerm(h, bs, adapters_T)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of A and B."""
        return next(iter(self.a.values())).dtype


class LoraSlots(nn.Module):
    """The adapters of one layer, to serve: E slots in memory that is allocated once.

    A slot is filled in place, so that captured steps see the new adapter.

    >>> slots = LoraSlots(LoraShape.of(nn.Linear(8, 4), "o_proj"), max_loras=2, max_rank=4)
    >>> slots.a.shape, slots.bs[0].shape
    (torch.Size([2, 4, 8]), torch.Size([2, 4, 4]))
    """

    a: Tensor

    def __init__(
        self,
        shape: LoraShape,
        max_loras: int,
        max_rank: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self._shape, self._rank = shape, max_rank
        options: Any = {"dtype": dtype, "device": device}
        rows = max_rank * len(shape.targets)
        a = torch.zeros(max_loras, rows, shape.in_features, **options)
        self.register_buffer("a", a, persistent=False)
        for number, parts in enumerate(shape.outputs):
            width = sum(part.width for part in parts)
            b = torch.zeros(max_loras, max_rank * len(parts), width, **options)
            self.register_buffer(f"b{number}", b, persistent=False)
        self.scale = torch.zeros(max_loras, dtype=accum_dtype(dtype), device=device)

    @property
    def bs(self) -> tuple[Tensor, ...]:
        """The B's of each weight, (E, rows of A, out)."""
        return tuple(self.get_buffer(f"b{number}") for number in range(len(self._shape.outputs)))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self.scale = self.scale.to(self.a.device)  # stays in float32 when the model is converted
        return self

    @torch.no_grad()
    def set(self, slot: int, weights: Mapping[str, LoraWeights], scale: float) -> None:
        """Fill a slot with the targets of this layer; those that are missing are 0."""
        for tensor in (self.a, *self.bs):
            tensor[slot].zero_()
        self.scale[slot] = scale
        for target, (a, b) in weights.items():
            rows, output, part = self._place(target)
            _check_weights(target, a, b, self._rank, self._shape.in_features, part.width)
            self.a[slot, rows : rows + len(a)] = a.to(self.a.device, self.a.dtype)
            offset = 0 if len(self._shape.outputs) > 1 else rows
            columns = slice(part.first, part.first + part.width)
            self.bs[output][slot, offset : offset + len(b), columns] = b.to(
                self.a.device, self.a.dtype
            )

    def _place(self, target: str) -> tuple[int, int, LoraPart]:
        """Return the first row of a target's A, its weight and its columns."""
        part = self._shape.find(target)
        if part is None:
            raise UnknownName("LoRA target", target, self._shape.targets)
        number = 0 if target == QKV else self._shape.targets.index(target)
        return number * self._rank, number if len(self._shape.outputs) > 1 else 0, part

    def forward(self, x_TD: Tensor, adapters_T: Tensor | None) -> LoraTerm | None:
        """Compute the arguments for these rows; None without adapters: the base alone."""
        if adapters_T is None:
            return None
        h = ops.lora_shrink(x_TD, self.a, self.scale, adapters_T)
        return LoraTerm(h, self.bs, adapters_T)


def _check_weights(
    target: str, a: Tensor, b: Tensor, max_rank: int, in_features: int, out_features: int
) -> None:
    rank = a.shape[0] if a.dim() == 2 else 0
    if a.shape != (rank, in_features) or b.shape != (rank, out_features) or rank > max_rank:
        raise IngotError(
            f"LoRA weights of {target}: expected a ({in_features} columns) and b ({out_features} "
            f"columns) of at most {max_rank} rows, got {tuple(a.shape)} and {tuple(b.shape)}",
            hint="use an adapter of this model, and raise max_rank for a larger rank",
        )


def select_targets(config: LoraConfig, available: Iterable[str], fused_qkv: bool) -> list[str]:
    """Return the targets of a config in a model; raise an error for one that it does not have.

    >>> select_targets(LoraConfig(), ["q_proj", "k_proj", "v_proj", "o_proj"], fused_qkv=False)
    ['q_proj', 'k_proj', 'v_proj', 'o_proj']
    """
    separate = [t for t in available if t in ("q_proj", "k_proj", "v_proj")]
    others = [t for t in available if t not in separate]
    if config.targets == "all":
        return [*([QKV] if fused_qkv else separate), *others]
    names = [*separate, QKV, *others]
    for target in config.targets:
        if target not in names:
            raise UnknownName("LoRA target", target, names)
    if QKV in config.targets and set(separate) & set(config.targets):
        raise ConfigError(
            f"targets: {QKV} is q_proj, k_proj and v_proj together",
            hint="give either the fused projection or its parts",
        )
    return list(config.targets)
