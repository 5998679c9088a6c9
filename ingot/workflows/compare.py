"""Compare a model with another engine, or with another copy of itself, on the same tokens.

    drift = ingot.compare("smollm2", "transformers")
    drift.distribution.kl_mean, drift.first_difference, drift.outliers

    ingot.compare("smollm2", "smollm2-int8")                  # another model directory
    ingot.compare("smollm2", "vllm", python="venv/bin/python")
    ingot.compare("smollm2", "http://localhost:8000")         # an OpenAI-compatible server

Both sides get the same token ids and give the distribution of the next token at every position.
transformers and model directories are also compared op by op: see `ingot.observe.drift`. vLLM gives
whole distributions, a server the log-probabilities of the next and of the most likely tokens.
"""

# pyright: basic
from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from ingot import ops
from ingot.core import device as devices
from ingot.core.errors import ConfigError, IngotError
from ingot.interop import completions, hf, hf_probe, hub
from ingot.interop.completions import PromptLogprobs
from ingot.interop.tokenizer import Tokenizer
from ingot.nn import BatchLayout, Decoder
from ingot.nn.probe import Visit, probe
from ingot.observe.drift import (
    Comparison,
    DistributionMeter,
    ErrorMeter,
    OpDrift,
    TopLogprobMeter,
    Trace,
    TraceComparison,
)
from ingot.workflows.llm import load

Dtype = Literal["bfloat16", "float16", "float32"]
MAX_POSITIONS = 4096
MAX_TEXT_BYTES = 1 << 20
_CHUNK = 64  # positions whose logits are compared at once: 25 MB of float64 for 49,152 tokens
_MAX_VLLM_LOGPROBS = 1 << 26  # vLLM returns them as Python numbers
_VLLM_TIMEOUT_S = 1800.0
_VLLM_VARIABLES = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
_LM_HEAD = "lm_head"

Rows = Callable[[slice], Tensor]
"""Returns the logits of some positions."""


class _Side(Protocol):
    @property
    def description(self) -> str: ...

    def run(self, tokens_T: Tensor, visit: Visit | None) -> Rows:
        """Compute all positions; `visit` receives the result of every op."""
        ...


@dataclass(frozen=True)
class DecoderSide:
    """A decoder of ingot as one side of a comparison."""

    decoder: Decoder
    description: str

    @torch.inference_mode()
    def run(self, tokens_T: Tensor, visit: Visit | None) -> Rows:
        """Compute all positions in one packed forward pass, as in training."""
        layout = BatchLayout.packed([len(tokens_T)], tokens_T.device)
        with _probed(probe, self.decoder, visit):
            hidden_TD = self.decoder(tokens_T, layout)
        return torch.inference_mode()(lambda rows: self.decoder.logits(hidden_TD[rows]))


@dataclass(frozen=True)
class TransformersSide:
    """A model of transformers as one side of a comparison."""

    model: hf_probe.TransformersModel

    @property
    def description(self) -> str:
        """Version, dtype and attention implementation."""
        return self.model.description

    def run(self, tokens_T: Tensor, visit: Visit | None) -> Rows:
        """Compute all positions in one forward pass."""
        with _probed(hf_probe.probe, self.model, visit):
            logits_TV = self.model.logits(tokens_T)
        return logits_TV.__getitem__


def _probed(
    context: Callable[..., AbstractContextManager[None]], model: object, visit: Visit | None
) -> AbstractContextManager[None]:
    return nullcontext() if visit is None else context(model, visit)


def compare(
    model: Path | str,
    other: Path | str,
    *,
    text: str | None = None,
    tokens: int = 256,
    dtype: Dtype | None = None,
    device: str | torch.device = "auto",
    python: Path | str | None = None,
    on_status: Callable[[str], object] = lambda status: None,
) -> Comparison:
    """Return how far the distributions and the ops of a model are from those of another side.

    Args:
        model: A model directory, or `ORG/NAME` on the Hugging Face hub.
        other: "transformers" or "vllm", which load the same directory; the address of an
            OpenAI-compatible server; or another model directory.
        text: What to compare on; by default prose, code, numbers and a table in the package.
        tokens: Number of positions; fewer if the text or the model's context is shorter.
        dtype: Dtype of the weights on both sides; by default that of the files of each. In float32
            most of the rounding disappears, and errors of another kind remain.
        device: "auto", "cpu", "cuda", "cuda:1", ...; not for vLLM and servers.
        python: Interpreter of the environment that has vLLM; by default this one.
        on_status: Called with a line of text before each part that may take long.
    """
    if not 1 <= tokens <= MAX_POSITIONS:
        raise ConfigError(
            f"tokens: expected 1 to {MAX_POSITIONS:,}, got {tokens}", hint="give another number"
        )
    place, kind = devices.resolve(device), None if dtype is None else getattr(torch, dtype)
    directory = hub.model_path(model)
    on_status(f"loading {directory.name}")
    decoder, tokenizer = load(directory, device=place, dtype=kind, on_status=on_status)
    ids = _encode(tokenizer, text, tokens, decoder)
    first = DecoderSide(decoder, str(model))
    on_status(f"comparing with {other}")
    if completions.is_url(str(other)):
        key = os.environ.get("OPENAI_API_KEY")
        reported = completions.prompt_logprobs(str(other), ids, api_key=key)
        return compare_reported(first, reported, tokenizer, ids, str(other))
    if other == "vllm":
        matrix, version = _run_vllm(directory, decoder, ids, python)
        return compare_sides(first, _MatrixSide(matrix, f"vLLM {version}"), ids)
    if other == "transformers":
        return compare_sides(
            first, TransformersSide(hf_probe.load(directory, decoder.dtype, place)), ids
        )
    second = hf.load(hub.model_path(other), kind, place)
    _check_vocabularies(decoder.config.vocab_size, second.config.vocab_size)
    return compare_sides(first, DecoderSide(second, str(other)), ids)


