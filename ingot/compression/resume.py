"""Continue a run of `quantize` after its last complete block.

    block-3.safetensors      tensors of a quantized block
    hidden-3.safetensors     hidden states after it, of the quantized and of the original model
    state.json               number of complete blocks, their sensitivities, and the key of the run

Every file is replaced atomically and `state.json` last, so that it is always true of the other
files. The key is a hash of weights, formats, method and calibration data: with another key, a run
starts from the first block.
"""

# pyright: basic
from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ingot.core import log
from ingot.core.paths import write_atomic
from ingot.nn.formats import QuantizedTensors, WeightFormat
from ingot.nn.quantized import ChooseFormat, QuantizedModule, quantize_
from ingot.nn.weights import SafetensorsDir, read_json, write_file

_STATE = "state.json"


@dataclass(frozen=True)
class PartialRun:
    """The complete blocks of a run, in a directory."""

    directory: Path
    key: str

    def read_state(self) -> dict[str, Any] | None:
        """Return what `save` wrote last; None if it was a run with another key, or none."""
        if not (self.directory / _STATE).is_file():
            return None
        state = read_json(self.directory / _STATE)
        if state.get("key") == self.key:
            log.logger(__name__).info("continuing after block %d", state["blocks"])
            return state
        shutil.rmtree(self.directory)
        return None

    def read_hidden(self, index: int) -> list[Tensor]:
        """Return the hidden states after a block, of each batch."""
        tensors = self._read(f"hidden-{index}.safetensors")
        return [tensors[str(number)] for number in range(len(tensors))]

    def read_block(self, index: int, block: nn.Module, choose: ChooseFormat) -> None:
        """Replace the layers and parameters of a block by those that were saved."""
        tensors = self._read(f"block-{index}.safetensors")
        quantize_(block, choose, _allocate)
        for name, module in block.named_modules():
            if isinstance(module, QuantizedModule):
                fields = (tensors.get(f"{name}.{field}") for field in QuantizedTensors._fields)
                module.set(QuantizedTensors(*fields))  # pyright: ignore
        for name, parameter in block.named_parameters():
            parameter.detach().copy_(tensors[name])

    def save(
        self, index: int, block: nn.Module, hidden: Sequence[Tensor], sensitivities: list[Any]
    ) -> None:
        """Write a block, the hidden states after it and the sensitivities until then."""
        tensors = dict(block.named_parameters())
        for name, module in block.named_modules():
            if isinstance(module, QuantizedModule):
                fields = module.get()._asdict().items()
                tensors |= {f"{name}.{field}": t for field, t in fields if t is not None}
        write_file(self.directory / f"block-{index}.safetensors", tensors)
        by_batch = {str(number): x_TD for number, x_TD in enumerate(hidden)}
        write_file(self.directory / f"hidden-{index}.safetensors", by_batch)
        state = {"key": self.key, "blocks": index + 1, "sensitivities": sensitivities}
        write_atomic(self.directory / _STATE, json.dumps(state))
        (self.directory / f"hidden-{index - 1}.safetensors").unlink(missing_ok=True)

    def _read(self, name: str) -> dict[str, Tensor]:
        stored = SafetensorsDir(self.directory, name)
        tensors = {n: torch.empty(e.shape, dtype=e.dtype) for n, e in stored.entries.items()}
        stored.read(tensors)
        return tensors


def _allocate(format: WeightFormat, weight_ND: Tensor) -> QuantizedTensors:
    rows, channels = weight_ND.shape
    return format.empty(rows, channels, weight_ND.device)
