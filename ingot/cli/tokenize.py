"""`ingot tokenize`: tokenize text to disk."""

from __future__ import annotations

import json as json_format
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from ingot.cli import escape_markup
from ingot.cli.import_ import size
from ingot.cli.tables import new_grid
from ingot.core.errors import ConfigError
from ingot.core.log import stdout

if TYPE_CHECKING:
    from ingot.data import TokenDataset


def tokenize(
    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SRC")],
    directory: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="[DST]")] = None,
    tokenizer: Path | None = None,
    vocab_size: int | None = None,
    field: str = "text",
    validation: float = 0.01,
    show: int | None = None,
    json: tyro.conf.FlagCreatePairsOff[bool] = False,
) -> None:
    """Tokenize text for training, with a model's tokenizer or with one trained on the text.

    SRC is a text file, a .jsonl, .parquet or .arrow file, a folder of such files, or `stdlib`,
    Python's standard library. DST is created when it is complete, with the tokenizer in it. If DST
    exists and was built from the same text with the same options, nothing is done.

    `--show` prints samples of conversations instead, with the tokens that are trained in colour.
    SRC is then a recipe with chat data, or a file of rows.

    Examples: `ingot tokenize stdlib tokens` to try it,
    `ingot tokenize books/ tokens --vocab-size 16384`,
    `ingot tokenize posts.jsonl tokens --field body --tokenizer smollm2` to continue training a
    model, `ingot tokenize recipes/smollm2-sft.toml --show 3` to see what is trained.

    Args:
        source: The text.
        directory: The directory to write.
        tokenizer: Use the tokenizer of this model directory.
        vocab_size: Train a tokenizer with this many tokens; 4096 unless --tokenizer is given.
        field: Name of the text field in JSON objects and tables.
        validation: Fraction of the documents that is used for validation.
        show: Print this many samples with their loss masks and write nothing.
        json: Print JSON instead of text.
    """
    if show is not None:
        from ingot.cli import tokenize_show

        tokenize_show.show(source, tokenizer, show)
        return
    if directory is None:
        raise ConfigError("DST: missing", hint="name the directory to write, or use --show")
    from ingot.data import token_dataset
    from ingot.data.source import Source

    new = not (directory / token_dataset.NAME).exists()
    start = time.monotonic()
    dataset = token_dataset.tokenize(
        Source(source, field),
        directory,
        vocab_size=vocab_size,
        tokenizer=tokenizer,
        validation_fraction=validation,
    )
    content = report(dataset, time.monotonic() - start, new)
    if json:
        print(json_format.dumps(content, indent=2))  # noqa: T201
    else:
        _print_lines(content)


def report(dataset: TokenDataset, seconds: float, new: bool) -> dict[str, Any]:
    """Return everything that `--json` prints."""
    inputs = dataset.index.build_inputs
    tokens = len(dataset.train) + len(dataset.validation)
    return {
        "directory": str(dataset.directory),
        "new": new,
        "documents": dataset.train.documents + dataset.validation.documents,
        "tokens": tokens,
        "train_tokens": len(dataset.train),
        "validation_tokens": len(dataset.validation),
        "validation_documents": dataset.validation.documents,
        "text_bytes": inputs.bytes,
        "tokens_per_byte": round(tokens / inputs.bytes, 4),
        "vocab_size": dataset.vocab_size,
        "hash": dataset.hash,
        "bytes": sum(path.stat().st_size for path in dataset.directory.iterdir()),
        "seconds": round(seconds, 2),
    }


def _print_lines(content: dict[str, Any]) -> None:
    documents, validation = content["documents"], content["validation_documents"]
    per_byte = f"{content['tokens_per_byte']} per byte"
    lines = (
        ("text", f"{documents:,} documents, {size(content['text_bytes'])}"),
        ("tokens", f"{content['tokens']:,}, {per_byte}, vocabulary {content['vocab_size']:,}"),
        ("validation", f"{content['validation_tokens']:,} tokens in {validation:,} documents"),
        ("hash", content["hash"]),
        (
            "written" if content["new"] else "up to date",
            f"{size(content['bytes'])} in {content['seconds']:.1f} s",
        ),
        ("directory", content["directory"]),
    )
    grid = new_grid((name, escape_markup(value)) for name, value in lines)
    stdout().print(grid, highlight=False)
