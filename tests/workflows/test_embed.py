"""`ingot.Embedder` against transformers, and against itself in other batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import ingot
from ingot.core.errors import ConfigError, IngotError, UnknownName
from ingot.interop import hf
from ingot.nn import BatchLayout
from ingot.workflows.embed import Embedder
from tests import models

README = (Path(__file__).parents[2] / "README.md").read_text().split()
TEXTS = [" ".join(README[n : 2 * n]) for n in (1, 2, 3, 5, 8, 13, 21, 40, 70, 90)]


@pytest.fixture(scope="module")
def embedder(minilm: Path) -> Embedder:
    return ingot.Embedder(minilm)


@pytest.fixture(scope="module")
def by_transformers(minilm: Path) -> Tensor:
    """As sentence-transformers: a padded batch, the mean of the tokens, length 1."""
    model: Any = transformers.AutoModel.from_pretrained(minilm).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm)
    batch = tokenizer(TEXTS, padding=True, return_tensors="pt")
    with torch.inference_mode():
        hidden, mask = model(**batch).last_hidden_state, batch["attention_mask"][..., None]
        return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1))


@pytest.fixture(scope="module")
def alone(embedder: Embedder) -> Tensor:
    return torch.stack([embedder.embed(text) for text in TEXTS])


def test_embeddings_match_transformers(embedder: Embedder, by_transformers: Tensor) -> None:
    cosines = (embedder.embed(TEXTS) * by_transformers).sum(-1)
    assert cosines.min() >= 0.9999
    assert embedder.dim == 384


def test_bfloat16_is_close(embedder: Embedder, minilm: Path) -> None:
    rounded = Embedder(minilm, dtype=torch.bfloat16).embed(TEXTS)
    assert rounded.dtype == torch.float32
    assert (rounded * embedder.embed(TEXTS)).sum(-1).min() >= 0.999


def test_a_wrong_pooling_would_be_found(minilm: Path, by_transformers: Tensor) -> None:
    """A planted fault: the comparison with transformers sees another pooling."""
    cosines = Embedder(minilm, pooling="cls").embed(TEXTS) * by_transformers
    assert cosines.sum(-1).min() < 0.99


@settings(max_examples=8)
@given(order=st.lists(st.sampled_from(range(len(TEXTS))), min_size=1, max_size=12))
def test_bits_do_not_depend_on_the_batch(
    embedder: Embedder, alone: Tensor, order: list[int]
) -> None:
    assert torch.equal(embedder.embed([TEXTS[i] for i in order]), alone[order])


def test_related_sentences_are_nearer(embedder: Embedder) -> None:
    texts = ["A man is eating food.", "Someone has a meal.", "The stock market fell today."]
    meal, same, other = embedder.embed(texts)
    assert meal @ same > 0.5 > 0.2 > meal @ other


def test_token_ids_and_empty_lists(embedder: Embedder) -> None:
    ids = embedder.tokenizer.encode(TEXTS[3])
    assert torch.equal(embedder.embed(ids), embedder.embed(TEXTS[3]))
    assert torch.equal(embedder.embed([ids])[0], embedder.embed(TEXTS[3]))
    assert embedder.embed([]).shape == (0, 384)


def test_long_texts_raise_and_leave_nothing(embedder: Embedder) -> None:
    assert embedder.max_seq_len == 256
    with pytest.raises(IngotError, match="request 1: a text may have 256 tokens, got 302"):
        embedder.embed(["short", "word " * 300])
    assert embedder.embed(["short"]).shape == (1, 384)


def test_decoder_embeds_the_last_token_after_the_final_norm(tmp_path: Path) -> None:
    directory = models.small(tmp_path / "small")
    embedder, decoder = Embedder(directory), hf.load(directory)
    ids = torch.tensor(embedder.tokenizer.encode("Hello"))
    with torch.inference_mode():
        last = decoder(ids, BatchLayout.packed([len(ids)]))[-1]
    expected = torch.nn.functional.normalize(last, dim=0)
    torch.testing.assert_close(embedder.embed("Hello"), expected)
    assert not torch.allclose(Embedder(directory, pooling="mean").embed("Hello"), expected)


def test_unknown_pooling_and_text_generation_raise(minilm: Path) -> None:
    with pytest.raises(UnknownName, match="pooling 'max'"):
        Embedder(minilm, pooling="max")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="generates no text"):
        ingot.LLM(minilm)
