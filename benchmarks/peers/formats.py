"""The format of the weights of a model directory, from its config.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class IntegerFormat:
    """Integers with a scale for each row, or for each row and group of channels.

    >>> str(IntegerFormat(bits=4, group=32, zero_point=True))
    'int4 g32 zp'
    """

    bits: int
    group: int | None
    """Channels that share a scale; None for all channels of a row."""
    zero_point: bool

    def __str__(self) -> str:
        parts = (f"int{self.bits}", self.group and f"g{self.group}", self.zero_point and "zp")
        return " ".join(part for part in parts if part)


def read_format(model: Path) -> IntegerFormat | None:
    """Return the format of a directory of compressed-tensors; None if it is not quantized.

    It is that of the linear layers; embedding and LM head may have another one.
    """
    config = json.loads((model / "config.json").read_text()).get("quantization_config")
    if config is None:
        return None
    if config.get("quant_method") != "compressed-tensors":
        raise ValueError(f"only compressed-tensors is supported, got {config.get('quant_method')}")
    weights = config["config_groups"]["group_0"]["weights"]
    return IntegerFormat(
        bits=weights["num_bits"],
        group=weights["group_size"] if weights["strategy"] == "group" else None,
        zero_point=not weights["symmetric"],
    )
