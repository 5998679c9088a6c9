"""A Hugging Face directory into one of ours: the same files, checked, with a lineage.

Weights come as safetensors or not at all: `*.bin` files are pickles, which run code when they
are opened, and `*.py` files are code. Neither is copied, nor anything else but the files named
here. `nn.weights` finds every tensor before anything is written; every byte is hashed while it is
copied.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from pathlib import Path

from ingot.core import lineage, paths
from ingot.core.errors import IngotError
from ingot.core.log import Progress
from ingot.nn.weights import INDEX, SafetensorsDir, read_json

CONFIG = "config.json"
OTHERS = (
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
    "LICENSE",
    "README.md",
    lineage.NAME,
)


class DirectoryError(IngotError):
    """A directory that is not a model's."""


def files(source: Path) -> list[Path]:
    """Return the files of the directory that belong to the model; its config and weights must."""
    if not (source / CONFIG).is_file():
        raise DirectoryError(
            f"there is no {CONFIG} in {source}",
            hint="name the directory of a model as transformers' save_pretrained writes it, or "
            "a .gguf file",
        )
    shards = sorted({entry.file for entry in SafetensorsDir(source).entries.values()})
    others = [source / name for name in OTHERS if (source / name).is_file()]
    return [source / CONFIG, *shards, *others]


def copy(source: Path, directory: Path, progress: Progress | None = None) -> None:
    """Copy the model in `source` to `directory`, which appears when it is complete.

    `progress` advances by the bytes of `files(source)`.
    """
    chosen = files(source)
    if not isinstance(read_json(source / CONFIG).get("model_type"), str):
        raise DirectoryError(
            f"{source / CONFIG} has no model_type",
            hint="download the model again, and compare checksums with its publisher's",
        )
    lineage.read(source)
    needed = sum(path.stat().st_size for path in chosen)
    with paths.atomic_directory(directory, needed) as temporary:
        if progress:
            progress.describe("copying")
        hashes = {path.name: _copy(path, temporary / path.name, progress) for path in chosen}
        hashes.pop(lineage.NAME, None)  # it changes now
        lineage.append(
            temporary,
            "import",
            source=source.resolve().name,
            size=needed,
            files=hashes,
            quantization=dtypes(source),
        )


def dtypes(directory: Path) -> dict[str, int]:
    """Count the tensors of each dtype."""
    entries = SafetensorsDir(directory).entries.values()
    counts = Counter(str(entry.dtype).removeprefix("torch.") for entry in entries)
    return dict(counts.most_common())


def parameters(directory: Path) -> int:
    """Count the parameters of the model in the directory, by the headers of its weights."""
    return sum(math.prod(entry.shape) for entry in SafetensorsDir(directory).entries.values())


def _copy(source: Path, destination: Path, progress: Progress | None) -> str:
    digest = hashlib.sha256()
    with source.open("rb") as read, destination.open("xb") as write:
        while chunk := read.read(1 << 22):
            digest.update(chunk)
            write.write(chunk)
            if progress:
                progress.advance(len(chunk))
    return digest.hexdigest()