def _encode(tokenizer: Tokenizer, text: str | None, tokens: int, decoder: Decoder) -> list[int]:
    if text is None:
        text = resources.files("ingot.workflows").joinpath("compare.txt").read_text("utf-8")
    room = decoder.config.max_seq_len - 1  # a server generates one token more
    ids = tokenizer.encode(text)[: min(tokens + 1, room)]
    if len(ids) < 2:
        raise ConfigError(
            f"text: expected at least 2 tokens, got {len(ids)}", hint="give a longer text"
        )
    if max(ids) >= decoder.config.vocab_size:
        raise ConfigError(
            f"the tokenizer gives token {max(ids)}, but the model has {decoder.config.vocab_size}",
            hint="use the tokenizer.json that belongs to the model",
        )
    return ids


def compare_sides(first: DecoderSide, second: _Side, ids: list[int]) -> Comparison:
    """Compare two sides that give logits: distributions, and ops where both have them."""
    decoder, note = first.decoder, _why_no_ops(first, second)
    tokens_T = torch.tensor(ids[:-1], device=decoder.device)
    targets_T = torch.tensor(ids[1:], device=decoder.device)
    trace = Trace()
    ours = first.run(tokens_T, trace.visit if note is None else None)
    passes = [TraceComparison(trace, isolate=isolate) for isolate in (False, True)]
    theirs = second.run(tokens_T, passes[0].visit if note is None else None)
    meter, logit_errors = _compare_logits(ours, theirs, targets_T)
    head, drifts = None, list[OpDrift]()
    if note is None:
        isolated = second.run(tokens_T, passes[1].visit)
        head, head_errors = _compare_logits(ours, isolated, targets_T)
        passes[0].errors[_LM_HEAD], passes[1].errors[_LM_HEAD] = logit_errors, head_errors
        names = (*trace.values, _LM_HEAD)
        drifts = [_op(name, *(one.errors for one in passes)) for name in names]
    return Comparison(
        model=first.description,
        other=second.description,
        dtype=str(decoder.dtype).removeprefix("torch."),
        device=str(decoder.device),
        token_ids=tuple(ids),
        logprobs=tuple(meter.logprobs),
        other_logprobs=tuple(meter.other_logprobs),
        distribution=meter.result(),
        lm_head=head and head.result(),
        ops=tuple(drifts),
        same_kernels=isinstance(second, DecoderSide) and second.decoder.dtype == decoder.dtype,
        note=note,
    )


def _compare_logits(
    ours: Rows, theirs: Rows, targets_T: Tensor
) -> tuple[DistributionMeter, tuple[float, bool, float, int]]:
    distributions, errors = DistributionMeter(), ErrorMeter()
    for begin in range(0, len(targets_T), _CHUNK):
        rows = slice(begin, begin + _CHUNK)
        logits_TV, other_TV = ours(rows), theirs(rows)
        _check_vocabularies(logits_TV.shape[1], other_TV.shape[1])
        distributions.add(logits_TV, other_TV, targets_T[rows])
        errors.add(logits_TV, other_TV)
    return distributions, errors.result()


def _check_vocabularies(first: int, second: int) -> None:
    if first != second:
        raise IngotError(
            f"the models have vocabularies of {first:,} and {second:,} tokens",
            hint="compare models with the same tokenizer",
        )


_Errors = dict[str, tuple[float, bool, float, int]]


def _op(name: str, accumulated: _Errors, isolated: _Errors) -> OpDrift:
    error, equal, _, _ = accumulated[name]
    isolated_error, isolated_equal, channel_error, channel = isolated[name]
    return OpDrift(
        name=name,
        error=error,
        bitwise_equal=equal,
        isolated_error=isolated_error,
        isolated_bitwise_equal=isolated_equal,
        channel_error=channel_error,
        channel=channel,
    )


def _why_no_ops(first: DecoderSide, second: _Side) -> str | None:
    """Return why ops cannot be compared; None if they can."""
    if isinstance(second, _MatrixSide):
        return "vLLM fuses ops and runs in its own processes: only distributions are compared"
    if isinstance(second, DecoderSide) and _shapes(first.decoder) != _shapes(second.decoder):
        return "the architectures differ: only distributions are compared"
    return None


