"""Optimizer configs, and how the parameters of a model are divided among optimizers.

SGD and Muon are torch's; AdamW, Lion, LAMB, LARS and SOAP are in the files of their names.
`Optimizers` builds them from a config and a model:

- **Weight decay** applies to matrices, convolutions and experts, but not to biases and norms, which
  have one dimension, nor to embeddings. It is decoupled from the gradient, except for SGD and LARS,
  whose papers add it to the gradient.
- **Muon and SOAP** take the hidden matrices. AdamW takes the rest (embeddings, the LM head, norms,
  biases, convolutions), with its own learning rate.

The state of all optimizers is one table of tensors by name, `model.layer.weight|exp_avg`, that fits
into a safetensors file; a run that loads it continues bit-for-bit. The learning rate is not part of
the state: the schedule sets it at every step.

Gradients are passed by name, in the dtype of the model or in float32, with a scale each. AdamW
takes them as they are; for the others they are converted to float32, a few megabytes at a time.

To add an optimizer, write its config with a `build` method and add it to `OptimizerConfig`.
"""

# pyright: basic
from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from ingot.core.config import check_bounds
from ingot.core.device import FUSED_OPTIMIZER_DEVICES
from ingot.core.errors import ConfigError, IngotError
from ingot.nn import Embedding
from ingot.training import adamw, lamb, lars, lion, soap
from ingot.training.chunked import chunk_by_bytes

_LR = (0.0, 1e3)
_FRACTION = (0.0, 1.0)
# Rounding to bfloat16 moves a number by up to 2^-8 of it; 1 - beta has to be larger than that.
_MAX_BETA_IN_BF16 = 0.99

OptimizerLike = torch.optim.Optimizer | adamw.AdamW
Groups = list[dict[str, Any]]


class _Base:
    """Base class of the optimizer configs."""

    hidden_matrices_only: ClassVar[bool] = False
    """Whether it takes the hidden matrices and leaves the rest to AdamW (`adamw_lr`)."""
    elementwise: ClassVar[bool] = False
    """Whether the update of an element depends on that element alone, so rows can be sharded."""
    updates_split_weights: ClassVar[bool] = False
    """Whether it can update bfloat16 weights with their low bits (`MasterWeights.low_bits`)."""
    undecayed_options: ClassVar[dict[str, Any]] = {"weight_decay": 0.0}
    """Options of the group without weight decay."""

    def options(self) -> dict[str, Any]:
        """Return the fields that the optimizer takes as arguments."""
        skipped = ("kind", "adamw_lr")
        names = (f.name for f in fields(self))  # pyright: ignore[reportArgumentType]
        return {name: getattr(self, name) for name in names if name not in skipped}

    def build(self, groups: Groups, low_bits: Mapping[Tensor, Tensor]) -> OptimizerLike:
        """Build the optimizer of these parameter groups."""
        raise NotImplementedError


def _check_betas(betas: tuple[float, float]) -> None:
    if not all(0 <= beta < 1 for beta in betas):
        raise ConfigError(f"betas: must be in [0, 1), got {betas}", hint="give two such numbers")


