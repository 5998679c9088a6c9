"""Complete runs with real processes that speak the protocol, and statistics computed by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ingot.bench import compare as module
from ingot.bench.compare import (
    CompareRow,
    GenerationRuns,
    GenerationSystem,
    GenerationTask,
    ModelCost,
    compare,
    find_systems,
    roofline,
    rows,
)
from ingot.bench.subprocess_system import Generation, SystemReady
from ingot.core.errors import ConfigError, IngotError, UnknownName
from ingot.interop import hf
from ingot.nn import Decoder, preset
from ingot.nn.formats import Int4
from ingot.nn.quantized import quantize_
from ingot.ops.record import Cost
from tests.bench.row import PEAK, PEAKS

from .conftest import Make

MODEL = ModelCost(
    path=Path("/models/tiny"),
    vocab_size=90,
    max_seq_len=64,
    step=Cost(bytes=2_000_000, flops=2_000_000),
    kv_bytes=0,
)
TASK = GenerationTask(batch_size=2, input_len=3, output_len=4, rounds=3)
READY = SystemReady(version="1.0", dtype="bf16", load_seconds=2.0)


def runs(*seconds: float, first: float | None = 0.5, token: int = 7) -> GenerationRuns:
    tokens = [[1, 2, token, 4], [5, 6, 7, 8]]
    generations = [Generation(s, tokens, first) for s in seconds]
    return GenerationRuns(READY, generations, memory=3_000_000, peak_memory=5_000_000)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.usefixtures("cache")
def test_systems_are_interleaved_and_failures_are_reported(make: Make, tmp_path: Path) -> None:
    order = tmp_path / "order"
    note = f"open({str(order)!r}, 'a').write(__spec__.name[-1])"
    late = f"{note}; open({str(order)!r}).read().count('d') < 3 or os._exit(9)"
    systems = [
        make("a", generate=note),
        make("b", generate=note + "; output_len -= len(prompts[0]) == 3"),
        make("c", load="raise NotImplementedError('no kernel for int8')"),
        make("d", generate=late),
        replace(make("e", generate=note), error="not installed"),
        make("f", generate=note),
    ]
    steps: list[str] = []
    result = compare(systems, MODEL, TASK, PEAKS, steps.append)
    by_name = {row.system: row for row in result}
    assert list(by_name) == ["a", "b", "c", "d", "e", "f"]
    # A warm-up round and three that count; d dies in its third turn, b in its first.
    assert order.read_text() == "abdfadfadfaf"
    assert "got lengths [3, 3]" in str(by_name["b"].error)
    assert by_name["c"].error == "NotImplementedError: no kernel for int8"
    assert "exited with 9" in str(by_name["d"].error)
    assert by_name["e"].error == "not installed"
    assert all(by_name[name].tokens_per_s is None for name in "bcde")
    for row in (by_name["a"], by_name["f"]):
        assert row.error is None
        assert (row.version, row.dtype, row.matching_tokens) == ("1.0", "bf16", 4)
        assert 0 < (row.p20 or 0) <= (row.tokens_per_s or 0) <= (row.p80 or 0)
        assert 1 < (row.memory_mb or 0) < (row.peak_memory_mb or 0)
        assert row.speedup is None
    assert len(steps) == 5 + 4 * 6


def test_speeds_are_quantiles_of_rounds_and_speedups_are_within_a_round() -> None:
    # ingot at 8 tokens in 1, 2, 4 s; the peer always twice as long.
    ours, peer, gone = rows(
        {
            "ingot": runs(1, 2, 4),
            "slow": runs(2, 4, 8, token=9),
            "gone": GenerationRuns(error="reason"),
        },
        MODEL,
        TASK,
        PEAKS,
        bandwidth=4e9,
    )
    assert (ours.p20, ours.tokens_per_s, ours.p80) == pytest.approx((2.8, 4.0, 6.4))
    assert (ours.speedup, ours.matching_tokens) == (1.0, 4)
    assert peer.tokens_per_s == 2.0
    assert (peer.speedup_p20, peer.speedup, peer.speedup_p80) == (2.0, 2.0, 2.0)
    assert peer.matching_tokens == 2
    ideal = roofline(MODEL, TASK, PEAKS, 4e9)
    assert peer.roofline_fraction == pytest.approx(2.0 / ideal, rel=1e-3)
    assert (peer.ttft_ms, peer.prefill_tokens_per_s) == (500.0, 12.0)
    assert (peer.load_s, peer.memory_mb, peer.peak_memory_mb) == (2.0, 3.0, 5.0)
    expected = CompareRow(
        system="gone",
        model="tiny",
        batch_size=2,
        input_len=3,
        output_len=4,
        rounds=3,
        read_gbs=4.0,
        roofline_tokens_per_s=float(f"{ideal:.4g}"),
        error="reason",
    )
    assert gone == expected


def test_system_without_ttft_has_none() -> None:
    (row,) = rows({"x": runs(1, 2, 4, first=None)}, MODEL, TASK, PEAKS, 4e9)
    assert (row.ttft_ms, row.prefill_tokens_per_s) == (None, None)


def test_no_successful_system_is_not_an_error() -> None:
    assert [
        row.error for row in rows({"x": GenerationRuns(error="a")}, MODEL, TASK, PEAKS, 4e9)
    ] == ["a"]


def test_roofline_is_bound_by_memory_or_compute() -> None:
    # A step reads 2 MB at 4 GB/s in 0.5 ms; a token computes 2 MFLOP at 4 GFLOPS in 0.5 ms.
    one = GenerationTask(batch_size=1, input_len=1, output_len=10, rounds=1)
    assert roofline(MODEL, one, PEAKS, 4e9) == pytest.approx(2000)
    longer = replace(one, input_len=5)
    assert roofline(MODEL, longer, PEAKS, 4e9) == pytest.approx(10 / (9 * 5e-4 + 25e-4))
    assert roofline(MODEL, replace(one, batch_size=4), PEAKS, 4e9) == pytest.approx(2000)
    fast_fp32 = replace(PEAKS, matmul={**PEAKS.matmul, "fp32": replace(PEAK, value=8.0)})
    assert roofline(MODEL, replace(one, batch_size=4), fast_fp32, 4e9) == pytest.approx(4000)
    fast_int8 = replace(PEAKS, matmul={**PEAKS.matmul, "int8": replace(PEAK, value=8.0)})
    assert roofline(MODEL, replace(one, batch_size=4), fast_int8, 4e9) == pytest.approx(2000)
    quantized = replace(MODEL, is_quantized=True)
    assert roofline(quantized, replace(one, batch_size=4), fast_int8, 4e9) == pytest.approx(4000)
    no_matmul = replace(PEAKS, matmul={"fp32": None, "bf16": None, "int8": None})
    assert roofline(MODEL, replace(one, batch_size=4), no_matmul, 4e9) == pytest.approx(8000)
    with_kv = replace(MODEL, kv_bytes=400_000)
    read = [2.4 + 0.4 * done for done in range(10)]
    assert roofline(with_kv, replace(one, output_len=10), no_matmul, 4e9) == pytest.approx(
        4e4 / sum(read)
    )


def test_prompts_differ_between_rounds_and_sequences_but_not_between_runs() -> None:
    first, second = TASK.prompts(90, 0), TASK.prompts(90, 1)
    assert first == TASK.prompts(90, 0)
    assert len({tuple(input_len) for input_len in first + second}) == 4
    assert all(0 <= token < 90 for input_len in first for token in input_len)


def test_task_longer_than_max_seq_len_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"at most 64 \(max_seq_len\), got 60 \+ 5"):
        compare([], MODEL, replace(TASK, input_len=60, output_len=5), PEAKS)


@pytest.mark.parametrize("tied", [True, False])
def test_step_reads_all_weights_except_an_untied_embedding(tmp_path: Path, tied: bool) -> None:
    config = replace(preset("tiny"), tie_embeddings=tied)
    decoder = Decoder.from_config(config, seed=0, dtype=torch.bfloat16)
    hf.save(decoder, tmp_path)
    model = ModelCost.read(tmp_path)
    used = sum(p.numel() for p in decoder.parameters())
    used -= 0 if tied else decoder.tok_embed.weight.numel()
    assert model.step == Cost(bytes=2 * used, flops=2 * used)
    assert (model.vocab_size, model.max_seq_len) == (config.vocab_size, config.max_seq_len)


def test_step_of_a_quantized_model_reads_fewer_bytes_and_computes_the_same(tmp_path: Path) -> None:
    decoder = Decoder.from_config(preset("tiny"), seed=0, dtype=torch.bfloat16)
    hf.save(decoder, tmp_path / "bf16")
    quantize_(decoder, lambda name: Int4(group=32) if "embed" not in name else None)
    hf.save(decoder, tmp_path / "int4")
    full, quantized = ModelCost.read(tmp_path / "bf16"), ModelCost.read(tmp_path / "int4")
    assert (full.is_quantized, quantized.is_quantized) == (False, True)
    assert quantized.step.flops == full.step.flops
    linear = full.step.flops // 2 - sum(p.numel() for p in decoder.parameters())
    assert full.step.bytes - quantized.step.bytes == pytest.approx(
        linear * (16 - 4.5) / 8, rel=0.01
    )


def test_directory_without_model_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(IngotError):
        ModelCost.read(tmp_path)


@pytest.mark.usefixtures("cache")
def test_find_systems_returns_each_with_its_error(tmp_path: Path) -> None:
    for name in ("vllm", "llamacpp"):
        (tmp_path / f"{name}.txt").write_text("")
    systems = find_systems(tmp_path)
    assert [system.name for system in systems] == ["ingot", "llamacpp", "vllm"]
    assert systems[0].error == f"{tmp_path}: ingot.py not found"
    assert "install_peers.py llamacpp" in str(systems[1].error)
    (tmp_path / "ingot.py").write_text("")
    assert find_systems(tmp_path)[0].error is None
    assert [system.name for system in find_systems(tmp_path, ["vllm"])] == ["vllm"]
    with pytest.raises(UnknownName, match="did you mean 'vllm'"):
        find_systems(tmp_path, ["vlm"])


@pytest.mark.usefixtures("cache")
def test_ingot_system_imports_the_running_ingot(make: Make, tmp_path: Path) -> None:
    load = f"import ingot; open({str(tmp_path / 'file')!r}, 'w').write(ingot.__file__)"
    system: GenerationSystem = make(module.OURS, load=load)
    with system.start(tmp_path, tmp_path) as process:
        process.start()
    assert (tmp_path / "file").read_text() == str(Path(module.__file__).parents[1] / "__init__.py")
