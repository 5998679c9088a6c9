"""A Hugging Face directory into one of ours: the same files, checked, with a lineage.

Weights come as safetensors or not at all: `*.bin` files are pickles, which run code when they
are opened, and `*.py` files are code. Neither is copied, nor anything else but the files named
here. Every safetensors file is opened and every tensor found in it before anything is written;
every byte is hashed while it is copied.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any, cast

from ingot.core import lineage, paths
from ingot.core.errors import IngotError
from ingot.core.log import Progress

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
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
MAX_JSON = 1 << 26
MAX_SHARDS = 4096


class DirectoryError(IngotError):
    """A model directory with something missing, damaged or not allowed."""


def files(source: Path) -> list[Path]:
    """Return the files of the directory that belong to the model; its config and weights must."""
    if CONFIG not in _names(source):
        raise DirectoryError(
            f"there is no {CONFIG} in {source}",
            remedy="name the directory of a model as transformers' save_pretrained writes it, or "
            "a .gguf file",
        )
    others = [source / name for name in OTHERS if name in _names(source)]
    return [source / CONFIG, *_shards(source), *others]


def copy(source: Path, directory: Path, progress: Progress | None = None) -> None:
    """Copy the model in `source` to `directory`, which appears when it is complete.

    `progress` advances by the bytes of `files(source)`.
    """
    chosen = files(source)
    if not isinstance(_json(source / CONFIG).get("model_type"), str):
        raise _damaged(source / CONFIG, "it has no model_type")
    dtypes = _check_weights(source)
    lineage.read(source)
    needed = sum(path.stat().st_size for path in chosen)
    with paths.whole_directory(directory, needed) as temporary:
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
            quantization=dtypes,
        )


def parameters(directory: Path) -> int:
    """Count the parameters of the model in the directory, by the headers of its weights."""
    total = 0
    for path in _shards(directory):
        with _opened(path) as weights:
            slices = map(weights.get_slice, weights.keys())
            total += sum(math.prod(one.get_shape()) for one in slices)
    return total


def _names(source: Path) -> set[str]:
    try:
        return {path.name for path in source.iterdir() if path.is_file()}
    except OSError as error:
        raise DirectoryError(
            f"cannot read {source}: {error.strerror or error}", remedy="check the path"
        ) from error


def _shards(source: Path) -> list[Path]:
    names = _names(source)
    if INDEX in names:
        shards = sorted(set(_weight_map(source).values()))
        if missing := [name for name in shards if name not in names]:
            raise _damaged(source / INDEX, f"the file {missing[0]} that it names is missing")
        return [source / name for name in shards]
    if SINGLE in names:
        return [source / SINGLE]
    pickles = any(name.endswith((".bin", ".pt", ".pth")) for name in names)
    raise DirectoryError(
        f"there is no {SINGLE} in {source}"
        + (", only weights in pickles, which can run code" if pickles else ""),
        remedy="take the model's safetensors files; transformers' save_pretrained writes them",
    )


def _weight_map(source: Path) -> dict[str, str]:
    found: Any = _json(source / INDEX).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise _damaged(source / INDEX, "it has no weight_map")
    names = cast(dict[str, Any], found)
    for name in names.values():
        plain = isinstance(name, str) and name.endswith(".safetensors") and Path(name).name == name
        if not plain:
            raise _damaged(source / INDEX, f"it names the file {str(name)[:100]!r}")
    if len(set(names.values())) > MAX_SHARDS:
        raise _damaged(source / INDEX, f"it names more than {MAX_SHARDS} files")
    return names


def _check_weights(source: Path) -> dict[str, int]:
    """Open every file and find every tensor; return how many there are of each dtype."""
    dtypes: Counter[str] = Counter()
    placed: dict[str, str] = {}
    for path in _shards(source):
        with _opened(path) as weights:
            for name in weights.keys():  # noqa: SIM118
                dtypes[weights.get_slice(name).get_dtype()] += 1
                placed[name] = path.name
    if (source / INDEX).exists() and placed != _weight_map(source):
        raise _damaged(source / INDEX, "the tensors that it lists are not those in its files")
    return dict(dtypes.most_common())


def _opened(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="np")
    except (SafetensorError, OSError, ValueError) as error:
        raise _damaged(path, str(error)) from error


def _copy(source: Path, destination: Path, progress: Progress | None) -> str:
    digest = hashlib.sha256()
    with source.open("rb") as read, destination.open("xb") as write:
        while chunk := read.read(1 << 22):
            digest.update(chunk)
            write.write(chunk)
            if progress:
                progress.advance(len(chunk))
    return digest.hexdigest()


def _json(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            found: Any = json.loads(file.read(MAX_JSON))
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(path, str(error)) from error
    if not isinstance(found, dict):
        raise _damaged(path, "it is not an object")
    return cast(dict[str, Any], found)


def _damaged(path: Path, why: str) -> DirectoryError:
    return DirectoryError(
        f"{path} cannot be imported: {why}",
        remedy="download the model again, and compare checksums with its publisher's",
    )
