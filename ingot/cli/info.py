"""`ingot info`: describe a model directory."""

from __future__ import annotations

import dataclasses
import json as json_format
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import msgspec
import tyro

from ingot.cli import escape_markup
from ingot.core import lineage
from ingot.core.log import stdout


def info(
    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")],
    json: tyro.conf.FlagCreatePairsOff[bool] = False,
) -> None:
    """Describe a model: architecture, parameters, memory, lineage.

    Only the headers of its files are read. Examples: `ingot info smollm2`,
    `ingot info smollm2 --json` for scripts.

    Args:
        model: A model directory, or ORG/NAME on the Hugging Face hub.
        json: Print JSON instead of text.
    """
    from ingot.interop import hub

    content = report(hub.model_path(model))
    if json:
        print(json_format.dumps(content, indent=2))  # noqa: T201
    else:
        _print_lines(content)


def report(directory: Path) -> dict[str, Any]:
    """Return everything that `--json` prints."""
    from ingot.interop import classifier, hf
    from ingot.interop.signature import is_classifier

    if is_classifier(directory):
        described, memory = classifier.describe(directory), 0
    elif hf.is_encoder(directory):
        described, memory = hf.describe_encoder(directory), 0
    else:
        described = hf.describe(directory)
        memory = described.kv.bytes_per_token
    return {
        "directory": str(directory),
        "architecture": described.model_type,
        "config": as_data(described.config),
        "parameters": described.parameters,
        "bytes": described.bytes,
        "dtypes": described.dtypes,
        "kv_bytes_per_1k_tokens": 1000 * memory,
        "lineage": lineage.read(directory).steps,
        **_signature(described),
    }


def _signature(described: object) -> dict[str, Any]:
    """Return the inputs and outputs of a classifier; nothing for a language model."""
    signature = getattr(described, "signature", None)
    return {} if signature is None else msgspec.to_builtins(signature)


def as_data(value: Any) -> Any:
    """Convert a config to JSON's types.

    >>> from ingot.nn import preset
    >>> as_data(preset("tiny"))["norm"]
    'rms'
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {field.name: as_data(getattr(value, field.name)) for field in fields}
    return value.value if isinstance(value, Enum) else value


def _print_lines(content: dict[str, Any]) -> None:
    from ingot.cli.import_ import size

    dtypes = ", ".join(f"{count} {name}" for name, count in content["dtypes"].items())
    memory = (
        ("parameters", _count(content["parameters"])),
        ("weights", f"{size(content['bytes'])}: {dtypes}"),
    )
    describe = _describe_classifier if "inputs" in content else _describe_language_model
    above, below = describe(content)
    steps = [("lineage", _step(step)) for step in content["lineage"]]
    for name, value in (*above, *memory, *below, *steps):
        line = f"[bold]{name:<15}[/]{escape_markup(value)}"
        stdout().print(line, highlight=False, soft_wrap=True)


_Lines = list[tuple[str, str]]


def _count(number: int) -> str:
    """Return a number of parameters.

    >>> _count(942), _count(134_515_008)
    ('942', '134.5 million')
    """
    return f"{number:,}" if number < 1e5 else f"{number / 1e6:,.1f} million"


def _describe_classifier(content: dict[str, Any]) -> tuple[_Lines, _Lines]:
    """Return the lines above and below those of the memory."""
    config = {key: value for key, value in content["config"].items() if key != "kind"}
    fields = ", ".join(f"{key} {value}" for key, value in config.items())
    tensors = [
        (kind[:-1], f"{tensor['name']}: {tensor['datatype']} {list(tensor['shape'])}")
        for kind in ("inputs", "outputs")
        for tensor in content[kind]
    ]
    return [("architecture", f"{content['architecture']}: {fields}"), *tensors], []


def _describe_language_model(content: dict[str, Any]) -> tuple[_Lines, _Lines]:
    """Return the lines above and below those of the memory."""
    from ingot.cli.import_ import size

    config = content["config"]
    shape = f"{config['layers']} layers of {config['dim']}, MLP {config['ffn_dim']}"
    # An encoder has neither these fields nor a KV cache.
    heads = f"{config['heads']} heads of {config.get('head_dim', config['dim'] // config['heads'])}"
    if config.get("kv_heads", config["heads"]) != config["heads"]:
        heads += f", {config['kv_heads']} KV heads"
    if moe := config.get("moe"):
        shape += f", {moe['top_k']} of {moe['num_experts']} experts"
    kv_bytes = content["kv_bytes_per_1k_tokens"]
    memory = f"{size(kv_bytes)} of KV cache per 1,000 tokens" if kv_bytes else "no KV cache"
    tied = ", tied" if config.get("tie_embeddings") else ""
    above = [
        ("architecture", f"{content['architecture']}: {shape}; {heads}"),
        ("vocabulary", f"{config['vocab_size']:,}{tied}"),
        ("context", f"{config['max_seq_len']:,} tokens"),
    ]
    return above, [("memory", memory)]


def _step(step: dict[str, Any]) -> str:
    facts = [str(step[key]) for key in ("date", "source", "sha256") if key in step]
    return f"{step.get('step', '?')}: " + ", ".join(facts)
