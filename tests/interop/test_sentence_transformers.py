"""The files of sentence-transformers: what is supported is read, the rest is an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ingot.core.errors import IngotError
from ingot.interop import directory, hf, sentence_transformers
from ingot.nn import Decoder, Encoder, EncoderConfig, preset
from ingot.nn.pooling import Pooling

TRANSFORMER = {"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
NORMALIZE = {"idx": 2, "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
DENSE = {"idx": 2, "path": "2_Dense", "type": "sentence_transformers.models.Dense"}
CONFIG = EncoderConfig(vocab_size=97, dim=32, layers=1, heads=2, ffn_dim=48, max_seq_len=64)


@pytest.fixture
def encoder(tmp_path: Path) -> Path:
    hf.save_encoder(Encoder.from_config(CONFIG, seed=0), tmp_path / "encoder")
    return tmp_path / "encoder"


@pytest.fixture
def decoder(tmp_path: Path) -> Path:
    hf.save(Decoder.from_config(preset("tiny"), seed=0), tmp_path / "decoder")
    return tmp_path / "decoder"


def add_files(model: Path, modules: Any, pooling: Any, **others: Any) -> Path:
    (model / "1_Pooling").mkdir()
    (model / "modules.json").write_text(json.dumps(modules))
    (model / "1_Pooling/config.json").write_text(json.dumps(pooling))
    for name, content in others.items():
        (model / f"{name}.json").write_text(json.dumps(content))
    return model


def test_defaults_depend_on_the_kind_of_model(encoder: Path, decoder: Path) -> None:
    model, config = sentence_transformers.load(encoder)
    assert isinstance(model, Encoder)
    assert (config.pooling, config.max_seq_len) == (Pooling.MEAN, 64)
    model, config = sentence_transformers.load(decoder)
    assert isinstance(model, Decoder)
    assert (config.pooling, config.max_seq_len) == (Pooling.LAST, preset("tiny").max_seq_len)
    assert sentence_transformers.is_embedding_model(encoder)
    assert not sentence_transformers.is_embedding_model(decoder)


@pytest.mark.parametrize(
    ("mode", "pooling"),
    [("cls_token", Pooling.CLS), ("mean_tokens", Pooling.MEAN), ("lasttoken", Pooling.LAST)],
)
def test_settings_are_read(mode: str, pooling: Pooling, decoder: Path) -> None:
    modes = dict.fromkeys(("cls_token", "mean_tokens", "lasttoken", "max_tokens"), False)
    modes = {f"pooling_mode_{name}": on for name, on in (modes | {mode: True}).items()}
    add_files(decoder, [TRANSFORMER, POOLING, NORMALIZE], modes | {"include_prompt": True})
    (decoder / "sentence_bert_config.json").write_text('{"max_seq_length": 33}')
    _, config = sentence_transformers.load(decoder)
    assert (config.pooling, config.max_seq_len) == (pooling, 33)
    assert sentence_transformers.is_embedding_model(decoder)


@pytest.mark.parametrize(
    ("modules", "modes", "others", "message"),
    [
        ([TRANSFORMER, POOLING, DENSE], {"pooling_mode_mean_tokens": True}, {}, "Dense"),
        ([TRANSFORMER, POOLING], {"pooling_mode_max_tokens": True}, {}, "max_tokens"),
        (
            [TRANSFORMER, POOLING],
            {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True},
            {},
            "unsupported pooling",
        ),
        ([TRANSFORMER, POOLING], {}, {}, "none"),
        ([TRANSFORMER], {"pooling_mode_mean_tokens": True}, {}, "one Pooling module"),
        ([TRANSFORMER, POOLING | {"path": "../x"}], {}, {}, "one Pooling module"),
        ({"a": 1}, {}, {}, "expected a list"),
        (
            [TRANSFORMER, POOLING],
            {"pooling_mode_mean_tokens": True},
            {"config_sentence_transformers": {"default_prompt_name": "query"}},
            "default_prompt_name",
        ),
        (
            [TRANSFORMER, POOLING],
            {"pooling_mode_mean_tokens": True},
            {"sentence_bert_config": {"max_seq_length": "long"}},
            "max_seq_length",
        ),
    ],
)
def test_unsupported_parts_raise(
    modules: Any, modes: Any, others: Any, message: str, encoder: Path
) -> None:
    add_files(encoder, modules, modes, **others)
    with pytest.raises(IngotError, match=message):
        sentence_transformers.load(encoder)


def test_real_model_is_imported_with_its_pooling(minilm: Path, tmp_path: Path) -> None:
    directory.copy_model(minilm, tmp_path / "minilm")
    _, config = sentence_transformers.load(tmp_path / "minilm")
    assert (config.pooling, config.max_seq_len) == (Pooling.MEAN, 256)
