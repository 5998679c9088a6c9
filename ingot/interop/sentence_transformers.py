"""Embedding models: directories of sentence-transformers, of encoders and of decoders.

sentence-transformers adds to a Hugging Face directory

    modules.json                            the parts of the model: Transformer, Pooling, Normalize
    1_Pooling/config.json                   how hidden states are pooled
    sentence_bert_config.json               the maximum length of a text
    config_sentence_transformers.json       prompts

Without these files an encoder's embedding is the mean of its hidden states, and a decoder's is that
of the last token. Parts that ingot does not compute are errors. Embeddings are always normalized:
without a Normalize part, sentence-transformers' differ by their length.
"""

# pyright: basic
from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from ingot.core.errors import ConfigError
from ingot.interop import hf
from ingot.nn.decoder import Decoder
from ingot.nn.encoder import Encoder
from ingot.nn.pooling import Pooling
from ingot.nn.shared import SharedWeights
from ingot.nn.weights import read_json

MODULES = "modules.json"
_POOLING = "1_Pooling"
_MODES = {
    "pooling_mode_cls_token": Pooling.CLS,
    "pooling_mode_mean_tokens": Pooling.MEAN,
    "pooling_mode_lasttoken": Pooling.LAST,
}
_HINT = "use a model with mean, last-token or CLS pooling and no other parts"


@dataclass(frozen=True, kw_only=True)
class EmbeddingConfig:
    """How a model computes embeddings.

    >>> EmbeddingConfig(pooling=Pooling.MEAN, max_seq_len=256).pooling.value
    'mean'
    """

    pooling: Pooling
    max_seq_len: int
    """Maximum number of tokens of a text."""


def is_embedding_model(directory: Path | str) -> bool:
    """Return whether a directory is for embeddings: an encoder, or sentence-transformers' own."""
    return (Path(directory) / MODULES).is_file() or hf.is_encoder(directory)


def load(
    directory: Path | str,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    shared: SharedWeights | None = None,
) -> tuple[Encoder | Decoder, EmbeddingConfig]:
    """Load the encoder or decoder of a directory, and how it computes embeddings."""
    directory = Path(directory)
    read = hf.load_encoder if hf.is_encoder(directory) else hf.load
    pooling, max_seq_len = _read_pooling(directory), _read_max_seq_len(directory)
    model = read(directory, dtype, device, shared)
    if pooling is None:
        pooling = Pooling.MEAN if isinstance(model, Encoder) else Pooling.LAST
    context = model.config.max_seq_len
    return model, EmbeddingConfig(pooling=pooling, max_seq_len=min(context, max_seq_len or context))


def _read_pooling(directory: Path) -> Pooling | None:
    """Return the pooling of a directory of sentence-transformers; None for other directories."""
    if not (directory / MODULES).is_file():
        return None
    kinds = _read_modules(directory / MODULES)
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise ConfigError(f"{MODULES}: unsupported parts: {', '.join(kinds)}"[:300], hint=_HINT)
    modes = read_json(directory / _POOLING / "config.json")
    enabled = [key for key, on in modes.items() if key.startswith("pooling_mode_") and on]
    if len(enabled) != 1 or enabled[0] not in _MODES:
        found = ", ".join(enabled) or "none"
        raise ConfigError(f"{_POOLING}/config.json: unsupported pooling: {found}", hint=_HINT)
    return _MODES[enabled[0]]


def _read_modules(path: Path) -> list[str]:
    """Return the class names of the parts, in order."""
    try:
        modules = json.loads(path.read_bytes()[: 1 << 20])
        kinds = [str(module["type"]).rpartition(".")[2] for module in modules]
        folders = [module.get("path") for module in modules if "Pooling" in module["type"]]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"{path}: expected a list of modules: {error}"[:300],
            hint="copy the file again from the model's source",
        ) from error
    if folders != [_POOLING]:
        raise ConfigError(f"{path}: expected one Pooling module in {_POOLING}", hint=_HINT)
    return kinds


def _read_max_seq_len(directory: Path) -> int | None:
    """Return the maximum length that sentence-transformers sets; raise for a default prompt."""
    prompts, sizes = "config_sentence_transformers.json", "sentence_bert_config.json"
    if (directory / prompts).is_file():
        default = read_json(directory / prompts).get("default_prompt_name")
        if default is not None:
            raise ConfigError(
                f"{prompts}: default_prompt_name is {default!r}, which is not supported"[:300],
                hint="set it to null, and put the prompt before each text",
            )
    if not (directory / sizes).is_file():
        return None
    length = read_json(directory / sizes).get("max_seq_length")
    if length is not None and not (type(length) is int and length > 0):
        raise ConfigError(
            f"{sizes}: max_seq_length must be a positive number, got {length!r}"[:200],
            hint="correct it, or set it to null for the model's own",
        )
    return length
