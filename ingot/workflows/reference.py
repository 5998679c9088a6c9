"""Reference log-probabilities of preference pairs, computed once by the engine.

    add_reference(trainer.model, trainer.datasets)

The reference model of DPO is the model before its first update; for an adapter, whose first update
is still to come, that is the base model. The engine scores the answers of all pairs with it, in the
dtype and on the device of training. Chosen answers are scored first and rejected ones after them,
so that these find the blocks of the prompt in the cache.

The results are kept in ingot's cache as float32, under a hash of the weights, the tokens and the
processor, and are read from there when a run is resumed or another one has the same data.
"""

# pyright: basic
from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from ingot.core import log, paths
from ingot.core.device import detect
from ingot.core.errors import ConfigError
from ingot.data import PairDataset
from ingot.nn import Decoder
from ingot.nn.weights import hash_tensors
from ingot.serving.engine.engine import Engine, config_for_memory
from ingot.serving.engine.request import Request
from ingot.serving.engine.sampling_params import SamplingParams
from ingot.serving.engine.scheduler import SchedulerConfig
from ingot.training.recipe import Datasets

GROUP = 64  # pairs whose prompts are kept in the KV cache between their two answers
KV_CACHE_BYTES = 1 << 29
BLOCK_SIZE = 8  # small: only whole blocks of a prompt are reused, and many prompts are short
_NAME = "logprobs"
_LOG = log.logger(__name__)


def add_reference(model: torch.nn.Module, datasets: Datasets) -> None:
    """Give both splits the log-probabilities of their targets under the model as it is now."""
    if not isinstance(model, Decoder):
        raise ConfigError("dpo: the model must be a decoder", hint="set init_from to a chat model")
    model_hash = _hash_model(model)
    for split in (datasets.train, datasets.validation):
        key = hashlib.sha256(f"{model_hash} {split.sequences.hash()}".encode()).hexdigest()
        path = cache_dir() / f"{key[:32]}.safetensors"
        split.reference = _read(path, split)
        if split.reference is not None:
            _LOG.info("reference log-probabilities are in %s", path)
            continue
        with log.progress("scoring with the reference model", 2 * len(split)) as bar:
            split.reference = score_pairs(model, split, bar.advance)
        with paths.atomic_file(path) as temporary:
            save_file({_NAME: split.reference}, temporary)


def cache_dir() -> Path:
    """Return the directory of all reference log-probabilities."""
    return paths.cache("references")


def score_pairs(
    decoder: Decoder, pairs: PairDataset, advance: Callable[[int], object] = lambda _: None
) -> NDArray[np.float32]:
    """Return the log-probabilities of the targets of all sequences, one after the other.

    They are bitwise equal to those that training computes.
    """
    training = decoder.training
    decoder.eval()
    token_bytes = decoder.kv_spec.bytes_per_token
    kv_cache_bytes = max(KV_CACHE_BYTES, 2 * max(pairs.sequences.lengths) * token_bytes)
    config = SchedulerConfig(num_blocks=1, block_size=BLOCK_SIZE)
    engine = Engine(decoder, scheduler_config=config_for_memory(decoder, kv_cache_bytes, config))
    logprobs: list[list[float]] = [[] for _ in range(len(pairs.sequences))]
    for begin in range(0, len(pairs), GROUP):
        group = range(2 * begin, 2 * min(begin + GROUP, len(pairs)))
        for answers in (group[::2], group[1::2]):
            _score(engine, pairs, answers, logprobs)
            advance(len(answers))
    decoder.train(training)
    stats = engine.stats()
    _LOG.info(
        "scored %s answers; %s prompt tokens were cached",
        f"{len(logprobs):,}",
        f"{stats.cached_tokens:,}",
    )
    return np.concatenate([np.array(some, np.float32) for some in logprobs])


def _score(engine: Engine, pairs: PairDataset, numbers: range, logprobs: list[list[float]]) -> None:
    """Score the sequences of these numbers; `logprobs` receives those of their targets."""
    scores: dict[int, list[float]] = {}
    for number in numbers:
        tokens, trained = pairs.sequences[number]
        params = SamplingParams(
            temperature=0.0, prompt_logprobs=0, prompt_logprobs_start=int(trained.argmax())
        )
        scores[number] = []
        engine.add_request(
            Request(id=number, prompt=tuple(tokens.tolist()), max_tokens=1, sampling_params=params)
        )
    with torch.inference_mode():
        while engine.has_unfinished_requests:
            for output in engine.step():
                scores[output.id] += [one.logprob for one in output.prompt_logprobs or ()]
    for number, found in scores.items():
        trained = pairs.sequences[number][1]
        wanted = trained[trained.argmax() :]
        logprobs[number] = [value for value, want in zip(found, wanted, strict=True) if want]


def _hash_model(model: Decoder) -> str:
    """Return a hash of the weights, the architecture and the processor."""
    cpu = detect().cpu
    facts = model.config, model.device.type, cpu.name, cpu.isa
    return hash_tensors(model.state_dict(), *facts)  # quantized weights are buffers


def _read(path: Path, split: PairDataset) -> NDArray[np.float32] | None:
    try:
        stored = load_file(path)[_NAME]
    except (OSError, SafetensorError, KeyError):
        return None
    fits = stored.shape == (split.reference_ends[-1],) and stored.dtype == np.float32
    return stored if fits else None
