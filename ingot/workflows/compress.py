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

import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from ingot.compression import (
    GPTQ,
    Method,
    Upgrade,
    choose_upgrades,
    measure_error_reductions,
    quantize,
)
from ingot.core import lineage, log
from ingot.core.errors import ConfigError
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

_CALIBRATION = {"positions": 8192, "length": 512}
_EMBEDDING = Int8(group=32)
_LARGE = Int8()  # of layers that are raised in mixed precision


def compress(
    model: Path | str,
    directory: Path | str,
    format: WeightFormat,
    *,
    method: Method | None = None,
    bits_per_weight: float | None = None,
    embeddings: bool = False,
    text: str = "stdlib",
    device: str = "auto",
) -> CompressReport:
    """Write a model with quantized weights as a model directory.

    Run again, an interrupted run continues after its last block, from `.<directory>.partial`.

    Args:
        model: The model, as a directory or `ORG/NAME`.
        directory: The directory to create.
        format: The format of the linear layers' weights.
        method: How to quantize them; by default, `GPTQ`.
        bits_per_weight: Max bits of a weight of the linear layers, on average. As far as this
            allows, the layers that gain most are raised to `Int8`.
        embeddings: Whether to quantize embedding and LM head, too.
        text: Text to calibrate with and to compare on: a file, a folder or "stdlib".
        device: Where to compute.
    """
    source, directory = hub.model_path(model), Path(directory)
    partial = directory.parent / f".{directory.name[:64]}.partial"
    method = method or GPTQ()
    decoder, tokenizer = load(source, device=device)
    hf.check_quantizable(decoder)
    with derived_directory(directory, source, hf.describe(source).bytes) as out:
        sequences = tokenize_text(text, tokenizer, decoder)
        calibration = sequences
        if method.calibrated or bits_per_weight is not None:
            other = {**_CALIBRATION, "skip": len(sequences)}
            calibration = tokenize_text(text, tokenizer, decoder, **other)
        original_TD = hidden_states(decoder, sequences)
        formats = _choose_formats(decoder, format, bits_per_weight, calibration)
        with log.progress("quantizing", decoder.config.layers) as progress:
            sensitivities = quantize(decoder, formats, method, calibration, progress, partial)
        if embeddings:
            quantize_(decoder, {"tok_embed": _EMBEDDING, "lm_head": _EMBEDDING}.get)
        quantized_TD = hidden_states(decoder, sequences)
        hf.save(decoder, out)
        source_decoder = hf.load(source, device=decoder.device)
        pairs = {source: (source_decoder, original_TD), out: (decoder, quantized_TD)}
        original, quantized = _measure(pairs, sequences)
        report = CompressReport(
            format=_describe(formats),
            method=str(method),
            original=original,
            quantized=quantized,
            drift=measure_drift(source_decoder, original_TD, decoder, quantized_TD),
            sensitivities=tuple(sensitivities),
        )
        _write_report(report, out, directory)
        lineage.append(out, "compress", source=source.resolve().name, **report.facts())
    shutil.rmtree(partial, ignore_errors=True)
    return report


def _choose_formats(
    decoder: Decoder,
    format: WeightFormat,
    bits_per_weight: float | None,
    sequences: Sequence[Sequence[int]],
) -> dict[str, WeightFormat]:
    """Return the format of each linear layer, by name."""
    small = hf.stored_bytes(decoder, format)
    if bits_per_weight is None:
        return dict.fromkeys(small, format)
    large = hf.stored_bytes(decoder, _LARGE)
    weights = sum(weight.numel() for weight in decoder.blocks.parameters() if weight.dim() == 2)
    budget = int(bits_per_weight * weights / 8) - sum(small.values())
    least, most = (8 * sum(sizes.values()) / weights for sizes in (small, large))
    if least >= most:
        raise ConfigError(
            f"bits_per_weight raises layers to {_LARGE}, but {format} has as many bits",
            hint="use int4",
        )
    if not bits_per_weight >= least:  # not for NaN either
        raise ConfigError(
            f"bits_per_weight must be at least {least:.3f} with {format}, got {bits_per_weight}",
            hint="allow more bits, or use int4 with larger groups",
        )
    with log.progress("measuring errors", decoder.config.layers) as progress:
        errors = measure_error_reductions(decoder, format, _LARGE, sequences, progress)
    upgrades = {name: Upgrade(errors[name], large[name] - small[name]) for name in small}
    raised = choose_upgrades(upgrades, budget)
    return {name: _LARGE if name in raised else format for name in small}


def _write_report(report: CompressReport, out: Path, directory: Path) -> None:
    try:
        write_page(report, out, directory)
    except Exception as error:  # the weights are worth more than the page
        log.logger(__name__).warning("no report: %s", error)


def _describe(formats: Mapping[str, WeightFormat]) -> str:
    counts = Counter(formats.values())
    if len(counts) == 1:
        return str(*counts)
    return ", ".join(f"{number} layers {format}" for format, number in counts.items())


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
                bits_per_weight=measure_bits_per_weight(decoder, size),
                perplexity=perplexity(decoder, hidden_TD, sequences),
                tokens_per_s=speed,
            )
        )
    return figures


def measure_bits_per_weight(decoder: Decoder, num_bytes: int) -> float:
    """Return the bits of a weight of the quantized layers in a directory of this size."""
    num_bytes -= sum(parameter.nbytes for parameter in decoder.parameters())
    layers = [module for module in decoder.modules() if isinstance(module, QuantizedModule)]
    if not layers:
        return 8.0 * decoder.dtype.itemsize
    return 8 * num_bytes / sum(layer.rows * layer.channels for layer in layers)
