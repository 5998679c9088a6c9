"""Training precision: the dtype of the model, and float32 master weights.

    fp32   everything in float32
    bf16   weights, activations and gradients in bfloat16; master weights in float32
    fp16   the same in float16, with a scaled loss, so that small gradients do not underflow

The model has one dtype, the one it is served in, so training computes what serving computes. An
optimizer update is often smaller than half a unit in the last place of a bfloat16 weight (2^-9 of
it) and would round away. So the optimizer has a float32 master weight for each weight, and the
model's weight is the master weight, rounded.

In bf16 with AdamW the master weight is split: its upper 16 bits, rounded, are the model's weight
itself, and the lower 16 bits are stored separately (see `ingot.ops.adamw`). That takes half the
memory and loses no bit; the model's weight is rounded to nearest, ties away from 0. Other
optimizers have whole master weights, and so has fp16, whose bits are not a prefix of float32's.

Gradients of several micro-batches are summed in float32, in an order that does not depend on the
number of ranks (`ingot.training.gradients`); those of one keep their dtype.

In fp16 the loss is multiplied by a scale before the backward: 2^16 at first, halved when a gradient
overflows (that step is skipped), doubled after 2000 steps without overflow (Micikevicius et al.
2017).
"""

# pyright: basic, reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from functools import partial

import torch
from torch import Tensor, nn

from ingot.ops.adamw import join
from ingot.ops.adamw import split as halves
from ingot.parallel.shard import ShardedModel, local
from ingot.parallel.tensor import take_rows
from ingot.training.gradients import GradientSum

_INITIAL_SCALE = 2.0**16
_MIN_SCALE = 2.0**-14
_GROWTH_EVERY = 2000


class Precision(Enum):
    """The dtype of the model while it is trained."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the model's weights."""
        return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[self.value]


class MasterWeights:
    """The weights that the optimizer updates, and their gradients, on the model's device.

    Converts the model. `weights` are its parameters themselves in float32, and with `split` in
    bfloat16: then `low_bits` has the low 16 bits of each master weight. `gradients` sums those of
    the backwards, by the same names.

    >>> model = nn.Linear(2, 1)
    >>> master_weights = MasterWeights(model, Precision.BF16)
    >>> model(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
    >>> master_weights.gradients.total()["weight"], model.weight.grad
    (tensor([[1., 1.]], dtype=torch.bfloat16), None)
    """

    def __init__(self, model: nn.Module, precision: Precision, split: bool = False) -> None:
        parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.loss_scale = _INITIAL_SCALE if precision is Precision.FP16 else 1.0
        self._scales, self._good = precision is Precision.FP16, 0
        self.weights: dict[str, Tensor] = dict(parameters)
        self.low_bits: dict[str, Tensor] = {}
        self.gradients = GradientSum()
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
        """Replace each weight by its upper half, and store the lower one."""
        for name, parameter in parameters.items():
            parameter.data, self.low_bits[name] = halves(parameter.detach().float())

    def _collect(self, name: str, parameter: Tensor) -> None:
        """Take a parameter's gradient as soon as the backward has computed it."""
        grad, parameter.grad = parameter.grad, None
        assert grad is not None
        self.gradients.add(name, grad)

    def shard(self, sharded: ShardedModel) -> None:
        """Keep the rows of each weight that this rank stores of a model that was sharded."""
        pairs = {id(master): parameter for parameter, master in self._pairs}
        self._pairs = []
        for name, weight in self.weights.items():
            rows, parameter = sharded.rows(name), local(sharded.model.get_parameter(name)).detach()
            if id(weight) in pairs:
                self.weights[name] = take_rows(weight.detach(), rows)
                self._pairs.append((parameter, self.weights[name]))
            else:
                self.weights[name] = parameter
            if name in self.low_bits:
                self.low_bits[name] = take_rows(self.low_bits[name], rows)

    def whole(self, name: str) -> Tensor:
        """Return a master weight in float32."""
        weight = self.weights[name].detach()
        return join(weight, self.low_bits[name]) if name in self.low_bits else weight

    def map(self, function: Callable[[str, Tensor], Tensor]) -> None:
        """Replace each master weight by a function of its name and value, both in float32."""
        with torch.no_grad():
            for name, weight in self.weights.items():
                value = function(name, self.whole(name))
                if name in self.low_bits:
                    value, low = halves(value)
                    self.low_bits[name].copy_(low)
                weight.copy_(value)
        self.copy_to_model()

    def copy_to_model(self) -> None:
        """Copy the master weights to the model, in its dtype."""
        with torch.no_grad():
            for parameter, master in self._pairs:
                parameter.copy_(master)

    def update_loss_scale(self, finite: bool) -> None:
        """Adapt the loss scale after a step, whose gradients were finite or not."""
        if not self._scales:
            return
        if not finite:
            self.loss_scale, self._good = max(self.loss_scale / 2, _MIN_SCALE), 0
            return
        self._good += 1
        if self._good == _GROWTH_EVERY:
            self.loss_scale, self._good = self.loss_scale * 2, 0

    @property
    def may_overflow(self) -> bool:
        """Whether non-finite gradients may be due to the loss scale."""
        return self._scales and self.loss_scale > _MIN_SCALE

    def state_dict(self) -> dict[str, Tensor]:
        """Return the weights, their low bits and the loss scale."""
        weights = {name: weight.detach() for name, weight in self.weights.items()}
        low = {f"{name}|low_bits": half for name, half in self.low_bits.items()}
        scale = torch.tensor([self.loss_scale, self._good], dtype=torch.float64)
        return {**weights, **low, "|loss_scale": scale}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy a state that `state_dict` returned."""
        with torch.no_grad():
            for name, weight in self.weights.items():
                high, low = state[name], state.get(f"{name}|low_bits")
                if name in self.low_bits:
                    if low is None:  # saved as whole master weights
                        high, low = halves(high.float())
                    self.low_bits[name].copy_(low)
                weight.copy_(high)
        scale, good = state["|loss_scale"].tolist()
        self.loss_scale, self._good = scale, int(good)
        self.copy_to_model()
