from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from ingot.core.errors import ConfigError, IngotError
from ingot.workflows.derive import (
    POSITIONS,
    derived_directory,
    hidden_states,
    measure_drift,
    perplexity,
    tokenize_text,
)
from ingot.workflows.llm import LLM, load
from tests import models


def test_other_files_are_copied_and_weights_are_not(tmp_path: Path) -> None:
    source = models.small(tmp_path / "small")
    with derived_directory(tmp_path / "out", source, 1000) as out:
        assert not (tmp_path / "out").exists()
        assert (out / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert not {"config.json", "model.safetensors"} & {p.name for p in (tmp_path / "out").iterdir()}


def test_nothing_is_left_after_an_error(tmp_path: Path) -> None:
    source = models.small(tmp_path / "small")
    with pytest.raises(KeyError), derived_directory(tmp_path / "out", source, 0):
        raise KeyError
    assert [path.name for path in tmp_path.iterdir()] == ["small"]
    with pytest.raises(IngotError, match="free space"):
        derived_directory(tmp_path / "out", source, 1 << 60).__enter__()
    with pytest.raises(IngotError, match="exists already"):
        derived_directory(source, source, 0).__enter__()


def test_models_are_compared_on_a_fixed_number_of_tokens(tmp_path: Path) -> None:
    decoder, tokenizer = load(models.small(tmp_path / "small"))
    sequences = tokenize_text("stdlib", tokenizer, decoder)
    assert sum(map(len, sequences)) == POSITIONS
    assert max(map(len, sequences)) <= decoder.config.max_seq_len
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ConfigError, match="has no text"):
        tokenize_text(str(tmp_path / "empty.txt"), tokenizer, decoder)


def test_documents_can_be_left_out(tmp_path: Path) -> None:
    decoder, tokenizer = load(models.small(tmp_path / "small"))
    first = tokenize_text("stdlib", tokenizer, decoder, length=32)
    rest = tokenize_text("stdlib", tokenizer, decoder, length=32, skip=len(first))
    both = tokenize_text("stdlib", tokenizer, decoder, length=32, positions=2 * POSITIONS)
    assert (first + rest)[: len(first)] == both[: len(first)]
    assert rest[0] == both[len(first)]
    (tmp_path / "one.txt").write_text("one document")
    with pytest.raises(ConfigError, match="no more than 1 documents"):
        tokenize_text(str(tmp_path / "one.txt"), tokenizer, decoder, skip=1)


def test_drift_grows_with_the_change(tmp_path: Path) -> None:
    decoder, tokenizer = load(models.small(tmp_path / "small"))
    sequences = tokenize_text("stdlib", tokenizer, decoder)
    before_TD = hidden_states(decoder, sequences)
    assert measure_drift(decoder, before_TD, decoder, before_TD).kl_max == 0
    noise_TD = torch.randn(before_TD.shape, generator=torch.Generator().manual_seed(0))
    drifts = [
        measure_drift(decoder, before_TD, decoder, before_TD + e * noise_TD) for e in (0.01, 0.1)
    ]
    small, large = (drift.kl_max for drift in drifts)
    assert small
    assert large
    assert 0 < small < large


def test_perplexity_is_that_of_the_scores_of_the_engine(tmp_path: Path) -> None:
    llm = LLM(models.small(tmp_path / "small"))
    sequences = [[5, 6, 7, 8, 9], [11], [200, 3, 40]]
    hidden_TD = hidden_states(llm.decoder, sequences)
    scores = [llm.score(ids) for ids in (sequences[0], sequences[2])]
    expected = math.exp(-sum(score.logprob for score in scores) / 6)
    assert perplexity(llm.decoder, hidden_TD, sequences) == pytest.approx(expected, rel=1e-6)
    assert perplexity(llm.decoder, hidden_TD[5:6], sequences[1:2]) is None
