"""Load the data of a recipe; conversations are encoded with the chat template of its model.

    datasets = load_datasets(recipe)
    encode = row_encoder(Tokenizer.load(Path("smollm2")))  # for `ingot.data.encode_rows`

`ingot.data` packs tokens and `ingot.training` trains on them; neither knows chat templates. This
module passes them the function that does.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ingot.core import log
from ingot.data import ChatRow, EncodeRow, Row
from ingot.interop.loss_mask import MaskedTokens, SampleEncoder
from ingot.interop.tokenizer import Tokenizer
from ingot.training import recipe as recipes
from ingot.training.recipe import Datasets, PreferenceData, Recipe, RowData


def load_datasets(recipe: Recipe) -> Datasets:
    """Load the data of a recipe of any kind."""
    config = recipe.data
    if not isinstance(config, RowData):
        return recipes.load_datasets(config)
    directory = tokenizer_dir(recipe)
    tokenizer = Tokenizer.load(directory)
    encode = row_encoder(tokenizer, config.chat_template_kwargs)
    datasets = config.load(encode, directory, tokenizer.vocab_size)
    train = datasets.train.sequences
    log.logger(__name__).info(
        "%s %s in %s samples, %s tokens, %.0f%% of them trained; an epoch is %.1f steps",
        f"{len(train):,}",
        "answers" if isinstance(config, PreferenceData) else "conversations",
        f"{len(datasets.train):,}",
        f"{len(train.tokens_N):,}",
        100 * train.trained_N.mean(),
        len(datasets.train) / recipe.global_batch_size,
    )
    return datasets


def tokenizer_dir(recipe: Recipe) -> Path:
    """Return the directory of the tokenizer and the chat template of a recipe with chat data."""
    directory = getattr(recipe.data, "tokenizer", None) or recipe.init_from
    assert directory is not None
    return directory


def row_encoder(tokenizer: Tokenizer, variables: Mapping[str, Any] | None = None) -> EncodeRow:
    """Return the function that encodes rows; `variables` are those of the chat template."""
    encoder = SampleEncoder(tokenizer, variables)

    def encode(row: Row) -> list[MaskedTokens]:
        if isinstance(row, ChatRow):
            return encoder.encode_chat(row.messages, row.tools, row.num_prompt)
        return [encoder.encode_text(row.prompt, row.completion)]

    return encode
