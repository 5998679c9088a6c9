"""Quantize the weights of a model directory: a smaller directory, with what that costs.

    report = compress("smollm2", "smollm2-int4", Int4(group=32, zero_point=True))
    report.drift.kl_mean

The linear layers are quantized; embeddings, LM head and norms stay in bfloat16, as vLLM and
transformers expect it of a directory in the format of compressed-tensors. `CompressReport` has the
distance to the original as the Kullback-Leibler divergence of their next-token distributions over
real text.
"""

# pyright: basic
from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from ingot.core import lineage, paths
from ingot.interop import directory as directories
from ingot.interop import hf, hub
from ingot.nn import BatchLayout, Decoder
from ingot.nn.formats import WeightFormat
from ingot.nn.quantized import quantize_
from ingot.nn.weights import INDEX
from ingot.observe.drift import DistributionDrift, DistributionMeter
from ingot.workflows.llm import load
from ingot.workflows.merge import tokenize_text

_CHUNK = 32  # rows of logits in memory at a time


@dataclass(frozen=True, kw_only=True)
class CompressReport:
    """What was quantized, and how far the result is from the original."""

    format: str
    bytes_before: int
    """Size of the original weights."""
    bytes_after: int
    drift: DistributionDrift
    """Of the quantized model from the original."""


def compress(
    model: Path | str,
    directory: Path | str,
    format: WeightFormat,
    *,
    text: str = "stdlib",
    device: str = "auto",
) -> CompressReport:
    """Write a model with quantized weights as a model directory.

    Args:
        model: The model, as a directory or `ORG/NAME`.
        directory: The directory to create.
        format: The format of the linear layers' weights.
        text: Text to compare the two models on: a file, a folder or "stdlib".
        device: Where to compute.
    """
    source, directory = hub.model_path(model), Path(directory)
    decoder, tokenizer = load(source, device=device)
    sequences = tokenize_text(text, tokenizer, decoder)
    tokens_T = torch.tensor([id for ids in sequences for id in ids], device=decoder.device)
    layout = BatchLayout.packed([len(ids) for ids in sequences], decoder.device)
    before = _size(decoder)
    with torch.inference_mode():
        original_TD = decoder(tokens_T, layout)
        quantize_(decoder, lambda name: format if name.startswith("blocks.") else None)
        quantized_TD = decoder(tokens_T, layout)
    meter = DistributionMeter()
    for original, quantized in zip(
        original_TD.split(_CHUNK), quantized_TD.split(_CHUNK), strict=True
    ):
        with torch.inference_mode():
            original_TV, quantized_TV = decoder.logits(original), decoder.logits(quantized)
        meter.add(original_TV, quantized_TV, original_TV.argmax(-1))
    report = CompressReport(
        format=str(format),
        bytes_before=before,
        bytes_after=_size(decoder),
        drift=meter.result(),
    )
    _write(decoder, source, directory, report)
    return report


def _size(decoder: Decoder) -> int:
    return sum(tensor.nbytes for tensor in (*decoder.parameters(), *decoder.buffers()))


def _write(decoder: Decoder, source: Path, directory: Path, report: CompressReport) -> None:
    """Write the weights, the other files of the original, and the lineage."""
    with paths.atomic_directory(directory, report.bytes_after) as temporary:
        hf.save(decoder, temporary)
        for name in set(directories.OPTIONAL_FILES) - {INDEX}:
            if (source / name).is_file():
                shutil.copyfile(source / name, temporary / name)
        lineage.append(temporary, "compress", source=source.resolve().name, **asdict(report))
