"""`ingot tokenize --show`: print samples with the tokens that are trained."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING

from ingot.core import config
from ingot.core.errors import ConfigError
from ingot.core.log import stdout

if TYPE_CHECKING:
    from ingot.data import EncodeRow, Row
    from ingot.interop.loss_mask import MaskedTokens
    from ingot.interop.tokenizer import Tokenizer

MAX_SHOWN = 10_000
BEGIN, END = "«", "»"  # around trained tokens if the output has no colour


def show(source: str, tokenizer_dir: Path | None, count: int) -> None:
    """Print the first `count` samples of a recipe's training data, or of a file of rows."""
    from ingot.data.chat_dataset import encode_row
    from ingot.interop.loss_mask import MaskedTokens

    if not 1 <= count <= MAX_SHOWN:
        raise ConfigError(
            f"--show: must be from 1 to {MAX_SHOWN:,}, got {count}", hint="give a number of samples"
        )
    rows, encode, tokenizer = _open(source, tokenizer_dir)
    num_tokens = num_trained = number = 0
    samples = ((row.name, sample) for row in rows for sample in encode_row(row, encode))
    for name, sample in islice(samples, count):
        number += 1
        _print_sample(MaskedTokens(*sample), f"sample {number}, {name}", tokenizer)
        num_tokens += len(sample[0])
        num_trained += sum(sample[1])
    stdout().print(
        f"{number} samples, {num_tokens:,} tokens, {num_trained:,} trained "
        f"({num_trained / max(num_tokens, 1):.0%})",
        style="bold",
        highlight=False,
    )


def _open(source: str, tokenizer_dir: Path | None) -> tuple[Iterator[Row], EncodeRow, Tokenizer]:
    """Return the rows, the function that encodes them, and the tokenizer."""
    from ingot.data import read_rows, split_rows
    from ingot.interop.tokenizer import Tokenizer
    from ingot.training.recipe import ChatData, Recipe
    from ingot.workflows import chat_data

    if not source.endswith(".toml"):
        if tokenizer_dir is None:
            raise ConfigError(
                "--tokenizer: needed to show samples, for its chat template",
                hint="name a model directory with --tokenizer, or give a recipe as SRC",
            )
        tokenizer = Tokenizer.load(tokenizer_dir)
        return read_rows(source), chat_data.row_encoder(tokenizer), tokenizer
    recipe = config.load(Recipe, Path(source))
    data = recipe.data
    if not isinstance(data, ChatData):
        raise ConfigError(
            f"{source}: '{data.kind}' data has no loss mask to show",
            hint='give a recipe with data.kind = "chat"',
        )
    rows, _ = split_rows(data.source, data.validation_source, data.validation_fraction)
    tokenizer = Tokenizer.load(tokenizer_dir or chat_data.tokenizer_dir(recipe))
    return rows, chat_data.row_encoder(tokenizer, data.chat_template_kwargs), tokenizer


def _print_sample(sample: MaskedTokens, name: str, tokenizer: Tokenizer) -> None:
    from rich.text import Text

    console = stdout()
    in_colour = console.color_system is not None and not console.no_color
    count, length = sum(sample.trained), len(sample.tokens)
    console.print(
        f"{name}: {length:,} tokens, {count:,} trained ({count / length:.0%})",
        style="bold",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    text = Text()
    for trained, group in groupby(zip(sample.tokens, sample.trained, strict=True), lambda x: x[1]):
        ids = [token for token, _ in group]
        part = _printable(tokenizer.decode(ids, skip_special_tokens=False))
        if trained and not in_colour:
            part = f"{BEGIN}{part}{END}"
        text.append(part, style="green" if trained else "dim")
    console.print(text, highlight=False, soft_wrap=True)
    console.print()


def _printable(text: str) -> str:
    """Return the text with control characters escaped: they could change the terminal.

    >>> _printable("a\\n\\x1b[2J")
    'a\\n\\\\x1b[2J'
    """
    return "".join(
        c if c in "\n\t" or c.isprintable() else c.encode("unicode_escape").decode() for c in text
    )
