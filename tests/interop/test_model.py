from __future__ import annotations

import argparse
import math
from pathlib import Path

import pytest
import torch
import transformers

import ingot
from ingot import ops
from ingot.interop.model import Model
from ingot.nn import BatchLayout, Sampling, Session

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
# Pinned: they change only if the weights, the template or the numbers do.
ANSWER = [504, 3575, 282, 4649, 314, 7042, 30]


@pytest.fixture(scope="module")
def model(smollm2: Path) -> Model:
    return ingot.load(smollm2)


def test_it_knows_the_capital_of_france(model: Model) -> None:
    assert model.chat(QUESTION) == "The capital of France is Paris."
    session = Session(model.decoder)
    ids = model.tokenizer.encode_chat(QUESTION)
    assert (
        list(session.stream(ids, max_tokens=99, stop_token_ids=model.tokenizer.eos_token_ids))
        == ANSWER
    )


def test_text_goes_on_and_repeats_with_its_seed(model: Model) -> None:
    sampling = Sampling(temperature=0.8, top_p=0.9, seed=7)
    texts = {model.generate("The sun", max_tokens=8, sampling=sampling) for _ in range(2)}
    assert len(texts) == 1
    assert texts.pop().strip()


def test_perplexity_is_that_of_transformers(model: Model, smollm2: Path) -> None:
    """On the same weights, which it computes with in float32, over the head of a module."""
    text = Path(argparse.__file__).read_text()[:6000]
    ids = torch.tensor(model.tokenizer.encode(text))[:1024]
    layout = BatchLayout.packed([len(ids) - 1])
    with torch.inference_mode():
        hidden = model.decoder(ids[:-1], layout)
        ours = ops.linear_cross_entropy(hidden, model.decoder.lm_head_weight, ids[1:]).mean()
        theirs_model = transformers.AutoModelForCausalLM.from_pretrained(
            smollm2, dtype=torch.float32
        )
        logits = theirs_model(ids[None, :-1]).logits[0]
        theirs = torch.nn.functional.cross_entropy(logits, ids[1:])
    assert abs(math.exp(ours) / math.exp(theirs) - 1) < 0.005
