"""The inputs and outputs of a model as named tensors, in the words of the Open Inference Protocol.

A tensor has a name, a datatype and the shape of a row: the first dimension, that of the batch, is
left out. `config.json` of a classifier has them as `inputs` and `outputs`.

Imports no torch, so that the HTTP process can check requests without loading it.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, cast

import msgspec

from ingot.core.errors import ConfigError, UnknownName

ITEM_BYTES = {"BOOL": 1, "UINT8": 1, "INT32": 4, "INT64": 8, "FP16": 2, "BF16": 2, "FP32": 4}
"""Size of an element of each datatype; those of BYTES, for text, differ in length."""
DATATYPES = (*ITEM_BYTES, "BYTES")
MAX_NAME = 256
MAX_DIMENSIONS = 8
MAX_ELEMENTS = 1 << 24
CLASSIFIERS = ("dense", "cnn", "resnet")
"""The `model_type` of classifiers: see `ingot.interop.classifier`."""
_MAX_CONFIG_BYTES = 1 << 20


def is_classifier(directory: Path | str) -> bool:
    """Return whether the model of a directory is a classifier.

    False if it cannot be read: that is an error where it is loaded.
    """
    try:
        with (Path(directory) / "config.json").open("rb") as file:
            config = json.loads(file.read(_MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and cast(Any, config).get("model_type") in CLASSIFIERS


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Name, datatype and row shape of an input or output.

    >>> TensorSpec(name="input", datatype="FP32", shape=(3, 8, 8)).row_bytes
    768
    """

    name: str
    datatype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 0 < len(self.name) <= MAX_NAME:
            raise ConfigError(
                f"the name of a tensor must have 1 to {MAX_NAME} characters, got {len(self.name)}",
                hint="correct `inputs` and `outputs` in config.json",
            )
        if self.datatype not in DATATYPES:
            raise UnknownName("datatype", self.datatype[:100], DATATYPES)
        valid = len(self.shape) <= MAX_DIMENSIONS and all(size > 0 for size in self.shape)
        if not valid or math.prod(self.shape) > MAX_ELEMENTS:
            raise ConfigError(
                f"{self.name}: a shape must have at most {MAX_DIMENSIONS} positive dimensions and "
                f"{MAX_ELEMENTS:,} elements, got {self.shape}"[:300],
                hint="correct `inputs` and `outputs` in config.json",
            )

    @property
    def row_elements(self) -> int:
        """Number of elements of a row."""
        return math.prod(self.shape)

    @property
    def row_bytes(self) -> int:
        """Size of a row in bytes; not defined for BYTES."""
        return self.row_elements * ITEM_BYTES[self.datatype]


class Signature(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Inputs and outputs of a model.

    >>> spec = TensorSpec(name="input", datatype="FP32", shape=(3,))
    >>> Signature(inputs=(spec,), outputs=(spec,)).inputs[0].name
    'input'
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
