"""`ingot data`: text into tokens on disk."""

from __future__ import annotations

import json as json_format
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from ingot.cli import plain
from ingot.cli.import_ import size
from ingot.core.log import stdout

if TYPE_CHECKING:
    from ingot.data import Corpus


def data(
    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SRC")],
    directory: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DST")],
    tokenizer: Path | None = None,
    vocab: int | None = None,
    field: str = "text",
    validation: float = 0.01,
    json: tyro.conf.FlagCreatePairsOff[bool] = False,
) -> None:
    """Turn text into tokens for training, by a model's tokenizer or by one trained on the text.

    SRC is a text file, a .jsonl, .parquet or .arrow file, a folder of such files, or `stdlib`,
    Python's own library. DST appears when all of it is there, with the tokenizer in it. If it is
    there already and made of the same text in the same way, nothing is done.

    Examples: `ingot data stdlib tokens` to try it, `ingot data books/ tokens --vocab 16384`,
    `ingot data posts.jsonl tokens --field body --tokenizer smollm2` to go on training a model.

    Args:
        source: The text.
        directory: The directory to write.
        tokenizer: A model directory, to take its tokenizer.
        vocab: Train a tokenizer of so many tokens; 4096 unless --tokenizer is given.
        field: The name of the text in JSON objects and in tables.
        validation: The fraction of the documents that is held out.
        json: Print JSON instead of lines.
    """
    from ingot.data.corpus import NAME, prepare
    from ingot.data.source import Source

    new = not (directory / NAME).exists()
    start = time.monotonic()
    corpus = prepare(
        Source(source, field), directory, vocab=vocab, tokenizer=tokenizer, validation=validation
    )
    found = report(corpus, time.monotonic() - start, new)
    if json:
        print(json_format.dumps(found, indent=2))  # noqa: T201
    else:
        _print_lines(found)


def report(corpus: Corpus, seconds: float, new: bool) -> dict[str, Any]:
    """All of it, as `--json` prints it."""
    made = corpus.index.made
    tokens = len(corpus.train) + len(corpus.validation)
    return {
        "directory": str(corpus.directory),
        "new": new,
        "documents": corpus.train.documents + corpus.validation.documents,
        "tokens": tokens,
        "train_tokens": len(corpus.train),
        "validation_tokens": len(corpus.validation),
        "validation_documents": corpus.validation.documents,
        "text_bytes": made.bytes,
        "tokens_per_byte": round(tokens / made.bytes, 4),
        "vocabulary": corpus.size,
        "hash": corpus.hash,
        "bytes": sum(path.stat().st_size for path in corpus.directory.iterdir()),
        "seconds": round(seconds, 2),
    }


def _print_lines(found: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table.grid(padding=(0, 3))
    per_byte, done = found["tokens_per_byte"], "written" if found["new"] else "was there already"
    for name, value in (
        ("text", f"{found['documents']:,} documents, {size(found['text_bytes'])}"),
        ("tokens", f"{found['tokens']:,}, of {found['vocabulary']:,} kinds; {per_byte} a byte"),
        (
            "held out",
            f"{found['validation_tokens']:,} tokens in {found['validation_documents']:,} documents",
        ),
        ("hash", found["hash"]),
        (done, f"{size(found['bytes'])} in {found['seconds']:.1f} s"),
        ("directory", found["directory"]),
    ):
        table.add_row(f"[bold]{name}[/]", plain(value))
    stdout().print(table, highlight=False)
