"""What dtype a model is trained in.

    fp32   everything in float32
    bf16   weights, activations and gradients in bfloat16; the optimizer's weights in float32
    fp16   the same in float16, with a loss that is scaled so that small gradients do not vanish

The model has one dtype, that in which it will be served: what training sees is what serving
computes. A step of an optimizer is often smaller than half a unit of a bfloat16 weight (2^-9 of it)
and would be lost, so the optimizer has a master of each weight in float32, and the model's is the
master rounded. Gradients of several micro-batches are added up in float32 too: as soon as autograd
has the gradient of a parameter, it goes to the master and is freed.

In fp16 the loss is multiplied by a scale before it is differentiated: 2^16 at first, halved
when a gradient overflows (that step moves nothing), doubled after 2000 steps without
(Micikevicius et al. 2017).
"""

# pyright: basic, reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

import torch
from torch import Tensor, nn

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


class Masters:
    """The weights that the optimizer updates, and their gradients.

    Converts the model. `weights` are its parameters themselves in float32.

    >>> model = nn.Linear(2, 1)
    >>> masters = Masters(model, Precision.BF16)
    >>> model(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
    >>> masters.weights["weight"].grad, model.weight.grad
    (tensor([[1., 1.]]), None)
    """

    def __init__(self, model: nn.Module, precision: Precision) -> None:
        parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.scale = _FIRST_SCALE if precision is Precision.FP16 else 1.0
        self._scales, self._good = precision is Precision.FP16, 0
        self.weights: dict[str, Tensor] = dict(parameters)
        self._pairs: list[tuple[Tensor, Tensor]] = []
        if precision is Precision.FP32:
            model.float()
            return
        self.weights = {name: p.detach().float().clone() for name, p in parameters.items()}
        model.to(precision.dtype)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                self._pairs.append((parameter, self.weights[name]))
                parameter.register_post_accumulate_grad_hook(_Collect(self.weights[name]))

    def zero_grad(self) -> None:
        """Forget the gradients; the next one to come is copied, not added."""
        for weight in self.weights.values():
            weight.grad = None

    def publish(self) -> None:
        """Give the model what the optimizer has made of the masters."""
        with torch.no_grad():
            for parameter, master in self._pairs:
                parameter.copy_(master)

    def judge(self, finite: bool) -> None:
        """Adapt the scale of the loss, after a step whose gradients were finite or not."""
        if not self._scales:
            return
        if not finite:
            self.scale, self._good = max(self.scale / 2, _LEAST_SCALE), 0
            return
        self._good += 1
        if self._good == _GROWTH_EVERY:
            self.scale, self._good = self.scale * 2, 0

    @property
    def may_overflow(self) -> bool:
        """Whether gradients that are not finite are a matter of the scale."""
        return self._scales and self.scale > _LEAST_SCALE

    def state(self) -> dict[str, Tensor]:
        """What the next steps depend on: the weights, and the scale."""
        scale = torch.tensor([self.scale, self._good], dtype=torch.float64)
        return {**{name: weight.detach() for name, weight in self.weights.items()}, "|scale": scale}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a state that `state` gave in another process."""
        with torch.no_grad():
            for name, weight in self.weights.items():
                weight.copy_(state[name])
        scale, good = state["|scale"].tolist()
        self.scale, self._good = scale, int(good)
        self.publish()


class _Collect:
    """Adds a parameter's gradient to its master's as soon as it is there, and frees it."""

    def __init__(self, master: Tensor) -> None:
        self._master = master

    def __call__(self, parameter: Tensor) -> None:
        grad, parameter.grad = parameter.grad, None
        assert grad is not None
        if self._master.grad is None:
            self._master.grad = grad.float()
        else:
            self._master.grad.add_(grad)
