"""Optimizers as configs, and the rules by which they share the parameters of a model.

SGD and Muon are torch's; AdamW, Lion, LAMB, LARS and SOAP are in the files of their names.
`Optimizers` makes them of a config and a model:

- **Weight decay** is for matrices (and convolutions, and experts): not for biases and norms, which
  have one dimension, nor for embeddings. It is decoupled from the gradient, but for SGD and LARS,
  whose papers add it to the gradient.
- **Muon and SOAP** are for hidden matrices. The rest (embeddings, the head, norms, biases,
  convolutions) goes by AdamW, with a learning rate of its own.

The state of all of it is one table of tensors by name, `model.layer.weight|mean`, which a file
of safetensors holds; loaded again, the run goes on to the bit. The learning rate is no state: it is
the schedule's, set at every step.

Gradients come by name, in the dtype of the model or in float32, with a factor each. AdamW takes
them as they are. For the others they are turned into float32, some megabytes at a time.
"""

# pyright: basic
from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ingot.core.config import check_bounds
from ingot.core.errors import ConfigError, IngotError
from ingot.nn import Embedding
from ingot.training import adamw, lamb, lars, lion, soap
from ingot.training.chunked import chunk_by_bytes

_LR = (0.0, 1e3)
_SHARE = (0.0, 1.0)
# Half a unit of bfloat16 is up to 2^-8 of a number: what is 1 - beta of it has to be more.
_LARGEST_BETA_IN_BF16 = 0.99


def _betas(of: Any) -> None:
    if not all(0 <= beta < 1 for beta in of.betas):
        raise ConfigError(f"betas are {of.betas}", hint="give two numbers from 0 to below 1")


@dataclass(frozen=True, kw_only=True)
class AdamWConfig:
    """AdamW (Loshchilov & Hutter 2017): see `ingot.training.adamw`.

    >>> AdamWConfig().betas
    (0.9, 0.95)
    """

    kind: Literal["adamw"] = "adamw"
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    state_dtype: Literal["fp32", "bf16"] = "fp32"
    """What the moments are kept in."""

    def __post_init__(self) -> None:
        check_bounds(self, lr=_LR, eps=_SHARE, weight_decay=_LR)
        _betas(self)
        if self.state_dtype == "bf16" and max(self.betas) > _LARGEST_BETA_IN_BF16:
            raise ConfigError(
                f"betas are {self.betas}, and moments in bf16",
                hint=f"give betas up to {_LARGEST_BETA_IN_BF16}: beyond, what a step takes from "
                "a moment is lost in rounding; or state_dtype = 'fp32'",
            )


@dataclass(frozen=True, kw_only=True)
class SGDConfig:
    """torch's SGD with momentum; the decay is added to the gradient."""

    kind: Literal["sgd"] = "sgd"
    lr: float = 0.1
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check_bounds(self, lr=_LR, momentum=_SHARE, weight_decay=_LR)
        if self.nesterov and not self.momentum:
            raise ConfigError("nesterov without momentum", hint="give a momentum above 0")


@dataclass(frozen=True, kw_only=True)
class MuonConfig:
    """torch's Muon (Jordan et al. 2024) for hidden matrices, steps as long as AdamW's; AdamW."""

    kind: Literal["muon"] = "muon"
    lr: float = 1e-3
    momentum: float = 0.95
    weight_decay: float = 0.1
    adamw_lr: float = 1e-3
    """Of AdamW, for what is no hidden matrix."""

    def __post_init__(self) -> None:
        check_bounds(self, lr=_LR, adamw_lr=_LR, momentum=_SHARE, weight_decay=_LR)


@dataclass(frozen=True, kw_only=True)
class LionConfig:
    """Lion (Chen et al. 2023): see `ingot.training.lion`."""

    kind: Literal["lion"] = "lion"
    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 1.0

    def __post_init__(self) -> None:
        check_bounds(self, lr=_LR, weight_decay=_LR)
        _betas(self)


