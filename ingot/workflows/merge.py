"""Merge a LoRA adapter into its base model: one directory of weights, with what merging costs.

    report = merge("runs/pirate", "pirate-merged", base="smollm2")
    report.drift.kl_mean

A merged weight is `W + scale * B A`, computed in float32 and rounded to the dtype of the model. In
bfloat16 the rounding of a weight is often larger than its update, so that the merged model is not
the one that was trained: `MergeReport` has the distance between the two, as the Kullback-Leibler
divergence of their next-token distributions over real text. Serving the adapter as it is costs no
accuracy: see `ingot serve --adapter`.
"""

# pyright: basic
from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from ingot.core import lineage
from ingot.core.errors import ConfigError
from ingot.interop import hf, hub, peft
from ingot.observe.drift import DistributionDrift
from ingot.serving.engine.adapters import AdapterPool
from ingot.workflows.derive import (
    derived_directory,
    hidden_states,
    measure_drift,
    tokenize_text,
)
from ingot.workflows.llm import load


@dataclass(frozen=True, kw_only=True)
class MergeReport:
    """What was merged, and how far the merged model is from the adapter."""

    adapter: str
    """SHA-256 of the adapter."""
    rank: int
    layers: int
    """Number of adapted layers."""
    drift: DistributionDrift
    """Of the merged model from the adapter."""


def merge(
    adapter: Path | str,
    directory: Path | str,
    *,
    base: Path | str | None = None,
    text: str = "stdlib",
    device: str = "auto",
) -> MergeReport:
    """Write the base model with an adapter merged into its weights as a model directory.

    Args:
        adapter: A PEFT directory.
        directory: The directory to create.
        base: The base model, as a directory or `ORG/NAME`; by default the one that the adapter
            names.
        text: Text to compare the two models on: a file, a folder or "stdlib".
        device: Where to compute.
    """
    adapter, directory = Path(adapter), Path(directory)
    base = hub.model_path(_base_name(adapter) if base is None else base)
    decoder, tokenizer = load(base, device=device)
    merged = peft.load(adapter, decoder)
    size = sum(parameter.nbytes for parameter in decoder.parameters())
    with derived_directory(directory, base, size) as out:
        sequences = tokenize_text(text, tokenizer, decoder)
        AdapterPool(decoder, 1, merged.rank).load("adapter", merged)
        adapted_TD = hidden_states(decoder, sequences, adapted=True)
        peft.merge_(decoder, merged)
        report = MergeReport(
            adapter=merged.digest,
            rank=merged.rank,
            layers=len(merged.weights),
            drift=measure_drift(decoder, adapted_TD, decoder, hidden_states(decoder, sequences)),
        )
        hf.save(decoder, out)
        lineage.append(out, "merge", base=base.resolve().name, **asdict(report))
    return report


def _base_name(adapter: Path) -> str:
    name = peft.read_config(adapter).get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise ConfigError(
            f"{adapter} does not name its base model", hint="name it: ingot merge --base DIRECTORY"
        )
    return name
