"""The decoder as a whole; tests/interop/test_hf.py compares its families with transformers.

Batch invariance: the logits of a token depend on the tokens before it only. A schedule is a way to
serve some sequences: in chunks, batched, from blocks anywhere in a cache, on a number of threads.
All schedules must give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ingot import ops
from ingot.core.errors import UnknownName
from ingot.nn import (
    Activation,
    BatchLayout,
    Decoder,
    DecoderConfig,
    KVCache,
    MoEConfig,
    NormKind,
    NormPosition,
    QkNorm,
    preset,
)

TINY = replace(preset("tiny"), dim=40, head_dim=12, ffn_dim=52, vocab_size=61)
KINDS: dict[str, DecoderConfig] = {
    "llama": TINY,
    "gpt2": replace(
        TINY,
        rope=None,
        norm=NormKind.LAYER,
        activation=Activation.GELU_TANH,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
    ),
    "window": replace(TINY, sliding_window=5, sliding_window_layers=(1,), qkv_bias=True),
    "qwen3": replace(TINY, qk_norm=QkNorm.PER_HEAD, tie_embeddings=False),
    "olmo2": replace(TINY, qk_norm=QkNorm.FULL, norm_position=NormPosition.POST),
    "moe": replace(
        TINY, moe=MoEConfig(num_experts=6, top_k=3, ffn_dim=20, norm_topk_prob=False, layers=(1,))
    ),
}
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


def made(kind: str, dtype: torch.dtype) -> Decoder:
    """Build a decoder with larger weights than initial ones, whose attention is nearly uniform."""
    decoder = Decoder.from_config(KINDS[kind], seed=1, dtype=dtype)
    random = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in decoder.parameters():
            noise = torch.randn(parameter.shape, generator=random) * 0.15
            parameter.add_(noise.to(dtype))
    return decoder


DECODERS = {(kind, dtype): made(kind, dtype) for kind in KINDS for dtype in BITS}


@pytest.fixture(autouse=True)
def _restore_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@torch.inference_mode()
def whole(decoder: Decoder, tokens: Tensor) -> Tensor:
    layout = BatchLayout.packed([len(tokens)])
    return decoder.logits(decoder(tokens, layout))


@dataclass(frozen=True)
class Schedule:
    lengths: list[int]
    chunks: list[int]
    """Numbers of tokens that a sequence advances by, cyclically."""
    block_size: int
    seed: int
    threads: int


schedules = st.builds(
    Schedule,
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=4),
    chunks=st.lists(
        st.one_of(st.integers(0, 3), st.integers(0, 40)), min_size=1, max_size=6
    ).filter(any),
    block_size=st.integers(1, 17),
    seed=st.integers(0, 2**32 - 1),
    threads=st.integers(1, 2),
)


@torch.inference_mode()
def served(decoder: Decoder, sequences: list[Tensor], schedule: Schedule) -> list[Tensor]:
    """Return the logits of each sequence, computed by the schedule."""
    most = -(-max(map(len, sequences)) // schedule.block_size)
    blocks = len(sequences) * most + 3
    random = torch.Generator().manual_seed(schedule.seed)
    order = torch.randperm(blocks, generator=random)
    table = order[: len(sequences) * most].view(len(sequences), most)
    pool = KVCache(decoder.kv_spec, blocks, schedule.block_size)
    pool.memory.fill_(torch.nan)  # unwritten slots must not be read
    done, found, turn = [0] * len(sequences), [[] for _ in sequences], count()
    while any(d < len(s) for d, s in zip(done, sequences, strict=True)):
        news = [
            min(schedule.chunks[next(turn) % len(schedule.chunks)], len(s) - d)
            for d, s in zip(done, sequences, strict=True)
        ]
        next(turn)
        if not sum(news):  # the schedule may come back to 0 for ever
            news = [min(1, len(s) - d) for d, s in zip(done, sequences, strict=True)]
        tokens = [s[d : d + n] for s, d, n in zip(sequences, done, news, strict=True)]
        done = [d + n for d, n in zip(done, news, strict=True)]
        layout = BatchLayout.paged(pool, news, done, table)
        hidden = decoder(torch.cat(tokens), layout)
        for of_one, part in zip(found, decoder.logits(hidden).split(news), strict=True):
            of_one.append(part)
    return [torch.cat(parts) for parts in found]


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    bits = BITS[actual.dtype]
    different = (actual.view(bits) != expected.view(bits)).any(-1).nonzero().flatten()
    assert not len(different), f"tokens {different.tolist()}"
    assert actual.isfinite().all()


@pytest.mark.parametrize("dtype", BITS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_do_not_depend_on_the_schedule(kind: str, dtype: torch.dtype) -> None:
    decoder = DECODERS[kind, dtype]

    @settings(max_examples=12, deadline=None, derandomize=True, database=None)
    @given(schedules)
    def check(schedule: Schedule) -> None:
        random = torch.Generator().manual_seed(schedule.seed)
        sequences = [torch.randint(61, (n,), generator=random) for n in schedule.lengths]
        torch.set_num_threads(schedule.threads)
        for actual, tokens in zip(served(decoder, sequences, schedule), sequences, strict=True):
            torch.set_num_threads(1)
            assert_same_bits(actual, whole(decoder, tokens))

    check()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", BITS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_do_not_depend_on_many_random_schedules(kind: str, dtype: torch.dtype) -> None:
    decoder = DECODERS[kind, dtype]

    @settings(
        max_examples=200, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
    )
    @given(schedules)
    def check(schedule: Schedule) -> None:
        sequences = [torch.randint(61, (n,)) for n in schedule.lengths]
        torch.set_num_threads(schedule.threads)
        for actual, tokens in zip(served(decoder, sequences, schedule), sequences, strict=True):
            assert_same_bits(actual, whole(decoder, tokens))

    check()


@pytest.mark.parametrize("dtype", BITS, ids=str)
@pytest.mark.parametrize("chunks", [[1], [7, 64, 1], [512]], ids=str)
def test_512_tokens_in_one_forward_one_by_one_and_in_chunks(
    chunks: list[int], dtype: torch.dtype
) -> None:
    decoder = DECODERS["llama", dtype]
    tokens = torch.randint(61, (512,), generator=torch.Generator().manual_seed(0))
    schedule = Schedule([512], chunks, block_size=16, seed=0, threads=1)
    (actual,) = served(decoder, [tokens], schedule)
    assert_same_bits(actual, whole(decoder, tokens))


@pytest.mark.parametrize("kind", KINDS)
def test_packed_neighbours_do_not_change_bits(kind: str) -> None:
    decoder = DECODERS[kind, torch.bfloat16]
    sequences = [torch.randint(61, (n,)) for n in (33, 1, 64, 130)]
    layout = BatchLayout.packed([33, 1, 64, 130])
    with torch.inference_mode():
        logits = decoder.logits(decoder(torch.cat(sequences), layout))
    for actual, tokens in zip(logits.split([33, 1, 64, 130]), sequences, strict=True):
        assert_same_bits(actual, whole(decoder, tokens))


def test_attention_is_causal() -> None:
    """The tests above compare forwards that might all share a bug."""
    decoder = DECODERS["llama", torch.float32]
    tokens = torch.arange(20)
    changed = tokens.clone()
    changed[12] = 60
    one, other = whole(decoder, tokens), whole(decoder, changed)
    assert_same_bits(one[:12], other[:12])
    assert not torch.equal(one[12:], other[12:])


def test_initial_weights_depend_on_the_seed_alone() -> None:
    config = replace(preset("tiny-moe"), norm=NormKind.LAYER, layers=8)
    state = torch.get_rng_state()
    one, same = Decoder.from_config(config, seed=3), Decoder.from_config(config, seed=3)
    assert torch.equal(torch.get_rng_state(), state), "nobody else's random numbers are used"
    other = Decoder.from_config(config, seed=4)
    for (name, a), b, c in zip(
        one.named_parameters(), same.parameters(), other.parameters(), strict=True
    ):
        assert torch.equal(a, b), name
        assert torch.equal(a, c) == ("norm" in name), name
    block = one.blocks[0]
    assert 0.019 < block.attention.qkv.weight.std() < 0.021  # pyright: ignore
    assert 0.0045 < block.attention.out.weight.std() < 0.0055  # pyright: ignore
    assert 0.0045 < block.mlp.down.std() < 0.0055  # pyright: ignore
    assert bool((one.norm.weight == 1).all())


def test_training_with_linear_cross_entropy_lowers_the_loss() -> None:
    decoder = Decoder.from_config(replace(preset("tiny"), layers=1), seed=0)
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=1e-2)
    tokens, layout = torch.arange(48) % 7, BatchLayout.packed([32, 16])
    for _ in range(15):
        optimizer.zero_grad()
        hidden = decoder(tokens, layout)
        loss = ops.linear_cross_entropy(hidden, decoder.lm_head_weight, tokens.roll(-1)).mean()
        loss.backward()
        optimizer.step()
    assert loss < 1  # pyright: ignore[reportPossiblyUnboundVariable]


def test_decoder_compiles_as_one_graph() -> None:
    decoder = DECODERS["llama", torch.float32]
    tokens, layout = torch.arange(12), BatchLayout.packed([7, 5])
    torch.compiler.reset()
    compiled = torch.compile(decoder, fullgraph=True, backend="aot_eager")
    expected = decoder(tokens, layout)
    assert torch.equal(compiled(tokens, layout), expected)


def test_token_or_position_out_of_range_raises() -> None:
    decoder = DECODERS["gpt2", torch.float32]
    layout = BatchLayout.packed([1])
    with pytest.raises((IndexError, RuntimeError)):
        decoder(torch.tensor([61]), layout)
    with pytest.raises((IndexError, RuntimeError)):
        decoder(
            torch.tensor([1]),
            replace(layout, positions=layout.positions + KINDS["gpt2"].max_seq_len),
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 70])
def test_logprobs_equal_negated_loss_bitwise(dtype: torch.dtype, rows: int) -> None:
    """So a trainer and a server report the same log-probabilities."""
    decoder = Decoder.from_config(preset("tiny"), seed=0, dtype=dtype)
    random = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, 64, generator=random).to(dtype)
    tokens = torch.randint(256, (rows,), generator=random)
    pairs = zip(hidden, tokens, strict=True)
    with torch.inference_mode():
        found = decoder.logprobs(hidden, tokens)
        loss = ops.linear_cross_entropy(hidden, decoder.lm_head_weight, tokens)
        alone = torch.cat([decoder.logprobs(h[None], t[None]) for h, t in pairs])
    assert torch.equal(found, -loss)
    assert torch.equal(found, alone)
    assert found.dtype == torch.float32


@pytest.mark.parametrize("place", list(NormPosition))
def test_residual_dropout_applies_in_training_only(place: NormPosition) -> None:
    decoder = Decoder.from_config(replace(preset("tiny"), norm_position=place), seed=0)
    layout = BatchLayout.packed([5, 3])
    tokens = torch.arange(8)
    plain = decoder(tokens, layout)
    names = decoder.state_dict().keys()
    decoder.set_dropout(0.5)
    assert decoder.state_dict().keys() == names
    assert not torch.equal(decoder(tokens, layout), plain)
    assert torch.equal(decoder.eval()(tokens, layout), plain)
    decoder.train().set_dropout(1e-4)  # of 512 values none: the same mathematics
    torch.testing.assert_close(decoder(tokens, layout), plain, rtol=1e-3, atol=1e-3)
    decoder.set_dropout(0.0)
    assert torch.equal(decoder(tokens, layout), plain)


def test_an_unknown_kv_cache_dtype_raises() -> None:
    model = Decoder.from_config(preset("tiny"), seed=0)
    with pytest.raises(UnknownName, match="int8"):
        model.set_kv_cache_dtype("int7")  # pyright: ignore


def test_an_int8_cache_changes_a_packed_forward_a_little() -> None:
    model, layout = Decoder.from_config(preset("tiny"), seed=0), BatchLayout.packed([40])
    tokens = torch.arange(40)
    expected = model(tokens, layout)
    model.set_kv_cache_dtype("int8")
    found = model(tokens, layout)
    assert 0 < (found - expected).abs().max() < 0.02 * expected.abs().max()
    found.sum().backward()
    assert model.blocks[0].attention.qkv.weight.grad.isfinite().all()  # pyright: ignore
