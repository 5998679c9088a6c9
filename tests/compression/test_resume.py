from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ingot.compression import AWQ, GPTQ, Method, RoundToNearest, quantize
from ingot.compression.resume import PartialRun
from ingot.nn import Decoder, preset
from ingot.nn.formats import Int4, Int8, WeightFormat
from ingot.nn.quantized import QuantizedModule

SEQUENCES = [list(range(n, n + 60)) for n in range(24)]
CONFIG = replace(preset("tiny"), layers=3, qkv_bias=True)
FORMAT = Int4(zero_point=True)


class Interrupt(Exception):
    pass


class Progress:
    """Interrupts after a number of blocks."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks

    def advance(self, *_: Any) -> None:
        self.blocks -= 1
        if not self.blocks:
            raise Interrupt


def decoder(seed: int = 0) -> Decoder:
    return Decoder.from_config(CONFIG, seed=seed, dtype=torch.bfloat16)


def tensors(model: Decoder) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = dict(model.named_parameters())
    for name, module in model.named_modules():
        if isinstance(module, QuantizedModule):
            fields = module.get()._asdict().items()
            found |= {f"{name}.{field}": t for field, t in fields if t is not None}
    return found


def interrupt(directory: Path, blocks: int, method: Method = GPTQ(), seed: int = 0) -> None:  # noqa: B008
    with pytest.raises(Interrupt):
        quantize(decoder(seed), FORMAT, method, SEQUENCES, Progress(blocks), directory)  # pyright: ignore


@pytest.mark.parametrize("method", [GPTQ(), AWQ(), RoundToNearest()], ids=str)
@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_a_run_that_continues_has_the_same_result(
    tmp_path: Path, method: Method, blocks: int
) -> None:
    whole, continued = decoder(), decoder()
    expected = quantize(whole, FORMAT, method, SEQUENCES)
    interrupt(tmp_path, blocks, method)
    assert quantize(continued, FORMAT, method, SEQUENCES, resume_dir=tmp_path) == expected
    ours, theirs = tensors(continued), tensors(whole)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The blocks that are saved, and so were computed."""
    found: list[int] = []
    save = PartialRun.save

    def record(self: PartialRun, index: int, *rest: Any) -> None:
        found.append(index)
        save(self, index, *rest)

    monkeypatch.setattr(PartialRun, "save", record)
    return found


def test_complete_blocks_are_not_computed_again(tmp_path: Path, computed: list[int]) -> None:
    interrupt(tmp_path, 2)
    assert computed == [0, 1]
    quantize(decoder(), FORMAT, GPTQ(), SEQUENCES, resume_dir=tmp_path)
    assert computed == [0, 1, 2]


@pytest.mark.parametrize(
    ("seed", "format", "method", "sequences"),
    [
        (1, FORMAT, GPTQ(), SEQUENCES),
        (0, Int8(), GPTQ(), SEQUENCES),
        (0, FORMAT, GPTQ(damping=0.02), SEQUENCES),
        (0, FORMAT, GPTQ(), SEQUENCES[:-1]),
    ],
    ids=["weights", "format", "method", "data"],
)
def test_other_settings_start_from_the_first_block(
    tmp_path: Path,
    computed: list[int],
    seed: int,
    format: WeightFormat,
    method: Method,
    sequences: list[list[int]],
) -> None:
    interrupt(tmp_path, 2)
    computed.clear()
    quantize(decoder(seed), format, method, sequences, resume_dir=tmp_path)
    assert computed == [0, 1, 2]


def test_only_the_last_hidden_states_are_kept(tmp_path: Path) -> None:
    interrupt(tmp_path, 2)
    names = sorted(path.name for path in tmp_path.iterdir())
    blocks = ["block-0.safetensors", "block-1.safetensors"]
    assert names == [*blocks, "hidden-1.safetensors", "state.json"]