@dataclass(frozen=True, kw_only=True)
class AdamWConfig(_Base):
    """AdamW (Loshchilov & Hutter 2017): see `ingot.training.adamw`.

    >>> AdamWConfig().betas
    (0.9, 0.95)
    """

    elementwise = True
    updates_split_weights = True

    kind: Literal["adamw"] = "adamw"
    lr: float = 1e-3
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of the two moments."""
    eps: float = 1e-8
    """Added to the denominator."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices."""
    state_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype of the two moments; bf16 halves their memory and needs betas up to 0.99."""

    def __post_init__(self) -> None:
        check_bounds(self, lr=_LR, eps=_FRACTION, weight_decay=_LR)
        _check_betas(self.betas)
        if self.state_dtype == "bf16" and max(self.betas) > _MAX_BETA_IN_BF16:
            raise ConfigError(
                f"betas: must be at most {_MAX_BETA_IN_BF16} for state_dtype bf16, "
                f"got {self.betas}; larger ones would round away the update of a moment",
                hint="lower betas, or set state_dtype = 'fp32'",
            )

    def build(self, groups: Groups, low_bits: Mapping[Tensor, Tensor]) -> OptimizerLike:
        """Build the optimizer of these parameter groups."""
        return adamw.AdamW(groups, low_bits=low_bits, **self.options())


@dataclass(frozen=True, kw_only=True)
class SGDConfig(_Base):
    """SGD with momentum (torch's); weight decay is added to the gradient."""

    elementwise = True

    kind: Literal["sgd"] = "sgd"
    lr: float = 0.1
    """Peak learning rate."""
    momentum: float = 0.9
    """Decay rate of the momentum buffer; 0 for plain SGD."""
    nesterov: bool = False
    """Use Nesterov momentum."""
    weight_decay: float = 0.0
    """L2 penalty of matrices."""

    def __post_init__(self) -> None:
        check_bounds(self, lr=_LR, momentum=_FRACTION, weight_decay=_LR)
        if self.nesterov and not self.momentum:
            raise ConfigError("nesterov: needs a momentum above 0", hint="set optimizer.momentum")

    def build(self, groups: Groups, low_bits: Mapping[Tensor, Tensor]) -> OptimizerLike:
        """Build the optimizer of these parameter groups."""
        fused = groups[0]["params"][0].device.type in FUSED_OPTIMIZER_DEVICES
        return torch.optim.SGD(groups, fused=fused, **self.options())


@dataclass(frozen=True, kw_only=True)
class MuonConfig(_Base):
    """Muon (Jordan et al. 2024; torch's) for hidden matrices, AdamW for the rest.

    Updates are scaled to the RMS of AdamW's, so that learning rates are comparable.
    """

    hidden_matrices_only = True

    kind: Literal["muon"] = "muon"
    lr: float = 1e-3
    """Peak learning rate of the hidden matrices."""
    momentum: float = 0.95
    """Decay rate of the momentum buffer."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices."""
    adamw_lr: float = 1e-3
    """Peak learning rate of AdamW, for everything that is not a hidden matrix."""

    def __post_init__(self) -> None:
        check_bounds(self, lr=_LR, adamw_lr=_LR, momentum=_FRACTION, weight_decay=_LR)

    def build(self, groups: Groups, low_bits: Mapping[Tensor, Tensor]) -> OptimizerLike:
        """Build the optimizer of these parameter groups."""
        return torch.optim.Muon(groups, adjust_lr_fn="match_rms_adamw", **self.options())


@dataclass(frozen=True, kw_only=True)
class LionConfig(_Base):
    """Lion (Chen et al. 2023): see `ingot.training.lion`."""

    elementwise = True

    kind: Literal["lion"] = "lion"
    lr: float = 1e-4
    """Peak learning rate; 3 to 10 times smaller than AdamW's."""
    betas: tuple[float, float] = (0.9, 0.99)
    """Interpolation of the update, and decay rate of the momentum."""
    weight_decay: float = 1.0
    """Decoupled weight decay of matrices; 3 to 10 times larger than AdamW's."""

    def __post_init__(self) -> None:
        check_bounds(self, lr=_LR, weight_decay=_LR)
        _check_betas(self.betas)

    def build(self, groups: Groups, low_bits: Mapping[Tensor, Tensor]) -> OptimizerLike:
        """Build the optimizer of these parameter groups."""
        return lion.Lion(groups, **self.options())


@dataclass(frozen=True, kw_only=True)
class LAMBConfig(_Base):
    """LAMB (You et al. 2019): see `ingot.training.lamb`."""

    undecayed_options: ClassVar[dict[str, Any]] = {"weight_decay": 0.0, "use_trust_ratio": False}

    kind: Literal["lamb"] = "lamb"
    lr: float = 1e-3
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of the two moments."""
    eps: float = 1e-6
    """Added to the denominator."""
    weight_decay: float = 0.01
    """Weight decay of matrices, added to the update before it is scaled."""

    def __post_init__(self) -> None:
        check_bounds(self, lr=_LR, eps=_FRACTION, weight_decay=_LR)
        _check_betas(self.betas)

    def build(self, groups: Groups, low_bits: Mapping[Tensor, Tensor]) -> OptimizerLike:
        """Build the optimizer of these parameter groups."""
        return lamb.LAMB(groups, **self.options())


@dataclass(frozen=True, kw_only=True)
class LARSConfig(_Base):
    """LARS (You et al. 2017): see `ingot.training.lars`."""

    undecayed_options: ClassVar[dict[str, Any]] = {"weight_decay": 0.0, "use_trust_ratio": False}

    kind: Literal["lars"] = "lars"
    lr: float = 1.0
    """Peak learning rate."""
    momentum: float = 0.9
    """Decay rate of the momentum buffer."""
    trust_coefficient: float = 1e-3
    """Length of an update relative to its weights."""
    weight_decay: float = 1e-4
    """Weight decay of matrices, added to the gradient."""

    def __post_init__(self) -> None:
        check_bounds(self, lr=_LR, momentum=_FRACTION, weight_decay=_LR)
        check_bounds(self, trust_coefficient=_FRACTION)

    def build(self, groups: Groups, low_bits: Mapping[Tensor, Tensor]) -> OptimizerLike:
        """Build the optimizer of these parameter groups."""
        return lars.LARS(groups, **self.options())


@dataclass(frozen=True, kw_only=True)
class SOAPConfig(_Base):
    """SOAP (Vyas et al. 2024) for hidden matrices, AdamW for the rest; see `training.soap`."""

    hidden_matrices_only = True

    kind: Literal["soap"] = "soap"
    lr: float = 1e-3
    """Peak learning rate of the hidden matrices."""
    betas: tuple[float, float] = (0.95, 0.95)
    """Decay rates of the two moments; the second also of the preconditioner."""
    eps: float = 1e-8
    """Added to the denominator."""
    weight_decay: float = 0.01
    """Decoupled weight decay of matrices."""
    precondition_frequency: int = 10
    """Steps between two updates of the eigenbasis."""
    adamw_lr: float = 1e-3
    """Peak learning rate of AdamW, for everything that is not a hidden matrix."""

    def __post_init__(self) -> None:
        check_bounds(self, lr=_LR, adamw_lr=_LR, eps=_FRACTION, weight_decay=_LR)
        check_bounds(self, precondition_frequency=(1, 10**6))
        _check_betas(self.betas)

    def build(self, groups: Groups, low_bits: Mapping[Tensor, Tensor]) -> OptimizerLike:
        """Build the optimizer of these parameter groups."""
        return soap.SOAP(groups, **self.options())


OptimizerConfig = (
    AdamWConfig | SGDConfig | MuonConfig | LionConfig | LAMBConfig | LARSConfig | SOAPConfig
)


def select_decayed(model: nn.Module) -> dict[str, bool]:
    """Return for each trained parameter whether it has weight decay.

    Parameters with at least two dimensions have it, except embeddings.

    >>> select_decayed(nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 1)))
    {'0.weight': False, '1.weight': True, '1.bias': False}
    """
    tables = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, Embedding | nn.Embedding)
    }
    return {
        name: parameter.dim() >= 2 and id(parameter) not in tables
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


class Optimizers:
    """The optimizers of one model: one, or one for hidden matrices and one for the rest.

    `weights` are the tensors to update, by the names of the model's parameters; by default the
    parameters themselves. Master weights are passed here, and in `low_bits` the low halves of split
    ones, which only AdamW can update.

    >>> model = nn.Linear(2, 1)
    >>> optimizers = Optimizers(AdamWConfig(lr=0.1), model)
    >>> optimizers.step({"weight": torch.ones(1, 2), "bias": torch.ones(1)}, lr_factor=0.5)
    >>> sorted(optimizers.state_dict())[:3]
    ['bias|exp_avg', 'bias|exp_avg_sq', 'bias|step']
    """

    def __init__(
        self,
        config: OptimizerConfig,
        model: nn.Module,
        weights: Mapping[str, Tensor] | None = None,
        low_bits: Mapping[str, Tensor] | None = None,
    ) -> None:
        decayed = select_decayed(model)
        known = dict(model.named_parameters()) if weights is None else weights
        self.weights = {name: known[name] for name in decayed}
        self._names = {id(weight): name for name, weight in self.weights.items()}
        if not self.weights:
            raise IngotError(
                "model: no parameter requires gradients", hint="set requires_grad on some"
            )
        if low_bits and not config.updates_split_weights:
            raise IngotError(
                f"{config.kind}: cannot update split master weights",
                hint="pass whole ones: MasterWeights(model, precision), without `split`",
            )
        halves = {self.weights[name]: half for name, half in (low_bits or {}).items()}
        hidden = _hidden_matrices(model, decayed)
        self._parts = list(_build(config, self.weights, decayed, hidden, halves))
        self._peak_lrs = [[group["lr"] for group in part.param_groups] for part in self._parts]

    def step(
        self,
        grads: dict[str, Tensor],
        grad_scales: Mapping[str, float] | None = None,
        lr_factor: float = 1.0,
        row_stats: dict[str, Tensor] | None = None,
    ) -> None:
        """Update the weights by gradients times their scales; `lr_factor` is of the peak rates.

        A gradient is removed from `grads` once it was used. Weights without one are unchanged.
        `row_stats` gets the sums over rows that AdamW returns, if `has_row_stats`.
        """
        for part, peak_lrs in zip(self._parts, self._peak_lrs, strict=True):
            for group, peak_lr in zip(part.param_groups, peak_lrs, strict=True):
                group["lr"] = peak_lr * lr_factor
            own = (weight for group in part.param_groups for weight in group["params"])
            with_grad = (weight for weight in own if self._names[id(weight)] in grads)
            for chunk in chunk_by_bytes(with_grad):
                names = [self._names[id(weight)] for weight in chunk]
                scaled = [(grads.pop(name), (grad_scales or {}).get(name, 1.0)) for name in names]
                of_chunk: dict[Tensor, Tensor] = {}
                collected = None if row_stats is None else of_chunk
                _apply_update(part, dict(zip(chunk, scaled, strict=True)), collected)
                if row_stats is not None:
                    row_stats |= {self._names[id(w)]: rows for w, rows in of_chunk.items()}

    @property
    def has_row_stats(self) -> bool:
        """Whether all weights are AdamW's and on the CPU, where its update sums up rows."""
        device = next(iter(self.weights.values())).device.type
        return device == "cpu" and all(isinstance(part, adamw.AdamW) for part in self._parts)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the optimizer state by name: the tensors themselves, not copies."""
        return {
            f"{self._names[id(weight)]}|{key}": value
            for part in self._parts
            for weight, values in part.state.items()
            for key, value in values.items()
            if value is not None
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy a state that `state_dict` returned; moments go to the device of their weight."""
        by_weight: dict[str, dict[str, Tensor]] = {}
        for name, value in state.items():
            weight, _, key = name.rpartition("|")
            by_weight.setdefault(weight, {})[key] = value
        if unknown := sorted(by_weight.keys() - self.weights.keys()):
            raise IngotError(
                f"optimizer state: {len(unknown)} parameters are not in the model: "
                f"{', '.join(unknown[:3])}"[:300],
                hint="resume with the recipe that started the run",
            )
        for part in self._parts:
            for group in part.param_groups:
                for weight in group["params"]:
                    values = by_weight.get(self._names[id(weight)], {})
                    part.state[weight] = {k: _copy_like(v, weight) for k, v in values.items()}


