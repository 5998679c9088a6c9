from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ingot import ops
from ingot.core.device import detect
from ingot.core.errors import ConfigError
from ingot.interop import peft
from ingot.nn import Decoder, linear, preset
from ingot.nn.formats import Int4, Int8, WeightFormat
from ingot.nn.loss import sampled_logprobs
from ingot.nn.quantized import quantize_
from ingot.ops.codec import round_activations
from ingot.serving import verify
from ingot.serving.engine import runner
from ingot.serving.engine.blocks import root_key
from ingot.serving.engine.scheduler import ScheduledSeq
from tests import adapters


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_bit_is_equal(dtype: torch.dtype) -> None:
    heard: list[int] = []
    decoder = Decoder.from_config(preset("tiny"), seed=3, dtype=dtype)
    found = verify.verify(decoder, schedules=12, progress=lambda: heard.append(1))
    assert (found.schedules, found.mismatches, found.bitwise_equal) == (12, 0, True)
    assert len(heard) == 12
    assert found.logprobs > 500
    assert found.distributions > 200
    for count in (found.preemptions, found.cached_tokens, found.accepted_tokens):
        assert count > 0
    assert found.accepted_tokens < found.draft_tokens
    assert found.difference is None


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["tiny", "tiny-moe"])
def test_every_bit_is_equal_in_a_thousand_schedules(name: str, dtype: torch.dtype) -> None:
    """1,200 in the four cases: each has temperatures 0, 0.7, 1 and 1.3, top-k and top-p on and
    off, and compares all tokens of the vocabulary."""
    decoder = Decoder.from_config(preset(name), seed=4, dtype=dtype)
    found = verify.verify(decoder, schedules=300, seed=1)
    assert (found.difference, found.mismatches) == (None, 0)
    assert found.distributions > 10_000


def planted(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """A matmul that uses split-K for batches of this many rows, as fast libraries do."""

    def split(
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: Any = None,
        activation: int = 0,
        residual: Any = None,
    ) -> torch.Tensor:
        if len(x) != rows or activation or residual is not None:
            return ops.linear(x, weight, bias, activation, residual)
        half = x.shape[1] // 2
        a, b = (x[:, :half], weight[:, :half]), (x[:, half:], weight[:, half:])
        return ops.linear(a[0], a[1].contiguous()) + ops.linear(b[0], b[1].contiguous())

    monkeypatch.setattr(linear, "ops", SimpleNamespace(**{**vars(ops), "linear": split}))


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_split_sum_for_some_batches_is_found(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, rows)
    found = verify.verify(Decoder.from_config(preset("tiny"), seed=3), schedules=12)
    assert found.mismatches > 0
    assert not found.bitwise_equal
    assert found.difference
    parts = ("expected logprobs", "expected tokens", "log-probabilities of token")
    assert any(part in found.difference for part in parts)


def round_logits(self: Decoder, hidden_TD: torch.Tensor) -> torch.Tensor:
    """Round the logits to the dtype of the weights, as a matmul in that dtype does."""
    return ops.linear(hidden_TD, self.lm_head_weight).float()


def test_sampling_from_rounded_logits_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Decoder, "logits", round_logits)
    decoder = Decoder.from_config(preset("tiny"), seed=3, dtype=torch.bfloat16)
    found = verify.verify(decoder, schedules=1)
    assert found.difference
    assert "trained with" in found.difference


def test_a_trainer_that_keeps_other_tokens_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_top_p(*args: Any, **options: Any) -> torch.Tensor:
        return sampled_logprobs(*args, **options | {"top_p": 1.0})

    monkeypatch.setattr("ingot.nn.loss.sampled_logprobs", without_top_p)
    found = verify.verify(Decoder.from_config(preset("tiny"), seed=3), schedules=1)
    assert found.difference
    assert "trained with" in found.difference


def test_a_wrong_slot_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a token that is computed alone, at a block's beginning."""

    class Faulty(runner.Runner):
        def _fill_single(self, work: Any) -> None:
            super()._fill_single(work)
            item: ScheduledSeq = work[-1]
            if item.start and item.start % self.size == 0:
                self._inputs.slots.items[len(work) - 1] = item.block_table[0] * self.size

    monkeypatch.setattr("ingot.serving.verify.Runner", Faulty)
    found = verify.verify(Decoder.from_config(preset("tiny"), seed=3), schedules=12)
    assert not found.bitwise_equal


