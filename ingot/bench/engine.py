"""Times the engine: decode steps against the memory bandwidth, and its optimizations.

    decode    a step of 1, 8 and 32 requests, interleaved with reading as many bytes of memory as
              the step has to: the weights, the keys and the values. On a machine with other tenants
              the bandwidth changes by half within a minute, so only interleaving is a comparison.
    options   a step of 32 requests with log-probabilities or LoRA adapters, interleaved with one
              without them
    int8      a step of 32 requests with an int8 KV cache, each after 512 tokens, interleaved with
              one with a cache in the dtype of the model
    ngram     one request that copies a text of its prompt, with and without n-gram speculation
    int4      one request that continues a text, with and without drafts by a 4-bit copy of the
              model; not for a model that cannot be quantized
    prefix    requests whose prompts share nine tokens of ten, one after the other, with the blocks
              of the previous ones and with a cache salt each, which shares nothing

Each optimization is interleaved with its baseline, and both have to produce the same tokens.
"""

# pyright: basic
from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from random import Random
from statistics import mean, median
from typing import Any

import torch

from ingot.bench.cpu_peaks import reader_on_all_cores
from ingot.core.errors import ConfigError, IngotError
from ingot.interop import peft
from ingot.nn.decoder import Decoder
from ingot.nn.layout import KVCacheDtype, KVSpec
from ingot.nn.lora import LoraConfig
from ingot.serving.engine.adapters import AdapterPool
from ingot.serving.engine.engine import Engine, config_for_memory
from ingot.serving.engine.request import Request
from ingot.serving.engine.sampling_params import SamplingParams
from ingot.serving.engine.speculate import SpeculateKind, create_proposer
from ingot.workflows.decode_speed import BATCHES, DECODE_PROMPT, add_requests
from ingot.workflows.llm import LLM

# A text that a model would only write as a copy.
TEXT = (
    "The harbour clock at Vessel Quay ran eleven minutes slow, and no one would mend it. Sailors "
    "set their watches by the bakery instead, whose oven door opened at five, at nine and at noon. "
    "On Thursdays the baker slept late; on Thursdays, therefore, no ship ever left in time. "
)
PREFIX, PROMPT, NUM_PROMPTS = 288, 320, 16
STEPS = 100
NEW_TOKENS = 64
NUM_LORAS, LORA_RANK = 8, 16
KV_CONTEXT = 512
_MAX_READ_BYTES = 2**30

Advance = Callable[[int], object]


@dataclass(frozen=True, kw_only=True)
class DecodeStep:
    """A step with one token per request of a batch: medians, and the median of the ratios."""

    batch_size: int
    step_s: float
    reading_s: float
    """Seconds that reading the same bytes takes."""
    roofline_fraction: float
    tokens_per_s: float


@dataclass(frozen=True, kw_only=True)
class DecodeOption:
    """A step of 32 requests with an option: medians, and the median of the ratios."""

    name: str
    step_s: float
    baseline_s: float
    """Seconds of a step without it."""
    speed_ratio: float
    """Speed with it over the speed without."""


@dataclass(frozen=True, kw_only=True)
class Speedup:
    """Seconds with and without an optimization, and their ratio: medians of the rounds."""

    name: str
    description: str
    baseline_s: float
    optimized_s: float
    ratio: float
    same_tokens: bool
    """Both produced the same tokens in every round."""


def decode(model: LLM, steps: int = STEPS, advance: Advance = lambda _: None) -> list[DecodeStep]:
    """Time `steps` decode steps of each batch size; `advance` is called after each step."""
    return [_decode(model.decoder, batch_size, steps, advance) for batch_size in BATCHES]


