from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from ingot import ops
from ingot.nn import Decoder, preset
from ingot.serving.engine.request import Request
from ingot.serving.engine.sampler import Sampler, SamplingState
from ingot.serving.engine.sampling_params import SamplingParams
from tests import oracle

DECODER = Decoder.from_config(preset("tiny"), seed=0, dtype=torch.bfloat16)
HIDDEN = torch.randn(7, 64, generator=torch.Generator().manual_seed(1)).bfloat16()


def sampled(**options: Any) -> SamplingState:
    return SamplingState(
        Request(id=1, prompt=(3, 3, 9), max_tokens=9, sampling_params=SamplingParams(**options))
    )


@torch.inference_mode()
def draw(of: list[SamplingState], drafts: Any = None) -> tuple[list[int], dict[int, Any]]:
    hidden = HIDDEN[: len(of)] if len(of) > 1 else HIDDEN[:1]
    return Sampler(DECODER).sample(hidden, of, torch.tensor([4] * len(of)), drafts)


MANY: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"seed": 5, "logprobs": 2},
    {"seed": 6, "logit_bias": ((7, 1000.0),)},
    {"seed": 7, "frequency_penalty": 1.5, "repetition_penalty": 1.2, "logprobs": 0},
    {"seed": 8, "top_k": 3, "logprobs": 5, "logprobs_mode": "processed"},
    {"seed": -1, "top_p": 0.5, "min_p": 0.1, "presence_penalty": -1.0},
    {
        "seed": 9,
        "logprobs": 3,
        "logprobs_mode": "processed",
        "logit_bias": ((1, -1000.0),),
        "temperature": 0.5,
    },
]


def test_a_draw_does_not_depend_on_the_others() -> None:
    tokens, logprobs = draw([sampled(**options) for options in MANY])
    for row, options in enumerate(MANY):
        with torch.inference_mode():
            alone = Sampler(DECODER).sample(
                HIDDEN[row : row + 1], [sampled(**options)], torch.tensor([4])
            )
        assert alone[0] == [tokens[row]]
        assert alone[1].get(0) == logprobs.get(row)
    assert sorted(logprobs) == [1, 3, 4, 6]


def test_a_plain_request_is_sampled_like_the_oracle() -> None:
    options = {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 11}
    with torch.inference_mode():
        logits = DECODER.logits(HIDDEN[:1])
        columns = oracle.sampling_columns(SamplingParams(**options), 256)
        temperature, top_k, top_p, min_p, seed = columns
        sampled_ids = ops.sample(logits, temperature, top_k, top_p, min_p, seed, torch.tensor([4]))
        wanted = sampled_ids.tolist()
    assert draw([sampled(**options)])[0] == wanted


def test_logprobs_are_those_a_trainer_has() -> None:
    tokens, logprobs = draw([sampled(seed=seed, logprobs=4) for seed in range(7)])
    with torch.inference_mode():
        for row, token in enumerate(tokens):
            found = logprobs[row]
            assert found.token == token
            pairs = [(token, found.logprob), *found.top]
            targets = torch.tensor([one for one, _ in pairs])
            hidden = HIDDEN[row : row + 1].expand(len(pairs), -1).contiguous()
            losses = ops.linear_cross_entropy(hidden, DECODER.lm_head_weight, targets)
            assert [logprob for _, logprob in pairs] == (-losses).tolist()
            assert found.top == tuple(sorted(found.top, key=lambda pair: -pair[1]))
            best = DECODER.logits(HIDDEN[row : row + 1]).float().max()
            assert float(DECODER.logits(HIDDEN[row : row + 1])[0, found.top[0][0]]) == float(best)


def test_processed_logprobs_are_of_the_distribution_sampled_from() -> None:
    _, logprobs = draw([sampled(top_k=3, logprobs=5, logprobs_mode="processed")])
    top = logprobs[0].top
    assert len(top) == 3  # the others cannot come
    assert sum(math.exp(logprob) for _, logprob in top) == pytest.approx(1, abs=1e-5)
    assert logprobs[0].logprob in [logprob for _, logprob in top]
    biased = sampled(logprobs=1, logprobs_mode="processed", logit_bias=((7, 1000.0),))
    _, logprobs = draw([biased])
    assert (logprobs[0].token, logprobs[0].logprob) == (7, 0.0)


def test_bias_and_penalties_change_the_logits() -> None:
    with torch.inference_mode():
        logits = DECODER.logits(HIDDEN[:1]).float()[0]
    best = int(logits.argmax())
    assert draw([sampled(temperature=0.0)])[0] == [best]
    assert draw([sampled(temperature=0.0, logit_bias=((7, 1000.0),))])[0] == [7]
    gap = float(logits.max() - logits[7])
    for times, token in ((1, best), (2, 7)):  # each counts, of the same token too
        biased = sampled(temperature=0.0, logit_bias=((7, 0.6 * gap),) * times)
        assert draw([biased])[0] == [token]
    penalized = sampled(temperature=0.0, frequency_penalty=100.0)
    assert draw([penalized])[0] == [best]
    penalized.append([best])
    assert draw([penalized])[0] != [best]


def test_drafts_count_as_generated_for_later_drafts() -> None:
    with torch.inference_mode():
        best = int(DECODER.logits(HIDDEN[:1]).argmax())
        one = sampled(temperature=0.0, presence_penalty=100.0)
        hidden = HIDDEN[:1].expand(2, -1).contiguous()
        tokens, _ = Sampler(DECODER).sample(hidden, [one, one], torch.tensor([4, 5]), [(), (best,)])
        assert tokens[0] == best != tokens[1]
        again, _ = Sampler(DECODER).sample(HIDDEN[:1], [one], torch.tensor([4]))
    assert again == [best]  # it was only a draft


def test_sampling_params_are_read_again_when_the_rows_change() -> None:
    sampler, positions = Sampler(DECODER), torch.tensor([1, 1])
    greedy, biased = sampled(temperature=0.0), sampled(temperature=0.0, logit_bias=((7, 1000.0),))
    with torch.inference_mode():
        for of in ([greedy, biased], [biased, greedy], [biased, biased]):
            tokens, _ = sampler.sample(HIDDEN[:1].expand(2, -1).contiguous(), of, positions)
            assert [token == 7 for token in tokens] == [one is biased for one in of]


def test_scores_of_many_tokens() -> None:
    tokens = [token % 256 for token in range(150)]
    hidden = HIDDEN[:1].expand(150, -1).contiguous()
    with torch.inference_mode():
        found = Sampler(DECODER).score(hidden, tokens, 2)
        wanted = DECODER.logprobs(hidden, torch.tensor(tokens)).tolist()
    assert [one.token for one in found] == tokens
    assert [one.logprob for one in found] == wanted
    assert {one.top for one in found} == {found[0].top}
