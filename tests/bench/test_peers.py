"""Whole runs of real processes that speak the protocol, and the statistics by hand."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch

from ingot.bench import peers
from ingot.bench.peaks import Peak, Peaks
from ingot.bench.peer import Answer, Hello
from ingot.bench.peers import Model, Row, System, Task, Turns, compare, found, limit, rows
from ingot.core.errors import ConfigError, IngotError, UnknownName
from ingot.interop import hf
from ingot.nn import Decoder, preset
from ingot.ops.op import Cost

from .conftest import TensorMaker

PEAK = Peak(value=4.0, low=1.0, typical=2.0, high=3.0)
PEAKS = Peaks(
    method=1,
    measured=datetime(2026, 11, 15, tzinfo=UTC),
    read_bandwidth=PEAK,
    matmul={"fp32": PEAK, "bf16": PEAK, "int8": None},
)
MODEL = Model(
    path=Path("/models/tiny"),
    vocabulary=90,
    context=64,
    step=Cost(bytes=2_000_000, flops=2_000_000),
    kv=0,
)
TASK = Task(batch=2, prompt=3, new=4, rounds=3)
HELLO = Hello(version="1.0", dtype="bf16", ready=2.0)


def turns(*seconds: float, first: float | None = 0.5, token: int = 7) -> Turns:
    tokens = [[1, 2, token, 4], [5, 6, 7, 8]]
    return Turns(HELLO, [Answer(s, tokens, first) for s in seconds], memory=3_000_000)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.usefixtures("cache")
def test_all_take_turns_and_those_that_fail_are_named(make: TensorMaker, tmp_path: Path) -> None:
    order = tmp_path / "order"
    note = f"open({str(order)!r}, 'a').write(__spec__.name[-1])"
    late = f"{note}; open({str(order)!r}).read().count('d') < 3 or os._exit(9)"
    systems = [
        make("a", generate=note),
        make("b", generate=note + "; new -= len(prompts[0]) == 3"),
        make("c", load="raise OSError('no library')"),
        make("d", generate=late),
        replace(make("e", generate=note), missing="not installed"),
        make("f", generate=note),
    ]
    steps: list[str] = []
    found = compare(systems, MODEL, TASK, PEAKS, steps.append)
    by_name = {row.system: row for row in found}
    assert list(by_name) == ["a", "b", "c", "d", "e", "f"]
    # A round that does not count and three that do; d dies in its third turn, b in its first.
    assert order.read_text() == "abdfadfadfaf"
    assert "gave [3, 3]" in str(by_name["b"].missing)
    assert "no library" in str(by_name["c"].missing)
    assert "exited with 9" in str(by_name["d"].missing)
    assert by_name["e"].missing == "not installed"
    assert all(by_name[name].tokens_per_s is None for name in "bcde")
    for row in (by_name["a"], by_name["f"]):
        assert row.missing is None
        assert (row.version, row.dtype, row.agree) == ("1.0", "bf16", 4)
        assert 0 < (row.p20 or 0) <= (row.tokens_per_s or 0) <= (row.p80 or 0)
        assert (row.memory_mb or 0) > 1
        assert row.ingot_faster is None
    assert len(steps) == 5 + 4 * 6


def test_figures_are_quantiles_of_rounds_and_ratios_are_taken_within_one() -> None:
    # ingot at 8 tokens in 1, 2, 4 s; the peer always twice as long.
    ours, peer, gone = rows(
        {"ingot": turns(1, 2, 4), "slow": turns(2, 4, 8, token=9), "gone": Turns(missing="why")},
        MODEL,
        TASK,
        PEAKS,
        bandwidth=4e9,
    )
    assert (ours.p20, ours.tokens_per_s, ours.p80) == pytest.approx((2.8, 4.0, 6.4))
    assert (ours.ingot_faster, ours.agree) == (1.0, 4)
    assert peer.tokens_per_s == 2.0
    assert (peer.ingot_faster_p20, peer.ingot_faster, peer.ingot_faster_p80) == (2.0, 2.0, 2.0)
    assert peer.agree == 2
    most = limit(MODEL, TASK, PEAKS, 4e9)
    assert peer.share_of_limit == pytest.approx(2.0 / most, rel=1e-3)
    assert (peer.first_token_ms, peer.prefill_tokens_per_s) == (500.0, 12.0)
    assert (peer.start_s, peer.memory_mb) == (2.0, 3.0)
    expected = Row(
        system="gone",
        model="tiny",
        batch=2,
        prompt=3,
        new=4,
        rounds=3,
        read_gbs=4.0,
        limit_tokens_per_s=float(f"{most:.4g}"),
        missing="why",
    )
    assert gone == expected


def test_who_does_not_tell_the_first_token_has_none() -> None:
    (row,) = rows({"x": turns(1, 2, 4, first=None)}, MODEL, TASK, PEAKS, 4e9)
    assert (row.first_token_ms, row.prefill_tokens_per_s) == (None, None)


def test_nobody_there_is_no_error() -> None:
    assert [row.missing for row in rows({"x": Turns(missing="a")}, MODEL, TASK, PEAKS, 4e9)] == [
        "a"
    ]


def test_the_limit_is_of_memory_or_of_compute() -> None:
    # A step reads 2 MB at 4 GB/s in 0.5 ms; a token computes 2 MFLOP at 4 GFLOPS in 0.5 ms.
    one = Task(batch=1, prompt=1, new=10, rounds=1)
    assert limit(MODEL, one, PEAKS, 4e9) == pytest.approx(2000)
    longer = replace(one, prompt=5)
    assert limit(MODEL, longer, PEAKS, 4e9) == pytest.approx(10 / (9 * 5e-4 + 25e-4))
    assert limit(MODEL, replace(one, batch=4), PEAKS, 4e9) == pytest.approx(2000)
    no_matmul = replace(PEAKS, matmul={"fp32": None, "bf16": None, "int8": None})
    assert limit(MODEL, replace(one, batch=4), no_matmul, 4e9) == pytest.approx(8000)
    keeping = replace(MODEL, kv=400_000)
    read = [2.4 + 0.4 * done for done in range(10)]
    assert limit(keeping, replace(one, new=10), no_matmul, 4e9) == pytest.approx(4e4 / sum(read))


def test_prompts_differ_between_rounds_and_sequences_but_not_between_runs() -> None:
    first, second = TASK.prompts(90, 0), TASK.prompts(90, 1)
    assert first == TASK.prompts(90, 0)
    assert len({tuple(prompt) for prompt in first + second}) == 4
    assert all(0 <= token < 90 for prompt in first for token in prompt)


def test_a_task_beyond_the_context_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"60 \+ 5 tokens are beyond the model's 64"):
        compare([], MODEL, replace(TASK, prompt=60, new=5), PEAKS)


@pytest.mark.parametrize("tied", [True, False])
def test_a_step_reads_all_weights_but_an_embedding_of_its_own(tmp_path: Path, tied: bool) -> None:
    config = replace(preset("tiny"), tie_embeddings=tied)
    decoder = Decoder.from_config(config, seed=0, dtype=torch.bfloat16)
    hf.save(decoder, tmp_path)
    model = Model.of(tmp_path)
    used = sum(p.numel() for p in decoder.parameters())
    used -= 0 if tied else decoder.tok_embed.weight.numel()
    assert model.step == Cost(bytes=2 * used, flops=2 * used)
    assert (model.vocabulary, model.context) == (config.vocab_size, config.max_seq_len)


def test_a_directory_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IngotError):
        Model.of(tmp_path)


@pytest.mark.usefixtures("cache")
def test_every_peer_is_found_and_says_why_it_is_missing(tmp_path: Path) -> None:
    for name in ("vllm", "llamacpp"):
        (tmp_path / f"{name}.txt").write_text("")
    systems = found(tmp_path)
    assert [system.name for system in systems] == ["ingot", "llamacpp", "vllm"]
    assert systems[0].missing == f"there is no ingot.py in {tmp_path}"
    assert "install_peers.py llamacpp" in str(systems[1].missing)
    (tmp_path / "ingot.py").write_text("")
    assert found(tmp_path)[0].missing is None
    assert [system.name for system in found(tmp_path, ["vllm"])] == ["vllm"]
    with pytest.raises(UnknownName, match="did you mean 'vllm'"):
        found(tmp_path, ["vlm"])


@pytest.mark.usefixtures("cache")
def test_ours_imports_this_ingot(make: TensorMaker, tmp_path: Path) -> None:
    load = f"import ingot; open({str(tmp_path / 'file')!r}, 'w').write(ingot.__file__)"
    system: System = make(peers.OURS, load=load)
    with system.start(tmp_path, tmp_path) as process:
        process.start()
    assert (tmp_path / "file").read_text() == str(Path(peers.__file__).parents[1] / "__init__.py")
