"""Merge a LoRA adapter into its base model: one directory of weights, with what merging costs.

    report = merge("runs/pirate", "pirate-merged", base="smollm2")
    report.kl_mean

A merged weight is `W + scale * B A`, computed in float32 and rounded to the dtype of the model. In
bfloat16 the rounding of a weight is often larger than its update, so that the merged model is not
the one that was trained: `MergeReport` has the distance between the two, as the Kullback-Leibler
divergence of their next-token distributions over real text. Serving the adapter as it is costs no
accuracy: see `ingot serve --adapter`.
"""

# pyright: basic
from __future__ import annotations

import shutil
from collections.abc import Iterator
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
    positions: int
    """Number of positions at which the distributions were compared."""
    kl_mean: float
    """Mean of KL(adapter || merged) in nats."""
    kl_max: float
    argmax_agreement: float
    """Share of positions at which both have the same most likely token."""


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
    sequences = _tokenize(text, tokenizer, decoder)
    AdapterPool(decoder, 1, merged.rank).load("adapter", merged)
    adapted_TD = _forward(decoder, sequences, adapted=True)
    peft.merge_(decoder, merged)
    kl, agreement = divergence(decoder, adapted_TD, _forward(decoder, sequences, adapted=False))
    report = MergeReport(
        adapter=merged.digest,
        rank=merged.rank,
        layers=len(merged.weights),
        positions=len(kl),
        kl_mean=float(kl.mean()),
        kl_max=float(kl.max()),
        argmax_agreement=agreement,
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


def _tokenize(text: str, tokenizer: Tokenizer, decoder: Decoder) -> list[list[int]]:
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
def divergence(decoder: Decoder, p_TD: Tensor, q_TD: Tensor) -> tuple[Tensor, float]:
    """Return KL(p || q) of the distributions after each hidden state, in nats, and the share of
    equal argmaxes."""
    kl: list[Tensor] = []
    equal = 0
    for p, q in _logits(decoder, p_TD, q_TD):
        equal += int((p.argmax(-1) == q.argmax(-1)).sum())
        p, q = p.double().log_softmax(-1), q.double().log_softmax(-1)
        kl.append((p.exp() * (p - q)).sum(-1).clamp(min=0))
    return torch.cat(kl), equal / len(p_TD)


def _logits(decoder: Decoder, *hidden: Tensor) -> Iterator[list[Tensor]]:
    for parts in zip(*(one.split(_CHUNK) for one in hidden), strict=True):
        yield [decoder.logits(part) for part in parts]


def _write(decoder: Decoder, base: Path, directory: Path, report: MergeReport) -> None:
    """Write the weights, the other files of the base model, and the lineage."""
    size = sum(parameter.nbytes for parameter in decoder.parameters())
    with paths.atomic_directory(directory, size) as temporary:
        hf.save(decoder, temporary)
        for name in set(directories.OPTIONAL_FILES) - {INDEX}:
            if (base / name).is_file():
                shutil.copyfile(base / name, temporary / name)
        lineage.append(temporary, "merge", base=base.resolve().name, **asdict(report))
