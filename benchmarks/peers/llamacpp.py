"""llama.cpp through llama-cpp-python: a GGUF in bfloat16 or in the format of a quantized model.

Its C functions are called, because they support batches and the Python class does not. A context is
created for the first batch of each size, with a separate KV cache for each sequence.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Any

from peers.protocol import LoadedModel, Prompts, serve
from peers.weights import bf16, type_name


def load(model: Path) -> LoadedModel:
    """Load with one thread per core; the default of the package is half of them."""
    import llama_cpp as lib

    lib.llama_backend_init()
    decoder = lib.llama_model_load_from_file(str(model).encode(), lib.llama_model_default_params())
    sampler = lib.llama_sampler_init_greedy()
    if not decoder:
        raise ValueError(f"llama.cpp cannot load {model}")

    @cache
    def context(sequences: int, prompt: int, output_len: int) -> tuple[Any, Any]:
        params = lib.llama_context_default_params()
        # It rounds the tokens of a sequence up to a multiple of 256.
        params.n_ctx = sequences * -(-(prompt + output_len) // 256) * 256
        params.n_batch = sequences * prompt
        params.n_seq_max, params.kv_unified = sequences, sequences == 1
        params.n_threads = params.n_threads_batch = len(os.sched_getaffinity(0))
        handle = lib.llama_init_from_model(decoder, params)
        if not handle:
            raise ValueError(f"not enough memory for {sequences} x {prompt + output_len} tokens")
        return handle, lib.llama_batch_init(sequences * prompt, 0, 1)

    def generate(prompts: Prompts, output_len: int) -> tuple[float, list[list[int]]]:
        start, length = perf_counter(), len(prompts[0])
        handle, batch = context(len(prompts), length, output_len)
        lib.llama_memory_clear(lib.llama_get_memory(handle), False)

        def step(inputs: Prompts, position: int) -> list[int]:
            last = _fill(batch, inputs, position)
            if status := lib.llama_decode(handle, batch):
                raise RuntimeError(f"llama_decode returned {status}")
            return [lib.llama_sampler_sample(sampler, handle, index) for index in last]

        return _generate(step, prompts, output_len, start)

    return LoadedModel(lib.__version__, type_name(model), generate)


def _generate(
    step: Callable[[Prompts, int], list[int]], prompts: Prompts, output_len: int, start: float
) -> tuple[float, list[list[int]]]:
    steps = [step(prompts, 0)]
    first = perf_counter() - start
    for position in range(len(prompts[0]), len(prompts[0]) + output_len - 1):
        steps.append(step([[token] for token in steps[-1]], position))
    return first, [list(tokens) for tokens in zip(*steps, strict=True)]


def _fill(batch: Any, inputs: Prompts, position: int) -> list[int]:
    """Put the tokens of all sequences into the batch; return the index of each one's last."""
    index = 0
    for sequence, tokens in enumerate(inputs):
        for offset, token in enumerate(tokens):
            batch.token[index], batch.pos[index] = token, position + offset
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
            batch.logits[index] = offset == len(tokens) - 1
            index += 1
    batch.n_tokens = index
    size = len(inputs[0])
    return list(range(size - 1, index, size))


if __name__ == "__main__":
    serve(load, prepare=bf16)
