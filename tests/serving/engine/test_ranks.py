"""Ranks that divide a model serve with the bits of a single process."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ingot.core.errors import ConfigError
from ingot.interop import hf
from ingot.nn import Decoder, preset
from ingot.nn.layout import KVCacheDtype
from ingot.serving import verify
from ingot.serving.engine.ranks import TensorParallel
from tests.serving.conftest import Served, serving

_SMALL = {"vocab_size": 256, "dim": 64, "layers": 3, "heads": 8, "head_dim": 8, "ffn_dim": 192}
CONFIGS = {
    "llama": replace(preset("llama-100m"), **_SMALL, kv_heads=4, max_seq_len=512),
    "gpt2": replace(preset("gpt2-124m"), **_SMALL, kv_heads=8, max_seq_len=512),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    hf.save(Decoder.from_config(preset("tiny"), seed=3, dtype=torch.bfloat16), path)
    return path


@pytest.fixture(scope="module")
def ranks(tiny: Path) -> Iterator[TensorParallel]:
    with TensorParallel.start(tiny, 2) as started:
        yield started


def test_every_bit_is_that_of_one_process(tiny: Path, ranks: TensorParallel) -> None:
    found = verify.verify(hf.load(tiny), ranks=ranks, schedules=8)
    assert (found.difference, found.mismatches, found.tp) == (None, 0, 2)
    assert found.logprobs > 300
    for count in (found.preemptions, found.cached_tokens, found.accepted_tokens):
        assert count > 0


def test_a_rank_has_half_of_the_layers_and_of_the_cache(tiny: Path, ranks: TensorParallel) -> None:
    whole, part = hf.load(tiny), ranks.decoder
    for name, parameter in part.blocks.named_parameters():
        expected = whole.blocks.get_parameter(name).numel()
        assert parameter.numel() == (expected if "norm" in name else expected // 2)
    assert part.kv_spec.bytes_per_token == whole.kv_spec.bytes_per_token // 2


def test_a_wrong_weight_of_a_rank_is_found(tiny: Path, ranks: TensorParallel) -> None:
    weight = ranks.decoder.get_parameter("blocks.1.mlp.down.weight")
    before = weight[0, 0].item()
    weight[0, 0] += 0.5
    try:
        found = verify.verify(hf.load(tiny), ranks=ranks, schedules=1)
        assert found.mismatches == 1
    finally:
        weight[0, 0] = before


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_bit_in_many_schedules(
    family: str, dtype: torch.dtype, size: int, tmp_path: Path
) -> None:
    decoder = Decoder.from_config(CONFIGS[family], seed=4, dtype=dtype)
    hf.save(decoder, tmp_path)
    kv_cache_dtype: KVCacheDtype
    for kv_cache_dtype in ("auto", "int8"):
        decoder.set_kv_cache_dtype(kv_cache_dtype)
        with TensorParallel.start(tmp_path, size, kv_cache_dtype=kv_cache_dtype) as ranks:
            found = verify.verify(decoder, ranks=ranks, schedules=50, seed=1)
            assert (found.difference, found.mismatches) == (None, 0)


def test_models_that_cannot_be_divided(tiny: Path) -> None:
    with pytest.raises(ConfigError, match="power of two up to 64, got 3"):
        TensorParallel.start(tiny, 3)
    with pytest.raises(ConfigError, match="must divide the model's"):
        TensorParallel.start(tiny, 64)


@pytest.mark.slow
def test_a_server_of_two_ranks_and_the_loss_of_one(
    served: Served, directory: Path, tmp_path: Path
) -> None:
    with serving(directory, tmp_path, "--tp", "2") as divided:
        expected = served.tokens()
        assert divided.tokens() == expected
        worker = divided.worker
        (rank,) = children(worker)
        os.kill(rank, signal.SIGKILL)
        status, answer, _ = divided.call("/v1/completions", {"prompt": "Hello", "max_tokens": 5})
        assert status in (200, 503), answer
        divided.wait(lambda: divided.metric("ingot:engine_restarts") == 1, 30)
        divided.wait(divided.ready, 60)
        assert divided.tokens() == expected
        os.kill(divided.worker, signal.SIGKILL)
        divided.wait(lambda: divided.metric("ingot:engine_restarts") == 2, 30)
        divided.wait(divided.ready, 60)
        last = children(divided.worker)
    divided.wait(lambda: not any(Path(f"/proc/{process}").exists() for process in last), 20)


def children(process: int) -> list[int]:
    """The ranks that a worker has started."""
    found = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [int(c) for c in found if "engine.ranks" in Path(f"/proc/{c}/cmdline").read_text()]