@dataclass(frozen=True, kw_only=True)
class LAMBConfig:
    """LAMB (You et al. 2019): see `ingot.training.lamb`."""

    kind: Literal["lamb"] = "lamb"
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        check_bounds(self, lr=_LR, eps=_SHARE, weight_decay=_LR)
        _betas(self)


@dataclass(frozen=True, kw_only=True)
class LARSConfig:
    """LARS (You et al. 2017): see `ingot.training.lars`."""

    kind: Literal["lars"] = "lars"
    lr: float = 1.0
    momentum: float = 0.9
    trust_coefficient: float = 1e-3
    weight_decay: float = 1e-4

    def __post_init__(self) -> None:
        check_bounds(self, lr=_LR, momentum=_SHARE, trust_coefficient=_SHARE, weight_decay=_LR)


@dataclass(frozen=True, kw_only=True)
class SOAPConfig:
    """SOAP (Vyas et al. 2024) for hidden matrices, AdamW for the rest; see `training.soap`."""

    kind: Literal["soap"] = "soap"
    lr: float = 1e-3
    betas: tuple[float, float] = (0.95, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.01
    precondition_frequency: int = 10
    """Steps from one turn of the basis to the next."""
    adamw_lr: float = 1e-3

    def __post_init__(self) -> None:
        check_bounds(
            self,
            lr=_LR,
            adamw_lr=_LR,
            eps=_SHARE,
            weight_decay=_LR,
            precondition_frequency=(1, 10**6),
        )
        _betas(self)


OptimizerConfig = (
    AdamWConfig | SGDConfig | MuonConfig | LionConfig | LAMBConfig | LARSConfig | SOAPConfig
)

OptimizerLike = torch.optim.Optimizer | adamw.AdamW

_OURS: dict[type, Any] = {
    LionConfig: lion.Lion,
    LAMBConfig: lamb.LAMB,
    LARSConfig: lars.LARS,
    SOAPConfig: soap.SOAP,
}


def select_decayed(model: nn.Module) -> dict[str, bool]:
    """Whether each trained parameter has weight decay: matrices and more, but no embeddings.

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

    `weights` are what is updated, by the names of the model's parameters, if not these themselves:
    the masters of a model in half precision. `low` are the lower halves of those that are in two
    parts, which only AdamW can move.

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
        decay = select_decayed(model)
        known = dict(model.named_parameters()) if weights is None else weights
        self.weights = {name: known[name] for name in decay}
        self._names = {id(weight): name for name, weight in self.weights.items()}
        if not self.weights:
            raise IngotError("no parameter is to be trained", hint="let some require gradients")
        if low_bits and not isinstance(config, AdamWConfig):
            raise IngotError(
                f"{config.kind} cannot move masters in two parts",
                hint="give it whole ones: MasterWeights(model, precision), without `split`",
            )
        halves = {self.weights[name]: half for name, half in (low_bits or {}).items()}
        self._parts = list(_parts(config, self.weights, decay, _hidden(model, decay), halves))
        self._peaks = [[group["lr"] for group in part.param_groups] for part in self._parts]

    def step(
        self,
        grads: dict[str, Tensor],
        grad_scales: Mapping[str, float] | None = None,
        lr_factor: float = 1.0,
    ) -> None:
        """Update the weights by gradients, each times its factor; `rate` is of the learning rates.

        A gradient is taken out of `grads` as soon as it is used. Weights without one stay.
        """
        for part, peaks in zip(self._parts, self._peaks, strict=True):
            for group, peak in zip(part.param_groups, peaks, strict=True):
                group["lr"] = peak * lr_factor
            own = (weight for group in part.param_groups for weight in group["params"])
            for some in chunk_by_bytes(
                weight for weight in own if self._names[id(weight)] in grads
            ):
                names = [self._names[id(weight)] for weight in some]
                given = [(grads.pop(name), (grad_scales or {}).get(name, 1.0)) for name in names]
                _apply_update(part, dict(zip(some, given, strict=True)))

    def state_dict(self) -> dict[str, Tensor]:
        """What the next steps depend on besides the weights: the tensors themselves, no copies."""
        return {
            f"{self._names[id(weight)]}|{key}": value
            for part in self._parts
            for weight, values in part.state.items()
            for key, value in values.items()
            if value is not None
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a state that `state` gave in another process."""
        by_weight: dict[str, dict[str, Tensor]] = {}
        for name, value in state.items():
            weight, _, key = name.rpartition("|")
            by_weight.setdefault(weight, {})[key] = value
        if unknown := sorted(by_weight.keys() - self.weights.keys()):
            raise IngotError(
                f"the optimizer's state has {len(unknown)} parameters that the model has not: "
                f"{', '.join(unknown[:3])}"[:300],
                hint="resume with the recipe that the run was started with",
            )
        for part in self._parts:
            for group in part.param_groups:
                for weight in group["params"]:
                    found = by_weight.get(self._names[id(weight)], {})
                    part.state[weight] = {key: value.clone() for key, value in found.items()}


def _apply_update(part: OptimizerLike, grads: dict[Tensor, tuple[Tensor, float]]) -> None:
    """Have an optimizer move these weights, and no others."""
    if isinstance(part, adamw.AdamW):
        part.apply_update(grads)
        return
    for weight, (grad, factor) in grads.items():
        weight.grad = grad.float() if factor == 1.0 else grad.float().mul_(factor)
    part.step()
    for weight in grads:
        weight.grad = None


def _hidden(model: nn.Module, decay: Mapping[str, bool]) -> set[str]:
    """The matrices between the embedding and the head: what Muon and SOAP are for."""
    head = id(getattr(model, "lm_head_weight", None))
    return {
        name
        for name, parameter in model.named_parameters()
        if decay.get(name) and parameter.dim() == 2 and id(parameter) != head
    }


def _parts(
    config: OptimizerConfig,
    weights: Mapping[str, Tensor],
    decay: Mapping[str, bool],
    hidden: set[str],
    low_bits: Mapping[Tensor, Tensor],
) -> Iterator[OptimizerLike]:
    if isinstance(config, MuonConfig | SOAPConfig):
        rest = {name: weight for name, weight in weights.items() if name not in hidden}
        matrices = [weight for name, weight in weights.items() if name in hidden]
        if matrices:
            yield _matrix_optimizer(config, matrices)
        if rest:
            other = AdamWConfig(lr=config.adamw_lr, weight_decay=config.weight_decay)
            yield from _parts(other, rest, decay, set(), low_bits)
        return
    options = {f.name: getattr(config, f.name) for f in fields(config) if f.name != "kind"}
    plain = {"weight_decay": 0.0} | (
        {"use_trust_ratio": False} if isinstance(config, LAMBConfig | LARSConfig) else {}
    )
    decayed = [weight for name, weight in weights.items() if decay[name]]
    others = [weight for name, weight in weights.items() if not decay[name]]
    groups = [{"params": decayed}] * bool(decayed) + [{"params": others, **plain}] * bool(others)
    match config:
        case AdamWConfig():
            yield adamw.AdamW(groups, low_bits=low_bits, **options)
        case SGDConfig():
            yield torch.optim.SGD(groups, fused=True, **options)
        case _:
            yield _OURS[type(config)](groups, **options)


def _matrix_optimizer(
    config: MuonConfig | SOAPConfig, matrices: list[Tensor]
) -> torch.optim.Optimizer:
    decay = config.weight_decay
    if isinstance(config, MuonConfig):
        return torch.optim.Muon(
            matrices,
            lr=config.lr,
            momentum=config.momentum,
            weight_decay=decay,
            adjust_lr_fn="match_rms_adamw",
        )
    options = {
        "betas": config.betas,
        "eps": config.eps,
        "precondition_frequency": config.precondition_frequency,
    }
    return soap.SOAP(matrices, lr=config.lr, weight_decay=decay, **options)
