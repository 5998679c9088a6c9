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

import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ingot.core import lineage, paths
from ingot.core.errors import ConfigError
from ingot.data import Source
from ingot.interop import directory as directories
from ingot.interop import hf, hub, peft
from ingot.interop.tokenizer import Tokenizer
from ingot.nn import BatchLayout, Decoder
from ingot.nn.weights import INDEX
from ingot.observe.drift import DistributionDrift, DistributionMeter
from ingot.serving.engine.adapters import AdapterPool
from ingot.workflows.llm import load

POSITIONS = 512
_SEQUENCE = 128
_CHUNK = 32  # rows of logits in memory at a time


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
    sequences = tokenize_text(text, tokenizer, decoder)
    AdapterPool(decoder, 1, merged.rank).load("adapter", merged)
    adapted_TD = _forward(decoder, sequences, adapted=True)
    peft.merge_(decoder, merged)
    drift = _compare(decoder, adapted_TD, _forward(decoder, sequences, adapted=False))
    report = MergeReport(
        adapter=merged.digest, rank=merged.rank, layers=len(merged.weights), drift=drift
    )
    _write(decoder, base, directory, report)
    return report


def _base_name(adapter: Path) -> str:
    name = peft.read_config(adapter).get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise ConfigError(
            f"{adapter} does not name its base model", hint="name it: ingot merge --base DIRECTORY"
        )
    return name


def tokenize_text(text: str, tokenizer: Tokenizer, decoder: Decoder) -> list[list[int]]:
    """Return sequences of tokens, `POSITIONS` together."""
    length = min(_SEQUENCE, decoder.config.max_seq_len)
    sequences: list[list[int]] = []
    for document in Source(text).documents():
        ids = tokenizer.encode(document[: 16 * length])[:length]
        left = POSITIONS - sum(map(len, sequences))
        if ids:
            sequences.append(ids[:left])
        if left <= len(ids):
            break
    if not sequences:
        raise ConfigError(f"{text} has no text", hint="name a file with some text: --text FILE")
    return sequences


@torch.inference_mode()
def _forward(decoder: Decoder, sequences: list[list[int]], *, adapted: bool) -> Tensor:
    layout = BatchLayout.packed([len(ids) for ids in sequences], decoder.device)
    tokens_T = torch.tensor([id for ids in sequences for id in ids], device=decoder.device)
    if adapted:
        layout = replace(layout, adapters=torch.zeros_like(tokens_T, dtype=torch.int32))
    return decoder(tokens_T, layout)


@torch.inference_mode()
def _compare(decoder: Decoder, adapted_TD: Tensor, merged_TD: Tensor) -> DistributionDrift:
    meter = DistributionMeter()
    for hidden in zip(adapted_TD.split(_CHUNK), merged_TD.split(_CHUNK), strict=True):
        adapted_TV, merged_TV = (decoder.logits(rows) for rows in hidden)
        meter.add(adapted_TV, merged_TV, adapted_TV.argmax(-1))
    return meter.result()


def _write(decoder: Decoder, base: Path, directory: Path, report: MergeReport) -> None:
    """Write the weights, the other files of the base model, and the lineage."""
    size = sum(parameter.nbytes for parameter in decoder.parameters())
    with paths.atomic_directory(directory, size) as temporary:
        hf.save(decoder, temporary)
        for name in set(directories.OPTIONAL_FILES) - {INDEX}:
            if (base / name).is_file():
                shutil.copyfile(base / name, temporary / name)
        lineage.append(temporary, "merge", base=base.resolve().name, **asdict(report))
