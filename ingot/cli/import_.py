"""`ingot import`: import a GGUF file or a Hugging Face directory."""

from __future__ import annotations

import json as json_format
import time
from pathlib import Path
from typing import Annotated, Any

import tyro

from ingot.cli import escape_markup
from ingot.cli.tables import new_grid
from ingot.core import lineage
from ingot.core.errors import IngotError
from ingot.core.log import progress, stdout


def import_(
    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SRC")],
    directory: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DST")],
    dequantize: tyro.conf.FlagCreatePairsOff[bool] = False,
    json: tyro.conf.FlagCreatePairsOff[bool] = False,
) -> None:
    """Import a model: a GGUF file, or a Hugging Face directory with safetensors.

    A GGUF file is written as a Hugging Face directory, with its weights of 4 and 8 bits as they
    are; a directory is checked and copied, without pickles and without code. Either gets an
    `ingot.json` that records its source. DST is created when it is complete.

    Examples: `ingot import SmolLM2-135M-Instruct.Q4_1.gguf smollm2-q4`,
    `ingot import downloads/Qwen3-0.6B qwen3`, `ingot import model.gguf model --json` for scripts.

    Args:
        source: The GGUF file or the Hugging Face directory.
        directory: The directory to write; it must be new or empty.
        dequantize: Write a GGUF file in bfloat16, to train all weights or for transformers.
        json: Print JSON instead of text.
    """
    from ingot.interop import directory as directories
    from ingot.interop import gguf

    start = time.monotonic()
    if source.is_dir():
        total = sum(path.stat().st_size for path in directories.model_files(source))
        with progress("checking", total, in_bytes=True) as bar:
            directories.copy_model(source, directory, bar)
    elif source.is_file():
        with progress("reading", 2 * source.stat().st_size, in_bytes=True) as bar:
            gguf.convert(source, directory, bar, keep_quantized=not dequantize)
    else:
        raise IngotError(
            f"{source}: no such file or directory", hint="give a .gguf file or a directory"
        )
    result = summary(directory, time.monotonic() - start)
    if json:
        print(json_format.dumps(result, indent=2))  # noqa: T201
    else:
        print_summary(result)


def summary(directory: Path, seconds: float) -> dict[str, Any]:
    """Describe a model directory that was just written, as `--json` prints it."""
    from ingot.interop.directory import count_parameters
    from ingot.interop.sentence_transformers import is_embedding_model

    config = json_format.loads((directory / "config.json").read_bytes())
    return {
        "directory": str(directory),
        "architecture": config["model_type"],
        "parameters": count_parameters(directory),
        "bytes": sum(path.stat().st_size for path in directory.iterdir()),
        "chat": "chat_template" in _settings(directory)
        or (directory / "chat_template.jinja").exists(),
        "embeddings": is_embedding_model(directory),
        "seconds": round(seconds, 2),
        "import": lineage.read(directory).steps[-1],
    }


def _settings(directory: Path) -> dict[str, Any]:
    path = directory / "tokenizer_config.json"
    return json_format.loads(path.read_bytes()) if path.exists() else {}


def print_summary(result: dict[str, Any], name: str | None = None) -> None:
    """Print what was written, and the command to try next with `name` or the directory."""
    step = result["import"]
    rows = [("source", f"{step['source']}, {size(step['size'])}, {_hash(step)}")]
    rows += [("architecture", result["architecture"])]
    rows += [("parameters", f"{result['parameters'] / 1e6:,.1f} million")]
    if "quantization" in step:
        types = ", ".join(f"{count} {name}" for name, count in step["quantization"].items())
        rows += [("tensors", types + _conversion(step))]
    rows += [("written", f"{size(result['bytes'])} in {result['seconds']:.1f} s")]
    rows += [("lineage", f"{result['directory']}/{lineage.NAME}")]
    console = stdout()
    console.print(new_grid((key, escape_markup(value)) for key, value in rows), highlight=False)
    verb = "serve" if result["embeddings"] else "chat" if result["chat"] else "generate"
    prompt = ' "Once upon a time"' if verb == "generate" else ""
    model = escape_markup(name or result["directory"])
    console.print(f"\nnext: ingot {verb} {model}{prompt}", highlight=False)


def _conversion(step: dict[str, Any]) -> str:
    if "sha256" not in step:
        return ", unchanged"
    kept = step.get("kept", 0)
    return f"; {kept} stay quantized, others to bfloat16" if kept else " to bfloat16"


def _hash(step: dict[str, Any]) -> str:
    if "commit" in step:
        return f"commit {step['commit'][:12]}, {len(step['files'])} files, hashes checked"
    return f"sha256 {step.get('sha256', '')[:16] or str(len(step.get('files', {}))) + ' files'}"


def size(count: int) -> str:
    """Format a number of bytes.

    >>> size(3_760), size(98_362_432), size(2_200_000_000)
    ('3.8 kB', '98.4 MB', '2.20 GB')
    """
    if count < 1e5:
        return f"{count / 1e3:.1f} kB"
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
