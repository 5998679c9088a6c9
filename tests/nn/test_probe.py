"""The probe sees every op once, in order, and what it writes is what the next op reads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ingot.nn import BatchLayout, Decoder, preset
from ingot.nn.config import DecoderConfig, MoEConfig, NormPosition, QkNorm
from ingot.nn.probe import probe

TINY = preset("tiny")
CONFIGS = {
    "pre-norm": TINY,
    "post-norm": replace(TINY, norm_position=NormPosition.POST, qk_norm=QkNorm.FULL),
    "qk-norm": replace(TINY, qk_norm=QkNorm.PER_HEAD),
    "moe": replace(TINY, moe=MoEConfig(num_experts=4, top_k=2, ffn_dim=16, layers=(1,))),
    "learned-positions": replace(TINY, rope=None),
}
TOKENS = torch.arange(9)
each_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def run(decoder: Decoder) -> Tensor:
    return decoder(TOKENS, BatchLayout.packed([len(TOKENS)]))


@each_config
@torch.inference_mode()
def test_every_op_is_visited_once_and_the_result_is_unchanged(config: DecoderConfig) -> None:
    decoder, names = Decoder.from_config(config, seed=0), list[str]()
    plain = run(decoder)

    def visit(name: str, value: Tensor) -> None:
        assert len(value) == len(TOKENS)
        names.append(name)

    with probe(decoder, visit):
        assert torch.equal(run(decoder), plain)
    assert len(names) == len(set(names))
    assert (names[0], names[-1]) == ("embedding", "norm")
    for layer in range(config.layers):
        of_layer = [name for name in names if name.startswith(f"blocks.{layer}.")]
        expected = 9 + 2 * (config.rope is not None) + 2 * (config.qk_norm is not None)
        expected += 2 * (config.norm_position is NormPosition.POST)
        assert len(of_layer) == expected
    run(decoder)
    assert len(names) == len(set(names)), "a hook is left"


@each_config
@torch.inference_mode()
def test_what_a_visitor_writes_is_what_the_next_op_reads(config: DecoderConfig) -> None:
    """A decoder of other weights whose results are all replaced ends with those of the first."""
    first, second = (Decoder.from_config(config, seed=seed) for seed in (0, 1))
    results: dict[str, Tensor] = {}
    with probe(first, lambda name, value: results.update({name: value.clone()})):
        expected = run(first)

    def replace_result(name: str, value: Tensor) -> None:
        value.copy_(results[name])

    with probe(second, replace_result):
        assert torch.equal(run(second), expected)
    for name in results:
        changed: list[str] = []

        def visit(of: str, value: Tensor, name: str = name, changed: list[str] = changed) -> None:
            if of == name:
                value.mul_(1.5).add_(0.5)
            elif not torch.equal(value, results[of]):
                changed.append(of)

        with probe(first, visit):
            run(first)
        assert changed or name == "norm", f"nothing reads {name}"
