"""llama.cpp through llama-cpp-python: a GGUF in bfloat16.

Its C functions are called, for they know batches, which the Python class does not. The context is
made for the first batch of a size: it keeps keys and values of so many sequences, each apart.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Any

from peers.protocol import LoadedModel, Prompts, serve
from peers.weights import bf16


def load(model: Path) -> LoadedModel:
    """With a thread on every core; the package's default is half of them."""
    import llama_cpp as lib

    lib.llama_backend_init()
    decoder = lib.llama_model_load_from_file(str(model).encode(), lib.llama_model_default_params())
    sampler = lib.llama_sampler_init_greedy()
    if not decoder:
        raise ValueError(f"llama.cpp cannot load {model}")

    @cache
    def context(sequences: int, prompt: int, new: int) -> tuple[Any, Any]:
        params = lib.llama_context_default_params()
        # It rounds the tokens of a sequence up to a multiple of 256.
        params.n_ctx = sequences * -(-(prompt + new) // 256) * 256
        params.n_batch = sequences * prompt
        params.n_seq_max, params.kv_unified = sequences, sequences == 1
        params.n_threads = params.n_threads_batch = len(os.sched_getaffinity(0))
        made = lib.llama_init_from_model(decoder, params)
        if not made:
            raise ValueError(f"no memory for {sequences} x {prompt + new} tokens")
        return made, lib.llama_batch_init(sequences * prompt, 0, 1)

    def generate(prompts: Prompts, new: int) -> tuple[float, list[list[int]]]:
        start, length = perf_counter(), len(prompts[0])
        made, batch = context(len(prompts), length, new)
        lib.llama_memory_clear(lib.llama_get_memory(made), False)

        def step(inputs: Prompts, position: int) -> list[int]:
            last = _fill(batch, inputs, position)
            if status := lib.llama_decode(made, batch):
                raise RuntimeError(f"llama_decode returned {status}")
            return [lib.llama_sampler_sample(sampler, made, place) for place in last]

        return _generated(step, prompts, new, start)

    return LoadedModel(lib.__version__, "bf16", generate)


def _generated(
    step: Callable[[Prompts, int], list[int]], prompts: Prompts, new: int, start: float
) -> tuple[float, list[list[int]]]:
    steps = [step(prompts, 0)]
    first = perf_counter() - start
    for position in range(len(prompts[0]), len(prompts[0]) + new - 1):
        steps.append(step([[token] for token in steps[-1]], position))
    return first, [list(tokens) for tokens in zip(*steps, strict=True)]


def _fill(batch: Any, inputs: Prompts, position: int) -> list[int]:
    """Put the tokens of all sequences into the batch; the places of the last of each."""
    place = 0
    for sequence, tokens in enumerate(inputs):
        for offset, token in enumerate(tokens):
            batch.token[place], batch.pos[place] = token, position + offset
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, sequence
            batch.logits[place] = offset == len(tokens) - 1
            place += 1
    batch.n_tokens = place
    size = len(inputs[0])
    return list(range(size - 1, place, size))


if __name__ == "__main__":
    serve(load, prepare=bf16)
