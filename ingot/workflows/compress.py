"""Quantize the weights of a model directory: a smaller directory, with what that costs.

    report = compress("smollm2", "smollm2-int4", Int4(group=32, zero_point=True))
    report.drift.kl_mean

The linear layers are quantized; embeddings, LM head and norms stay in bfloat16, as transformers and
vLLM expect it of a directory in the format of compressed-tensors. `CompressReport` has size,
perplexity and decode speed of both models, the distance to the original as the Kullback-Leibler
divergence of their next-token distributions over real text, and the sensitivity of each layer. The
directory has them as a page, `report.html`.
"""

# pyright: basic
from __future__ import annotations

from pathlib import Path

from torch import Tensor

from ingot.compression import GPTQ, Method, quantize
from ingot.core import lineage, log
from ingot.interop import hf, hub
from ingot.nn import Decoder
from ingot.nn.formats import WeightFormat
from ingot.nn.quantized import QuantizedLinear
from ingot.workflows.compress_report import CompressReport, ModelFigures, write_page
from ingot.workflows.decode_speed import measure_decode_speeds
from ingot.workflows.derive import (
    derived_directory,
    hidden_states,
    measure_drift,
    perplexity,
    tokenize_text,
)
from ingot.workflows.llm import load

_CALIBRATION, _CALIBRATION_LENGTH = 8192, 512  # tokens, and of a document


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
    with derived_directory(directory, source, hf.describe(source).bytes) as out:
        sequences = tokenize_text(text, tokenizer, decoder)
        calibration = sequences
        if method.calibrated:
            calibration = tokenize_text(
                *(text, tokenizer, decoder),
                positions=_CALIBRATION,
                length=_CALIBRATION_LENGTH,
                skip=len(sequences),
            )
        original_TD = hidden_states(decoder, sequences)
        with log.progress("quantizing", decoder.config.layers) as progress:
            sensitivities = quantize(decoder, format, method, calibration, progress)
        quantized_TD = hidden_states(decoder, sequences)
        hf.save(decoder, out)
        original, quantized = _measure(decoder, sequences, (original_TD, quantized_TD), source, out)
        report = CompressReport(
            format=str(format),
            method=str(method),
            original=original,
            quantized=quantized,
            drift=measure_drift(decoder, original_TD, quantized_TD),
            sensitivities=tuple(sensitivities),
        )
        try:
            write_page(report, out, directory)
        except Exception as error:  # the weights are worth more than the page
            log.logger(__name__).warning("no report: %s", error)
        lineage.append(out, "compress", source=source.resolve().name, **report.facts())
    return report


def _measure(
    decoder: Decoder,
    sequences: list[list[int]],
    hidden_TD: tuple[Tensor, Tensor],
    source: Path,
    out: Path,
) -> tuple[ModelFigures, ModelFigures]:
    """Return the figures of the original in `source` and of the quantized decoder, in `out`."""
    perplexities = [perplexity(decoder, states_TD, sequences) for states_TD in hidden_TD]
    speeds = measure_decode_speeds([hf.load(source, device=decoder.device), decoder])
    size = hf.describe(out).bytes
    original = ModelFigures(
        bytes=hf.describe(source).bytes,
        bits_per_weight=8.0 * decoder.dtype.itemsize,
        perplexity=perplexities[0],
        tokens_per_s=speeds[0],
    )
    quantized = ModelFigures(
        bytes=size,
        bits_per_weight=_bits_per_weight(decoder, size),
        perplexity=perplexities[1],
        tokens_per_s=speeds[1],
    )
    return original, quantized


def _bits_per_weight(decoder: Decoder, num_bytes: int) -> float:
    """Return the bits of a weight of the quantized layers in a directory of this size."""
    num_bytes -= sum(parameter.nbytes for parameter in decoder.parameters())
    layers = [module for module in decoder.modules() if isinstance(module, QuantizedLinear)]
    return 8 * num_bytes / sum(layer.in_features * layer.out_features for layer in layers)
