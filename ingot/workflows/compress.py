"""Quantize the weights of a model directory: a smaller directory, with what that costs.

    report = compress("smollm2", "smollm2-int4", Int4(group=32, zero_point=True))
    report.drift.kl_mean

The linear layers are quantized; embeddings, LM head and norms stay in bfloat16, as transformers and
vLLM expect it of a directory in the format of compressed-tensors. With `embeddings`, embedding and
LM head become int8, rounded to nearest. `CompressReport` has size,
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
from ingot.nn.formats import Int8, WeightFormat
from ingot.nn.quantized import QuantizedModule, quantize_
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
_EMBEDDING = Int8(group=32)


def compress(
    model: Path | str,
    directory: Path | str,
    format: WeightFormat,
    *,
    method: Method | None = None,
    embeddings: bool = False,
    text: str = "stdlib",
    device: str = "auto",
) -> CompressReport:
    """Write a model with quantized weights as a model directory.

    Args:
        model: The model, as a directory or `ORG/NAME`.
        directory: The directory to create.
        format: The format of the linear layers' weights.
        method: How to quantize them; by default, `GPTQ`.
        embeddings: Whether to quantize embedding and LM head, too.
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
            size, skip = {"positions": _CALIBRATION, "length": _CALIBRATION_LENGTH}, len(sequences)
            calibration = tokenize_text(text, tokenizer, decoder, **size, skip=skip)
        original_TD = hidden_states(decoder, sequences)
        with log.progress("quantizing", decoder.config.layers) as progress:
            sensitivities = quantize(decoder, format, method, calibration, progress)
        if embeddings:
            quantize_(decoder, {"tok_embed": _EMBEDDING, "lm_head": _EMBEDDING}.get)
        quantized_TD = hidden_states(decoder, sequences)
        hf.save(decoder, out)
        source_decoder = hf.load(source, device=decoder.device)
        original, quantized = _measure(
            {source: (source_decoder, original_TD), out: (decoder, quantized_TD)}, sequences
        )
        report = CompressReport(
            format=str(format),
            method=str(method),
            original=original,
            quantized=quantized,
            drift=measure_drift(source_decoder, original_TD, decoder, quantized_TD),
            sensitivities=tuple(sensitivities),
        )
        try:
            write_page(report, out, directory)
        except Exception as error:  # the weights are worth more than the page
            log.logger(__name__).warning("no report: %s", error)
        lineage.append(out, "compress", source=source.resolve().name, **report.facts())
    return report


def _measure(
    models: dict[Path, tuple[Decoder, Tensor]], sequences: list[list[int]]
) -> list[ModelFigures]:
    """Return the figures of models in these directories, with their hidden states."""
    speeds = measure_decode_speeds([decoder for decoder, _ in models.values()])
    figures: list[ModelFigures] = []
    for (directory, (decoder, hidden_TD)), speed in zip(models.items(), speeds, strict=True):
        size = hf.describe(directory).bytes
        figures.append(
            ModelFigures(
                bytes=size,
                bits_per_weight=_bits_per_weight(decoder, size),
                perplexity=perplexity(decoder, hidden_TD, sequences),
                tokens_per_s=speed,
            )
        )
    return figures


def _bits_per_weight(decoder: Decoder, num_bytes: int) -> float:
    """Return the bits of a weight of the quantized layers in a directory of this size."""
    num_bytes -= sum(parameter.nbytes for parameter in decoder.parameters())
    layers = [module for module in decoder.modules() if isinstance(module, QuantizedModule)]
    if not layers:
        return 8.0 * decoder.dtype.itemsize
    return 8 * num_bytes / sum(layer.rows * layer.channels for layer in layers)
