"""Adapters of a decoder: trained, and served from slots with the same bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.core.errors import ConfigError, IngotError, UnknownName
from ingot.interop import hf
from ingot.nn import BatchLayout, Decoder, DecoderConfig, KVCache, LoraConfig, LoraWeights, preset
from ingot.nn.config import Activation, NormKind, NormPosition, QkNorm, Rope
from ingot.nn.dropout import set_step
from ingot.nn.lora import LoraKey
from ingot.nn.loss import token_losses
from ingot.ops.replay import capture

TINY = replace(preset("tiny"), layers=2)
FAMILIES: dict[str, DecoderConfig] = {
    "llama": TINY,
    "gpt2": replace(
        TINY,
        rope=None,
        kv_heads=TINY.heads,
        norm=NormKind.LAYER,
        activation=Activation.GELU_TANH,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
    ),
    "qwen2": replace(TINY, qkv_bias=True, rope=Rope(theta=1e6)),
    "qwen3": replace(TINY, qk_norm=QkNorm.PER_HEAD),
    "olmo2": replace(TINY, norm_position=NormPosition.POST, qk_norm=QkNorm.FULL),
    "mistral": replace(TINY, sliding_window=8),
    "mixtral": replace(preset("tiny-moe"), layers=2),
}
DTYPES = (torch.float32, torch.bfloat16)
TOKENS = torch.randint(0, 200, (24,), generator=torch.Generator().manual_seed(0))
LAYOUT = BatchLayout.packed([10, 14])
Weights = dict[LoraKey, LoraWeights]


def randomize(decoder: Decoder, seed: int) -> None:
    """Give the adapter that is trained a B that is not 0."""
    random = torch.Generator().manual_seed(seed)
    for pair in decoder.lora_weights().values():
        pair.b.copy_(torch.randn(pair.b.shape, generator=random) * 0.1)


def trained(config: DecoderConfig, dtype: torch.dtype, lora: LoraConfig, seed: int = 1) -> Decoder:
    decoder = Decoder.from_config(config, seed=0, dtype=dtype)
    decoder.add_lora(lora, seed=seed)
    randomize(decoder, seed)
    return decoder


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_new_adapter_has_the_bits_of_the_base(family: str, dtype: torch.dtype) -> None:
    decoder = Decoder.from_config(FAMILIES[family], seed=0, dtype=dtype)
    with torch.no_grad():
        base = decoder(TOKENS, LAYOUT)
    decoder.add_lora(LoraConfig(rank=4), seed=1)
    hidden = decoder(TOKENS, LAYOUT)
    assert torch.equal(hidden, base)
    hidden.float().square().sum().backward()
    grads = {name for name, p in decoder.named_parameters() if p.grad is not None}
    assert grads == {name for name, _ in decoder.named_parameters() if ".lora." in name}
    randomize(decoder, 1)
    assert not torch.equal(decoder(TOKENS, LAYOUT), base)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_slots_have_the_bits_of_training(family: str, dtype: torch.dtype) -> None:
    config, lora = FAMILIES[family], LoraConfig(rank=3, alpha=5.0)
    one, other = (trained(config, dtype, lora, seed) for seed in (1, 2))
    served = Decoder.from_config(config, seed=0, dtype=dtype)
    served.add_lora_slots(max_loras=3, max_rank=8)
    served.set_adapter(0, other.lora_weights(), lora.scale)
    served.set_adapter(2, one.lora_weights(), lora.scale)
    adapters = torch.tensor([2] * 10 + [0] * 14, dtype=torch.int32)
    with torch.no_grad():
        mixed = served(TOKENS, replace(LAYOUT, adapters=adapters))
        assert torch.equal(mixed[:10], one(TOKENS, LAYOUT)[:10])
        assert torch.equal(mixed[10:], other(TOKENS, LAYOUT)[10:])
        none = replace(LAYOUT, adapters=torch.full((24,), -1, dtype=torch.int32))
        base = Decoder.from_config(config, seed=0, dtype=dtype)(TOKENS, LAYOUT)
        for layout in (LAYOUT, none):
            assert torch.equal(served(TOKENS, layout), base)
        assert torch.equal(one(TOKENS, none), base)  # the base under the adapter that is trained


@pytest.mark.parametrize(
    "targets",
    [("q_proj", "v_proj"), ("gate_proj",), ("up_proj", "down_proj"), ("k_proj", "o_proj")],
)
def test_some_targets(targets: tuple[str, ...]) -> None:
    lora = LoraConfig(rank=2, targets=targets)
    decoder = trained(TINY, torch.bfloat16, lora)
    assert {target for _, target in decoder.lora_weights()} == set(targets)
    served = Decoder.from_config(TINY, seed=0, dtype=torch.bfloat16)
    served.add_lora_slots(max_loras=1, max_rank=2)
    served.set_adapter(0, decoder.lora_weights(), lora.scale)
    hidden = decoder(TOKENS, LAYOUT)
    with torch.no_grad():
        slots = replace(LAYOUT, adapters=torch.zeros(24, dtype=torch.int32))
        assert torch.equal(served(TOKENS, slots), hidden)
    hidden.float().sum().backward()
    for parameter in decoder.parameters():
        assert (parameter.grad is not None) is parameter.requires_grad


LORAS = [trained(TINY, torch.bfloat16, LoraConfig(rank=rank), rank) for rank in (1, 4, 8)]
SERVED = Decoder.from_config(TINY, seed=0, dtype=torch.bfloat16)
SERVED.add_lora_slots(max_loras=3, max_rank=8)
for _slot, _decoder in enumerate(LORAS):
    SERVED.set_adapter(_slot, _decoder.lora_weights(), 32.0 / (1, 4, 8)[_slot])


@settings(deadline=None, max_examples=25)
@given(
    requests=st.lists(
        st.tuples(st.integers(-1, 2), st.integers(1, 12), st.integers(1, 12)),
        min_size=1,
        max_size=6,
    )
)
def test_chunks_of_mixed_requests_have_the_bits_of_training(
    requests: list[tuple[int, int, int]],
) -> None:
    """Each request is prefilled in two chunks, all requests of a step in one batch."""
    spec = SERVED.kv_spec
    cache = KVCache(spec, num_blocks=2 * len(requests), block_size=16)
    table = torch.arange(2 * len(requests)).view(-1, 2)
    texts = [TOKENS[: first + second] for _, first, second in requests]
    results: list[list[torch.Tensor]] = [[] for _ in requests]
    with torch.inference_mode():
        for step in (0, 1):
            lengths = [request[1 + step] for request in requests]
            ends = [request[1] + step * request[2] for request in requests]
            tokens = torch.cat([t[e - n : e] for t, e, n in zip(texts, ends, lengths, strict=True)])
            slots = torch.tensor([slot for slot, *_ in requests], dtype=torch.int32)
            adapters = slots.repeat_interleave(torch.tensor(lengths))
            layout = BatchLayout.paged(cache, lengths, ends, table)
            hidden = SERVED(tokens, replace(layout, adapters=adapters))
            for result, part in zip(results, hidden.split(lengths), strict=True):
                result.append(part)
        for (slot, *_), text, result in zip(requests, texts, results, strict=True):
            decoder = SERVED if slot < 0 else LORAS[slot]
            assert torch.equal(torch.cat(result), decoder(text, BatchLayout.packed([len(text)])))


def test_captured_step_sees_an_adapter_that_is_loaded_later() -> None:
    decoder = Decoder.from_config(TINY, seed=0, dtype=torch.bfloat16)
    decoder.add_lora_slots(max_loras=1, max_rank=8)
    layout = replace(LAYOUT, adapters=torch.zeros(24, dtype=torch.int32))
    with torch.inference_mode():
        base, step = capture(lambda: decoder(TOKENS, layout))
        assert torch.equal(step(), base)
        decoder.set_adapter(0, LORAS[1].lora_weights(), 8.0)
        assert torch.equal(step(), LORAS[1](TOKENS, LAYOUT))
        decoder.set_adapter(0, {}, 1.0)
        assert torch.equal(step(), base)


def losses(decoder: Decoder, rows: slice = slice(None)) -> torch.Tensor:
    tokens = torch.cat([TOKENS, TOKENS])[rows]
    return token_losses(
        decoder, tokens, tokens.roll(1), [12] * (len(tokens) // 12), grad_output=1.0
    )


@pytest.mark.parametrize("policy", ["selective", "full"])
def test_recomputation_gives_the_same_gradients(policy: str) -> None:
    grads = []
    for chosen in ("none", policy):
        decoder = trained(TINY, torch.bfloat16, LoraConfig(rank=4, dropout=0.2))
        decoder.set_recompute(chosen)  # pyright: ignore[reportArgumentType]
        losses(decoder).sum().backward()
        grads.append({n: p.grad for n, p in decoder.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    assert all(torch.equal(grad, grads[1][name]) for name, grad in grads[0].items())


def test_dropout_does_not_depend_on_micro_batches() -> None:
    decoder = trained(TINY, torch.bfloat16, LoraConfig(rank=4, dropout=0.3))
    set_step(decoder, seed=3, step=5)
    whole = losses(decoder)
    parts = []
    for row in (0, 24):
        set_step(decoder, seed=3, step=5, row=row)
        parts.append(losses(decoder, slice(row, row + 24)))
    assert torch.equal(torch.cat(parts)[1:24], whole[1:24])
    decoder.eval()
    assert not torch.equal(losses(decoder), whole)


def test_frozen_head_computes_the_gradient_of_the_states_only() -> None:
    decoder = trained(TINY, torch.bfloat16, LoraConfig(rank=4))
    fused, plain = losses(decoder), token_losses(decoder, TOKENS, TOKENS.roll(1), [12, 12])
    assert torch.equal(fused[1:24], plain[1:])
    fused.sum().backward()
    weight = decoder.lm_head_weight
    assert weight.grad is None
    assert all(p.grad is not None for p in decoder.parameters() if p.requires_grad)


def test_initial_a_is_that_of_peft() -> None:
    """`nn.init.kaiming_uniform_(a, a=sqrt(5))`: uniform up to 1 / sqrt(in)."""
    decoder = trained(TINY, torch.float32, LoraConfig(rank=64))
    a = decoder.lora_weights()[0, "down_proj"].a
    bound = a.shape[1] ** -0.5
    assert a.abs().max() <= bound
    assert abs(float(a.std()) - bound / 3**0.5) < 0.01 * bound
    again = trained(TINY, torch.float32, LoraConfig(rank=64))
    assert torch.equal(a, again.lora_weights()[0, "down_proj"].a)


def test_saved_model_is_the_base(tmp_path: Path) -> None:
    decoder = trained(TINY, torch.float32, LoraConfig())
    hf.save(decoder, tmp_path)
    base = hf.load(tmp_path)
    for name, parameter in base.named_parameters():
        assert torch.equal(parameter, decoder.get_parameter(name))


def test_wrong_targets_and_weights_are_refused() -> None:
    decoder = Decoder.from_config(FAMILIES["mixtral"], seed=0)
    for target in ("up_proj", "router"):
        with pytest.raises(UnknownName, match=f"LoRA target '{target}'"):
            decoder.add_lora(LoraConfig(targets=(target,)), seed=0)
    assert all(p.requires_grad for p in decoder.parameters())
    with pytest.raises(ConfigError, match="together"):
        decoder.add_lora(LoraConfig(targets=("qkv_proj", "q_proj")), seed=0)
    with pytest.raises(IngotError, match="no LoRA slots"):
        decoder.set_adapter(0, {}, 1.0)
    with pytest.raises(ConfigError, match="max_loras"):
        decoder.add_lora_slots(0, 8)
    decoder.add_lora_slots(1, 4)
    dim = decoder.config.dim
    for shape in ((5, dim), (4, dim + 1)):
        weights = LoraWeights(torch.ones(shape), torch.ones(shape[0], dim))
        with pytest.raises(IngotError, match="LoRA weights of o_proj"):
            decoder.set_adapter(0, {(0, "o_proj"): weights}, 1.0)
    with pytest.raises(UnknownName, match="of layer 9"):
        decoder.set_adapter(
            0, {(9, "o_proj"): LoraWeights(torch.ones(1, 1), torch.ones(1, 1))}, 1.0
        )


@pytest.mark.parametrize(
    "options", [{"rank": 0}, {"alpha": 0.0}, {"targets": ()}, {"dropout": 1.0}]
)
def test_config_bounds(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        LoraConfig(**options)  # pyright: ignore[reportArgumentType]