def _decode(decoder: Decoder, batch_size: int, steps: int, advance: Advance) -> DecodeStep:
    engine = Engine(decoder)
    add_requests(engine, batch_size, steps, temperature=0.0)
    spec = KVSpec.of(decoder)
    kv_bytes = spec.bytes_per_token if spec else 0
    num_bytes = _weight_bytes(decoder) + batch_size * (DECODE_PROMPT + steps // 2) * kv_bytes
    pairs = []
    with reader_on_all_cores(min(num_bytes, _MAX_READ_BYTES)) as (read, size):
        for _ in range(steps):
            pairs.append((_seconds(engine.step), _seconds(read) * num_bytes / size))
            advance(1)
    step = median(a for a, _ in pairs)
    return DecodeStep(
        batch_size=batch_size,
        step_s=step,
        reading_s=median(b for _, b in pairs),
        roofline_fraction=median(b / a for a, b in pairs),
        tokens_per_s=batch_size / step,
    )


def measure_options(
    model: LLM, steps: int = STEPS, advance: Advance = lambda _: None
) -> list[DecodeOption]:
    """Time `steps` decode steps with each option; `advance` is called after each round of them."""
    decoder = model.decoder
    pool = AdapterPool(decoder, NUM_LORAS, LORA_RANK)
    names = [f"lora-{number}" for number in range(NUM_LORAS)]
    for name in names:
        pool.load(name, _adapter(decoder))
    raw: dict[str, Any] = {"logprobs": 0}
    options: dict[str, dict[str, Any]] = {
        "none": {},
        "raw log-probabilities": raw,
        "processed log-probabilities": {**raw, "logprobs_mode": "processed"},
        "one adapter": {"adapters": names[:1]},
        f"{NUM_LORAS} adapters": {"adapters": names},
    }
    engines = {name: Engine(decoder, adapters=pool) for name in options}
    for name, engine in engines.items():
        add_requests(engine, BATCHES[-1], steps, temperature=1.0, **options[name])
    seconds: dict[str, list[float]] = {name: [] for name in options}
    for number in range(steps):
        for name in Random(number).sample(list(engines), len(engines)):
            seconds[name].append(_seconds(engines[name].step))
        advance(1)
    baseline = seconds.pop("none")
    return [
        DecodeOption(
            name=name,
            step_s=median(own),
            baseline_s=median(baseline),
            speed_ratio=median(b / a for a, b in zip(own, baseline, strict=True)),
        )
        for name, own in seconds.items()
    ]


def measure_int8_cache(
    model: LLM, steps: int = STEPS, advance: Advance = lambda _: None
) -> DecodeOption:
    """Time `steps` decode steps with an int8 KV cache; `advance` is called after each round."""
    decoder, dtype = model.decoder, model.decoder.kv_cache_dtype
    context = min(KV_CONTEXT, decoder.config.max_seq_len - steps - 32)
    engines: dict[KVCacheDtype, Engine] = {}
    for name in ("auto", "int8"):  # of the cache that the next engine allocates
        decoder.set_kv_cache_dtype(name)
        engines[name] = Engine(decoder)
        add_requests(engines[name], BATCHES[-1], steps, prompt_len=context, temperature=0.0)
    decoder.set_kv_cache_dtype(dtype)
    seconds: dict[KVCacheDtype, list[float]] = {name: [] for name in engines}
    for number in range(steps):
        for name in Random(number).sample(list(engines), len(engines)):
            seconds[name].append(_seconds(engines[name].step))
        advance(1)
    return DecodeOption(
        name=f"int8 KV cache after {context} tokens",
        step_s=median(seconds["int8"]),
        baseline_s=median(seconds["auto"]),
        speed_ratio=median(b / a for a, b in zip(seconds["int8"], seconds["auto"], strict=True)),
    )


def _adapter(decoder: Decoder) -> peft.Adapter:
    """Return an adapter of all linear layers; what its weights are does not change its speed."""

    def matrix(*shape: int) -> torch.Tensor:
        return torch.full(shape, 0.01, dtype=decoder.dtype)

    weights = {
        name: (matrix(LORA_RANK, layer.in_features), matrix(layer.out_features, LORA_RANK))
        for name, layer in peft.target_layers(decoder).items()
    }
    return peft.Adapter(peft.new_config(LoraConfig(rank=LORA_RANK), sorted(weights)), weights)


def _weight_bytes(decoder: Decoder) -> int:
    """Bytes of weights that a step reads: all but an input embedding that is not also the head."""
    skipped = () if decoder.lm_head is None else decoder.tok_embed.modules()
    modules = set(decoder.modules()) - set(skipped)
    tensors = {t for m in modules for t in (*m._parameters.values(), *m._buffers.values())}
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def _seconds(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def measure_speedups(
    model: LLM, rounds: int = 5, advance: Advance = lambda _: None
) -> list[Speedup]:
    """Time optimizations against their baselines; `advance` is called once per round."""
    if not 1 <= rounds <= 1000:
        raise IngotError(
            f"rounds: must be from 1 to 1000, got {rounds}", hint="choose another number"
        )
    text = model.tokenizer.encode(TEXT)
    speedups = [
        _speculation(model, "ngram", text * 3 + text[: len(text) // 4], rounds, advance),
        _prefix(model, rounds, advance),
    ]
    with suppress(ConfigError):
        speedups.append(_speculation(model, "int4", text, rounds, advance))
    return speedups


def _speculation(
    model: LLM, kind: SpeculateKind, prompt: list[int], rounds: int, advance: Advance
) -> Speedup:
    request = Request(
        id=0,
        prompt=tuple(prompt),
        max_tokens=NEW_TOKENS,
        sampling_params=SamplingParams(temperature=0.0),
    )
    config = config_for_memory(model.decoder)
    runner, proposer = create_proposer(kind, model.decoder, config)
    baseline = Engine(model.decoder, scheduler_config=config)
    speculative = Engine(model.decoder, scheduler_config=config, runner=runner, proposer=proposer)

    def run(engine: Engine) -> tuple[float, list[int]]:
        """Return the seconds of all tokens but the first, since prefill is the same in both."""
        engine.add_request(request)
        tokens: list[int] = []
        begin = time.perf_counter()
        while engine.has_unfinished_requests:
            for output in engine.step():
                if output.tokens and not tokens:
                    begin = time.perf_counter()
                tokens += output.tokens
        return time.perf_counter() - begin, tokens

    text = "a text that the prompt has three times" if kind == "ngram" else "a new text"
    description = f"{NEW_TOKENS} tokens of {text}, batch 1: seconds"
    return _speedup(
        kind, description, lambda: run(baseline), lambda: run(speculative), rounds, advance
    )


def _prefix(model: LLM, rounds: int, advance: Advance) -> Speedup:
    engine, vocab_size = Engine(model.decoder), model.decoder.config.vocab_size
    round_numbers = {True: count(1), False: count(1)}

    def run(salted: bool) -> tuple[float, list[int]]:
        """Return the mean TTFT. Each round has a new prefix, which is not cached yet."""
        number = next(round_numbers[salted])
        prefix = [(7 * at + number) % vocab_size for at in range(PREFIX)]
        times: list[float] = []
        tokens: list[int] = []
        for own in range(NUM_PROMPTS):
            rest = [(11 * at + own + 1) % vocab_size for at in range(PROMPT - PREFIX)]
            salt = bytes([own + 1]) if salted else b""
            options = SamplingParams(temperature=0.0)
            begin = time.perf_counter()
            engine.add_request(
                Request(
                    id=own,
                    prompt=(*prefix, *rest),
                    max_tokens=1,
                    cache_salt=salt,
                    sampling_params=options,
                )
            )
            while engine.has_unfinished_requests:
                for output in engine.step():
                    tokens += output.tokens
            times.append(time.perf_counter() - begin)
        return mean(times), tokens

    description = (
        f"{NUM_PROMPTS} prompts of {PROMPT} tokens, {PREFIX} of them shared: mean TTFT in seconds"
    )
    return _speedup("prefix", description, lambda: run(True), lambda: run(False), rounds, advance)


def _speedup(
    name: str,
    description: str,
    baseline: Callable[[], tuple[float, list[int]]],
    optimized: Callable[[], tuple[float, list[int]]],
    rounds: int,
    advance: Advance,
) -> Speedup:
    for run in (baseline, optimized):  # page faults, graph captures
        run()
    pairs = []
    for _ in range(rounds):
        pairs.append((baseline(), optimized()))
        advance(1)
    return Speedup(
        name=name,
        description=description,
        baseline_s=median(a[0] for a, _ in pairs),
        optimized_s=median(b[0] for _, b in pairs),
        ratio=median(a[0] / b[0] for a, b in pairs),
        same_tokens=all(a[1] == b[1] for a, b in pairs),
    )