def _shapes(decoder: Decoder) -> tuple[object, ...]:
    config = decoder.config
    shapes = [(name, parameter.shape) for name, parameter in decoder.named_parameters()]
    return (shapes, config.heads, config.norm_position, config.rope is None)


# vLLM


@dataclass(frozen=True)
class _MatrixSide:
    """Log-probabilities that were computed elsewhere."""

    matrix_TV: Tensor
    description: str

    def run(self, tokens_T: Tensor, visit: Visit | None) -> Rows:
        return self.matrix_TV.to(tokens_T.device).__getitem__


def _run_vllm(
    directory: Path, decoder: Decoder, ids: list[int], python: Path | str | None
) -> tuple[Tensor, str]:
    if python is None and importlib.util.find_spec("vllm") is None:
        raise IngotError(
            "vLLM is not installed in this environment",
            hint="install it into its own environment and name its interpreter with --python "
            "VENV/bin/python, or start `vllm serve` and give its URL",
        )
    vocab_size = decoder.config.vocab_size
    if len(ids) * vocab_size > _MAX_VLLM_LOGPROBS:
        raise ConfigError(
            f"{len(ids) - 1} positions x {vocab_size:,} tokens are too many for vLLM's log-"
            "probabilities",
            hint=f"give --tokens {max(1, _MAX_VLLM_LOGPROBS // vocab_size - 1)} or fewer",
        )
    worker, kind = Path(__file__).parent / "vllm_worker.py", str(decoder.dtype)
    command = [str(python or sys.executable), str(worker), str(directory.resolve())]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        files = [folder / name for name in ("ids.json", "logprobs.npy", "version.txt")]
        files[0].write_text(json.dumps(ids))
        _run_worker([*command, kind.removeprefix("torch."), *map(str, files)], folder)
        matrix, version = np.load(files[1], allow_pickle=False), files[2].read_text()[:40]
    if matrix.dtype != np.float32 or matrix.shape[:1] != (len(ids) - 1,) or matrix.ndim != 2:
        raise IngotError("vLLM wrote an unexpected matrix", hint="try another version of vLLM")
    return torch.from_numpy(matrix), version


def _run_worker(command: list[str], folder: Path) -> None:
    """Run vLLM's side; the last line that it writes is part of an error."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", **inherited, **_VLLM_VARIABLES}  # GiB
    try:
        run = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_VLLM_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise IngotError(
            f"vLLM did not run: {error}"[:500], hint="check the interpreter of --python"
        ) from error
    if run.returncode:
        lines = [line.strip() for line in run.stderr.splitlines() if line.strip()]
        raise IngotError(
            f"vLLM exited with {run.returncode}: {(lines or ['no output'])[-1][:500]}",
            hint="check that this interpreter has vLLM, and that vLLM can load the model",
        )


# Servers


@torch.inference_mode()
def compare_reported(
    first: DecoderSide, reported: PromptLogprobs, tokenizer: Tokenizer, ids: list[int], url: str
) -> Comparison:
    """Compare with the log-probabilities that a server reports of these tokens."""
    decoder = first.decoder
    ours = first.run(torch.tensor(ids[:-1], device=decoder.device), None)
    meter, by_text = TopLogprobMeter(), _ids_by_text(tokenizer, decoder.config.vocab_size)
    for row, (logprob, top) in enumerate(zip(reported.logprobs, reported.top, strict=True)):
        if row % _CHUNK == 0:
            logprobs_TV = _raw_logprobs(ours(slice(row, row + _CHUNK))).cpu()
        known = {by_text[name]: value for name, value in top.items() if name in by_text}
        likely = by_text.get(max(top, key=top.__getitem__)) if top else None
        meter.add(logprobs_TV[row % _CHUNK], ids[row + 1], logprob, known, likely)
    return Comparison(
        model=first.description,
        other=f"{reported.model} at {url}",
        dtype=str(decoder.dtype).removeprefix("torch."),
        device=str(decoder.device),
        token_ids=tuple(ids),
        logprobs=tuple(meter.logprobs),
        other_logprobs=tuple(meter.other_logprobs),
        distribution=meter.result(),
        note="a server reports the next token and the most likely ones: KL and total variation "
        "are lower bounds, and ops are not compared",
    )


def _raw_logprobs(logits_TV: Tensor) -> Tensor:
    """Return the log-probabilities of all tokens as the server reports them, in float32."""
    one_T = torch.ones(len(logits_TV), device=logits_TV.device)
    all_T = torch.full_like(one_T, logits_TV.shape[1], dtype=torch.int64)
    return ops.sampling_logprobs(logits_TV, one_T, all_T, one_T, torch.zeros_like(one_T))


def _ids_by_text(tokenizer: Tokenizer, vocab_size: int) -> dict[str, int]:
    """Return the tokens whose text no other token has: servers name tokens by their texts."""
    found: dict[str, int | None] = {}
    for token in range(min(vocab_size, tokenizer.vocab_size)):
        text = tokenizer.decode([token], skip_special_tokens=False)
        found[text] = None if text in found else token
    return {text: token for text, token in found.items() if token is not None}