def _copy_like(value: Tensor, weight: Tensor) -> Tensor:
    """Copy a state tensor to the device of its weight; step counters stay on the host."""
    return value.to(weight.device if value.dim() else "cpu", copy=True)


def _apply_update(
    part: OptimizerLike,
    grads: dict[Tensor, tuple[Tensor, float]],
    row_stats: dict[Tensor, Tensor] | None,
) -> None:
    """Update these weights of an optimizer, and no others."""
    if isinstance(part, adamw.AdamW):
        part.apply_update(grads, row_stats)
        return
    for weight, (grad, scale) in grads.items():
        weight.grad = grad.float() if scale == 1.0 else grad.float().mul_(scale)
    part.step()
    for weight in grads:
        weight.grad = None


def _hidden_matrices(model: nn.Module, decayed: Mapping[str, bool]) -> set[str]:
    """Return the names of the matrices between the embedding and the LM head."""
    quantized = getattr(model, "has_quantized_head", False)
    head = None if quantized else id(getattr(model, "lm_head_weight", None))
    return {
        name
        for name, parameter in model.named_parameters()
        if decayed.get(name) and parameter.dim() == 2 and id(parameter) != head
    }


def _build(
    config: OptimizerConfig,
    weights: Mapping[str, Tensor],
    decayed: Mapping[str, bool],
    hidden: set[str],
    low_bits: Mapping[Tensor, Tensor],
) -> Iterator[OptimizerLike]:
    if config.hidden_matrices_only:
        matrices = [weight for name, weight in weights.items() if name in hidden]
        if matrices:
            yield config.build([{"params": matrices}], low_bits)
        rest = {name: weight for name, weight in weights.items() if name not in hidden}
        if rest:
            other = AdamWConfig(lr=config.adamw_lr, weight_decay=config.weight_decay)  # pyright: ignore
            yield from _build(other, rest, decayed, set(), low_bits)
        return
    with_decay = [weight for name, weight in weights.items() if decayed[name]]
    without = [weight for name, weight in weights.items() if not decayed[name]]
    groups = [{"params": with_decay}, {"params": without, **config.undecayed_options}]
    yield config.build([group for group in groups if group["params"]], low_bits)