def random_adapters(decoder: Decoder) -> dict[str, peft.Adapter]:
    """Eight adapters of several ranks and targets."""
    targets = (("",), ("q_proj", "down_proj"), ("v_proj", "gate_proj"))
    return {
        f"a{i}": adapters.adapter(decoder, i, rank=(4, 8, 3)[i % 3], targets=targets[i % 3])
        for i in range(8)
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_bit_of_mixed_adapters_is_equal(dtype: torch.dtype) -> None:
    decoder = Decoder.from_config(preset("tiny"), seed=3, dtype=dtype)
    found = verify.verify(decoder, adapters=random_adapters(decoder), schedules=12, seed=2)
    assert found.difference is None
    assert (found.adapters, found.max_models_per_step) == (8, 9)
    assert found.cached_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny", "tiny-moe"])
def test_every_bit_of_mixed_adapters_is_equal_in_many_schedules(name: str) -> None:
    decoder = Decoder.from_config(preset(name), seed=3, dtype=torch.bfloat16)
    found = verify.verify(decoder, adapters=random_adapters(decoder), schedules=300, seed=1)
    assert found.difference is None


def test_a_shared_block_of_two_adapters_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_adapter(adapter: str, model_version: str, cache_salt: bytes) -> bytes:
        return root_key("", model_version, cache_salt)

    monkeypatch.setattr("ingot.serving.engine.scheduler.root_key", without_adapter)
    decoder = Decoder.from_config(preset("tiny"), seed=3)
    found = verify.verify(decoder, adapters=random_adapters(decoder), schedules=12)
    assert not found.bitwise_equal


def test_a_row_with_the_adapter_of_its_neighbour_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """In steps of more than eight requests."""

    class Faulty(runner.Runner):
        def _fill_adapters(self, work: Any, slots: Any) -> None:
            super()._fill_adapters(work, slots if len(slots) <= 8 else [*slots[:-1], slots[-2]])

    monkeypatch.setattr("ingot.serving.verify.Runner", Faulty)
    decoder = Decoder.from_config(preset("tiny"), seed=3)
    found = verify.verify(decoder, adapters=random_adapters(decoder), schedules=12)
    assert not found.bitwise_equal


def test_there_are_one_and_two_threads_and_then_as_many_as_before() -> None:
    before, heard = torch.get_num_threads(), list[int]()
    decoder = Decoder.from_config(preset("tiny"), seed=0)
    for schedules in (1, 2):
        found = verify.verify(
            decoder, schedules=schedules, progress=lambda: heard.append(torch.get_num_threads())
        )
        assert found.threads == (1, 2)
        assert torch.get_num_threads() == before
    assert heard == [1, 1, 2]


@pytest.mark.parametrize("name", ["tiny", "tiny-moe"])
def test_a_draft_of_the_first_layers_has_no_weights_of_its_own(name: str) -> None:
    decoder = Decoder.from_config(preset(name), seed=0)
    small = verify.truncated_draft_model(decoder)
    assert {id(p) for p in small.parameters()} < {id(p) for p in decoder.parameters()}
    assert len(small.blocks) == 1


def test_schedules_are_bounded() -> None:
    for wrong in (0, 10**7):
        with pytest.raises(ConfigError):
            verify.verify(Decoder.from_config(preset("tiny"), seed=0), schedules=wrong)


def int8_decoder(dtype: torch.dtype, name: str = "tiny") -> Decoder:
    """Keys have an outlier channel, as those of large models."""
    decoder = Decoder.from_config(preset(name), seed=3, dtype=dtype)
    attention: Any = decoder.blocks[0].attention
    with torch.no_grad():
        attention.qkv.weight[attention.heads * attention.head_dim + 5] *= 100
    decoder.set_kv_cache_dtype("int8")
    return decoder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_bit_is_equal_with_an_int8_cache(dtype: torch.dtype) -> None:
    found = verify.verify(int8_decoder(dtype), schedules=25, seed=5)
    assert (found.difference, found.kv_cache_dtype) == (None, "int8")
    for count in (found.preemptions, found.cached_tokens, found.accepted_tokens):
        assert count > 0


def test_every_bit_of_mixed_adapters_is_equal_with_an_int8_cache() -> None:
    decoder = int8_decoder(torch.bfloat16)
    found = verify.verify(decoder, adapters=random_adapters(decoder), schedules=12, seed=2)
    assert found.difference is None


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["tiny", "tiny-moe"])
def test_every_bit_is_equal_with_an_int8_cache_in_a_thousand_schedules(
    name: str, dtype: torch.dtype
) -> None:
    found = verify.verify(int8_decoder(dtype, name), schedules=250, seed=1)
    assert found.difference is None


@pytest.mark.parametrize("fault", ["round_kv", "scale"])
def test_a_reference_that_rounds_otherwise_is_found(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values that are not rounded, and ones whose scale is rounded to bfloat16."""

    def without_rounding(x: torch.Tensor) -> torch.Tensor:
        return x

    def coarse_scale(x: torch.Tensor) -> torch.Tensor:
        return round_activations(x, 0)

    other = without_rounding if fault == "round_kv" else coarse_scale
    monkeypatch.setattr("ingot.nn.attention.round_kv", other)
    found = verify.verify(int8_decoder(torch.bfloat16), schedules=2)
    assert not found.bitwise_equal


FORMATS = [
    Int8(),
    Int8(group=32),
    Int8(group=16, scale_dtype=torch.float16),
    Int4(group=32),
    Int4(group=32, zero_point=True),
    Int4(group=32, minimum=True, scale_dtype=torch.float16),
]


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_every_bit_of_quantized_models_is_equal_in_many_schedules(format: WeightFormat) -> None:
    """With those of the other tiers, a thousand of each format on a CPU that has four tiers."""
    decoder = Decoder.from_config(preset("tiny"), seed=4, dtype=torch.bfloat16)
    quantize_(decoder, lambda _: format)
    found = verify.verify(decoder, schedules=250, seed=1)
    assert (found.difference, found.mismatches) == (None, 0)
    assert found.distributions > 5_000


@pytest.mark.slow
@pytest.mark.skipif("INGOT_ISA" in os.environ, reason="this run is already limited to a tier")
@pytest.mark.parametrize("tier", detect().cpu.isa[1:])
def test_every_bit_of_quantized_models_is_equal_on_the_other_tiers(tier: str) -> None:
    names = ["-m", "slow", "-k", "quantized_models_is_equal_in_many", __file__]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *names]
    environment = {**os.environ, "INGOT_ISA": tier}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert f"{len(FORMATS)} passed" in done.stdout
