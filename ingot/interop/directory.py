"""Import a Hugging Face directory: the same files, checked, with a lineage.

Weights are accepted as safetensors only: `*.bin` files are pickles, which run code when they are
opened, and `*.py` files are code. Neither is copied, nor any other file that is not listed here.
`nn.weights` locates every tensor before anything is written; every byte is hashed while it is
copied.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from ingot.core import lineage, paths
from ingot.core.errors import IngotError
from ingot.core.log import Progress
from ingot.interop.compressed_tensors import count_values
from ingot.nn.weights import INDEX, SafetensorsDir, read_json

CONFIG = "config.json"
OPTIONAL_FILES = (
    INDEX,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "1_Pooling/config.json",
    "LICENSE",
    "README.md",
    lineage.NAME,
)


class DirectoryError(IngotError):
    """A directory without a model in it."""


def model_files(source: Path) -> list[Path]:
    """List the files of the model: config, weights and those of `OPTIONAL_FILES` that exist."""
    if not (source / CONFIG).is_file():
        raise DirectoryError(
            f"{CONFIG} not found in {source}",
            hint="name a model directory as transformers' save_pretrained writes it, or a .gguf "
            "file",
        )
    shards = sorted({entry.file for entry in SafetensorsDir(source).entries.values()})
    optional = [source / name for name in OPTIONAL_FILES if (source / name).is_file()]
    return [source / CONFIG, *shards, *optional]


def copy_model(source: Path, directory: Path, progress: Progress | None = None) -> None:
    """Copy the model in `source` to `directory`, which appears when it is complete.

    `progress` advances by the bytes of `model_files(source)`.
    """
    files = model_files(source)
    if not isinstance(read_json(source / CONFIG).get("model_type"), str):
        raise DirectoryError(
            f"{source / CONFIG} has no model_type",
            hint="download the model again, and compare checksums with its publisher's",
        )
    lineage.read(source)
    needed = sum(path.stat().st_size for path in files)
    with paths.atomic_directory(directory, needed) as temporary:
        if progress:
            progress.describe("copying")
        hashes: dict[str, str] = {}
        for path in files:
            name = path.relative_to(source)
            (temporary / name).parent.mkdir(exist_ok=True)
            hashes[str(name)] = _copy_file(path, temporary / name, progress)
        hashes.pop(lineage.NAME, None)  # it changes now
        lineage.append(
            temporary,
            "import",
            source=source.resolve().name,
            size=needed,
            files=hashes,
            quantization=count_dtypes(source),
        )


def count_dtypes(directory: Path) -> dict[str, int]:
    """Count the tensors of each dtype, the most frequent first."""
    entries = SafetensorsDir(directory).entries.values()
    counts = Counter(str(entry.dtype).removeprefix("torch.") for entry in entries)
    return dict(counts.most_common())


def count_parameters(directory: Path) -> int:
    """Count the parameters of the model by the headers of its weights."""
    entries = SafetensorsDir(directory).entries
    return sum(count_values(name, entry.shape) for name, entry in entries.items())


def hash_model(directory: Path) -> str:
    """Return a SHA-256 of all that changes what a model computes: weights, config, tokenizer."""
    others = (lineage.NAME, "LICENSE", "README.md")
    return hash_files(path for path in model_files(directory) if path.name not in others)


def hash_files(files: Iterable[Path]) -> str:
    """Return a SHA-256 of the names and contents of files."""
    whole = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        whole.update(f"{path.name} {digest}\n".encode())
    return whole.hexdigest()


def _copy_file(source: Path, destination: Path, progress: Progress | None) -> str:
    """Copy a file and return its SHA-256."""
    digest = hashlib.sha256()
    with source.open("rb") as read, destination.open("xb") as write:
        while chunk := read.read(1 << 22):
            digest.update(chunk)
            write.write(chunk)
            if progress:
                progress.advance(len(chunk))
    return digest.hexdigest()
