"""Time the decode steps of several models, interleaved: on a machine with other tenants only
interleaving is a comparison.

    original, quantized = measure_decode_speeds([decoder, quantized_decoder])
    original[8]                                          # tokens/s of a batch of 8
"""

# pyright: basic
from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from ingot.nn import Decoder
from ingot.serving.engine.engine import Engine
from ingot.serving.engine.request import Request
from ingot.serving.engine.sampling_params import SamplingParams
from ingot.serving.engine.scheduler import SchedulerConfig

BATCHES, DECODE_PROMPT = (1, 8, 32), 16
_MIN_STEPS, _MAX_STEPS, _MAX_SECONDS = 3, 32, 4.0  # of a batch size
_EXTRA_TOKENS = 3  # of a request: those of the steps before the first one that is timed


def measure_decode_speeds(
    decoders: Sequence[Decoder], batches: Sequence[int] = BATCHES
) -> list[dict[int, float]]:
    """Return the tokens/s of each model by batch size, from the median of up to 32 steps.

    A batch size takes a few seconds: slow models run fewer steps, at least 3. Models whose context
    is too short for these are not timed.
    """
    speeds: list[dict[int, float]] = [{} for _ in decoders]
    context = min(decoder.config.max_seq_len for decoder in decoders)
    steps = min(_MAX_STEPS, context - DECODE_PROMPT - _EXTRA_TOKENS)
    for batch_size in batches if steps >= _MIN_STEPS else ():
        # Twice the blocks of 32 tokens that the requests need.
        config = SchedulerConfig(num_blocks=4 * batch_size)
        engines = [Engine(decoder, scheduler_config=config) for decoder in decoders]
        for engine in engines:
            add_requests(engine, batch_size, steps, temperature=0.0)
        seconds: list[list[float]] = [[] for _ in decoders]
        begin = time.perf_counter()
        for step in range(steps):
            for own, engine in zip(seconds, engines, strict=True):
                start = time.perf_counter()
                engine.step()
                own.append(time.perf_counter() - start)
            if step + 1 >= _MIN_STEPS and time.perf_counter() - begin > _MAX_SECONDS:
                break
        for speed, own in zip(speeds, seconds, strict=True):
            speed[batch_size] = batch_size / median(own)
    return speeds


def add_requests(
    engine: Engine,
    number: int,
    steps: int,
    adapters: Sequence[str] = ("",),
    prompt_len: int = DECODE_PROMPT,
    **options: Any,
) -> None:
    """Add requests that run for at least `steps` steps, and run their prefill."""
    tokens_per_step = engine.config.max_num_batched_tokens
    num_prefills = -(-number * (prompt_len + 1) // tokens_per_step)
    vocab_size = engine.decoder.config.vocab_size
    for id in range(number):
        engine.add_request(
            Request(
                id=id,
                prompt=tuple((7 * at + id) % vocab_size for at in range(prompt_len)),
                max_tokens=steps + num_prefills - 1 + _EXTRA_TOKENS,
                adapter=adapters[id % len(adapters)],
                sampling_params=SamplingParams(seed=id, **options),
            )
        )
    while sum(bool(output.tokens) for output in engine.step()) < number:
        pass
    engine.step()  # page faults, graph captures
