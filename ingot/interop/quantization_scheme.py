"""Which layers of a model directory are quantized, in which formats and in which tensors.

`quantization_config` in config.json describes it, in a way of its own for each `quant_method`:
`ingot.interop.compressed_tensors` and `ingot.interop.gptq_awq` read it.
"""

# pyright: basic
from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ingot.core.errors import ConfigError
from ingot.nn.formats import QuantizedTensors, WeightFormat
from ingot.nn.weights import StoredTensor

KEY = "quantization_config"
HINT = "quantize the model with `ingot compress`, or use the original one"
LINEAR = "Linear"
"""Target that stands for all linear layers."""
_MAX_PATTERN = 200

TensorShapes = dict[str, StoredTensor]
"""By suffix of the tensor's name."""


class Layout(NamedTuple):
    """How the tensors of a quantized layer are stored."""

    tensor_shapes: Callable[[WeightFormat, int, int], TensorShapes]
    """Return the tensors of a layer with N rows and D channels."""
    unpack: Callable[[WeightFormat, Mapping[str, Tensor], str], QuantizedTensors]
    """Convert the tensors of a layer, which is named for errors, to those of its format."""
    scale: str = "weight_scale"
    """Suffix of the scales."""


class LayerGroup(NamedTuple):
    """Layers of one format: names, regular expressions that begin with `re:`, or `LINEAR`."""

    format: WeightFormat
    targets: tuple[str, ...] = (LINEAR,)


@dataclass(frozen=True)
class QuantizationScheme:
    """The quantized layers of a directory."""

    groups: tuple[LayerGroup, ...]
    layout: Layout
    ignore: tuple[str, ...] = ("lm_head",)
    """Layers that are not quantized, named like targets."""

    def format_of(self, layer: str, *, linear: bool = True) -> WeightFormat | None:
        """Return the format of a layer by its name in the directory; a name precedes `LINEAR`."""
        if any(_matches(pattern, layer) for pattern in self.ignore):
            return None
        for group in self.groups:
            if any(_matches(pattern, layer) for pattern in group.targets):
                return group.format
        return next((g.format for g in self.groups if linear and LINEAR in g.targets), None)


def describe_layers(
    linear: Mapping[str, WeightFormat | None],
    embeddings: Mapping[str, WeightFormat | None],
    layout: Layout,
) -> QuantizationScheme | None:
    """Return the scheme of layers by name; None if none of them has a format.

    The format of most linear layers stands for all of them; the others are named.
    """
    names: dict[WeightFormat, list[str]] = {}
    for name, format in linear.items():
        if format is not None:
            names.setdefault(format, []).append(name)
    if names:
        most = max(names, key=lambda format: len(names[format]))
        names[most] = [LINEAR]
    for name, format in embeddings.items():
        if format is not None:
            names.setdefault(format, []).append(name)
    if not names:
        return None
    groups = tuple(LayerGroup(format, tuple(targets)) for format, targets in names.items())
    ignore = tuple(name for name, format in linear.items() if format is None)
    return QuantizationScheme(groups, layout, ignore)


def check_finite(values: Tensor, layer: str) -> None:
    """Require finite scales or offsets.

    >>> check_finite(Tensor([1.0, 2.0]), "lm_head")
    """
    if not bool(values.isfinite().all()):
        raise ConfigError(f"{layer}: a scale is not finite", hint="download the weights again")


def _matches(pattern: str, layer: str) -> bool:
    if not pattern.startswith("re:"):
        return pattern == layer
    expression = pattern[3:]
    # A repeated group, or many repetitions, can take forever to match.
    is_slow = re.search(r"[)\]][*+{?]", expression) or len(re.findall(r"[*+{]", expression)) > 4
    if is_slow or len(expression) > _MAX_PATTERN:
        raise ConfigError(f"{KEY}: unsupported pattern {pattern!r}"[:200], hint=HINT)
    try:
        return re.match(expression, layer) is not None
    except re.error as error:
        raise ConfigError(f"{KEY}: invalid pattern {pattern!r}"[:200], hint=HINT) from error
