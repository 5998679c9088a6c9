"""Quantize the weights of a model directory: a smaller directory, with what that costs.

    report = compress("smollm2", "smollm2-int4", Int4(group=32, zero_point=True))
    report.drift.kl_mean

The linear layers are quantized; embeddings, LM head and norms stay in bfloat16, as transformers and
vLLM expect it of a directory in the format of compressed-tensors. `CompressReport` has the
distance to the original as the Kullback-Leibler divergence of their next-token distributions over
real text.
"""

# pyright: basic
from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from ingot.compression import GPTQ, Method, quantize
from ingot.core import lineage, log
from ingot.interop import hf, hub
from ingot.nn import Decoder
from ingot.nn.formats import WeightFormat
from ingot.observe.drift import DistributionDrift
from ingot.workflows.derive import (
    derived_directory,
    hidden_states,
    measure_drift,
    tokenize_text,
)
from ingot.workflows.llm import load

_CALIBRATION, _CALIBRATION_LENGTH = 8192, 512  # tokens, and of a document


@dataclass(frozen=True, kw_only=True)
class CompressReport:
    """What was quantized, and how far the result is from the original."""

    format: str
    method: str
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
    method: Method | None = None,
    text: str = "stdlib",
    device: str = "auto",
) -> CompressReport:
    """Write a model with quantized weights as a model directory.

    Args:
        model: The model, as a directory or `ORG/NAME`.
        directory: The directory to create.
        format: The format of the linear layers' weights.
        method: How to quantize them; by default, `GPTQ`.
        text: Text to calibrate with and, in other documents, to compare the two models on: a file,
            a folder or "stdlib".
        device: Where to compute.
    """
    source, directory = hub.model_path(model), Path(directory)
    method = method or GPTQ()
    decoder, tokenizer = load(source, device=device)
    hf.check_quantizable(decoder)
    before = _size(decoder)
    with derived_directory(directory, source, before) as out:
        sequences = tokenize_text(text, tokenizer, decoder)
        calibration: list[list[int]] = []
        if method.calibrated:
            calibration = tokenize_text(
                *(text, tokenizer, decoder),
                positions=_CALIBRATION,
                length=_CALIBRATION_LENGTH,
                skip=len(sequences),
            )
        original_TD = hidden_states(decoder, sequences)
        with log.progress("quantizing", decoder.config.layers) as progress:
            quantize(decoder, format, method, calibration, progress)
        report = CompressReport(
            format=str(format),
            method=str(method),
            bytes_before=before,
            bytes_after=_size(decoder),
            drift=measure_drift(decoder, original_TD, hidden_states(decoder, sequences)),
        )
        hf.save(decoder, out)
        lineage.append(out, "compress", source=source.resolve().name, **asdict(report))
    return report


def _size(decoder: Decoder) -> int:
    return sum(tensor.nbytes for tensor in (*decoder.parameters(), *decoder.buffers()))
