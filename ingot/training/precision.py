"""What dtype a model is trained in.

    fp32   everything in float32
    bf16   weights, activations and gradients in bfloat16; the optimizer's weights in float32
    fp16   the same in float16, with a loss that is scaled so that small gradients do not vanish

The model has one dtype, that in which it will be served: what training sees is what serving
computes. A step of an optimizer is often smaller than half a unit of a bfloat16 weight (2^-9 of it)
and would be lost, so the optimizer has a master of each weight in float32, and the model's is the
master rounded.

In bf16 with AdamW the master is in two parts: the upper 16 bits, rounded, are the model's weight
itself, and the lower 16 are kept beside it (see `ingot.ops.adamw`). That is half of what a master
takes, and no bit is lost; the model's weight is rounded to nearest, ties away from 0. Other
optimizers, and fp16, whose bits are not float32's, have masters of their own.

Gradients of several micro-batches are added up in float32 too; those of one alone stay as they are.

In fp16 the loss is multiplied by a scale before it is differentiated: 2^16 at first, halved
when a gradient overflows (that step moves nothing), doubled after 2000 steps without
(Micikevicius et al. 2017).
"""

# pyright: basic, reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from functools import partial

import torch
from torch import Tensor, nn

from ingot.ops.adamw import split as halves

_FIRST_SCALE = 2.0**16
_LEAST_SCALE = 2.0**-14
_GROWTH_EVERY = 2000


class Precision(Enum):
    """The dtype of the model while it is trained."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"

    @property
    def dtype(self) -> torch.dtype:
        """torch's name for it."""
        return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[self.value]


class MasterWeights:
    """The weights that the optimizer updates, and their gradients.

    Converts the model. `weights` are its parameters themselves in float32, and with `split` in
    bfloat16: then `low_bits` has the lower half of each master. `grads` are those of all backwards
    since they were cleared, by the same names.

    >>> model = nn.Linear(2, 1)
    >>> masters = MasterWeights(model, Precision.BF16)
    >>> model(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
    >>> masters.grads["weight"], model.weight.grad
    (tensor([[1., 1.]], dtype=torch.bfloat16), None)
    """

    def __init__(self, model: nn.Module, precision: Precision, split: bool = False) -> None:
        parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.loss_scale = _FIRST_SCALE if precision is Precision.FP16 else 1.0
        self._scales, self._good = precision is Precision.FP16, 0
        self.weights: dict[str, Tensor] = dict(parameters)
        self.low_bits: dict[str, Tensor] = {}
        self.grads: dict[str, Tensor] = {}
        self._pairs: list[tuple[Tensor, Tensor]] = []
        if split and precision is Precision.BF16:
            self._split(parameters)
        elif precision is not Precision.FP32:
            self.weights = {name: p.detach().float().clone() for name, p in parameters.items()}
        model.to(precision.dtype)
        for name, parameter in parameters.items():
            parameter.register_post_accumulate_grad_hook(partial(self._collect, name))
            if self.weights[name] is not parameter:
                self._pairs.append((parameter, self.weights[name]))

    def _split(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Leave the upper half of each weight where it is, and take the lower one."""
        for name, parameter in parameters.items():
            parameter.data, self.low_bits[name] = halves(parameter.detach().float())

    def _collect(self, name: str, parameter: Tensor) -> None:
        """Take a parameter's gradient as soon as it is there."""
        grad, parameter.grad = parameter.grad, None
        assert grad is not None
        so_far = self.grads.get(name)
        self.grads[name] = grad if so_far is None else so_far.float().add_(grad)

    def copy_to_model(self) -> None:
        """Give the model what the optimizer has made of the masters."""
        with torch.no_grad():
            for parameter, master in self._pairs:
                parameter.copy_(master)

    def update_loss_scale(self, finite: bool) -> None:
        """Adapt the scale of the loss, after a step whose gradients were finite or not."""
        if not self._scales:
            return
        if not finite:
            self.loss_scale, self._good = max(self.loss_scale / 2, _LEAST_SCALE), 0
            return
        self._good += 1
        if self._good == _GROWTH_EVERY:
            self.loss_scale, self._good = self.loss_scale * 2, 0

    @property
    def may_overflow(self) -> bool:
        """Whether gradients that are not finite are a matter of the scale."""
        return self._scales and self.loss_scale > _LEAST_SCALE

    def state_dict(self) -> dict[str, Tensor]:
        """What the next steps depend on: the weights, their lower halves, and the scale."""
        weights = {name: weight.detach() for name, weight in self.weights.items()}
        low = {f"{name}|low_bits": half for name, half in self.low_bits.items()}
        scale = torch.tensor([self.loss_scale, self._good], dtype=torch.float64)
        return {**weights, **low, "|loss_scale": scale}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a state that `state_dict` gave in another process."""
        with torch.no_grad():
            for name, weight in self.weights.items():
                high, low = state[name], state.get(f"{name}|low_bits")
                if name in self.low_bits:
                    if low is None:  # whole, as masters were before they had two parts
                        high, low = halves(high.float())
                    self.low_bits[name].copy_(low)
                weight.copy_(high)
        scale, good = state["|loss_scale"].tolist()
        self.loss_scale, self._good = scale, int(good)
        self.copy_to_model()
