"""ingot itself: the engine that `ingot serve` runs.

Like llama.cpp, it has a KV cache for the requests of one batch. By default it would have a part of
the machine's memory, and keep the keys and values of earlier batches as prefix cache.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from time import perf_counter

from peers.formats import read_format
from peers.protocol import LoadedModel, Prompts, serve


def load(model: Path) -> LoadedModel:
    """Load as the server does; generate without HTTP and without EOS."""
    import ingot
    from ingot.serving.engine.engine import Engine
    from ingot.serving.engine.request import Request
    from ingot.serving.engine.sampling_params import SamplingParams
    from ingot.serving.engine.scheduler import SchedulerConfig

    decoder = ingot.LLM(model).decoder
    dtype = str(read_format(model) or decoder.dtype).removeprefix("torch.")
    greedy = SamplingParams(temperature=0.0)

    @cache
    def engine_for(sequences: int, length: int) -> Engine:
        blocks = -(-length // SchedulerConfig(num_blocks=1).block_size)
        return Engine(decoder, scheduler_config=SchedulerConfig(num_blocks=sequences * blocks))

    def generate(prompts: Prompts, output_len: int) -> tuple[float, list[list[int]]]:
        start, first = perf_counter(), 0.0
        engine = engine_for(len(prompts), len(prompts[0]) + output_len)
        tokens: list[list[int]] = [[] for _ in prompts]
        for id, prompt in enumerate(prompts):
            engine.add_request(
                Request(id=id, prompt=tuple(prompt), max_tokens=output_len, sampling_params=greedy)
            )
        while engine.has_unfinished_requests:
            for output in engine.step():
                tokens[output.id] += output.tokens
            if not first and all(tokens):
                first = perf_counter() - start
        return first, tokens

    return LoadedModel(ingot.__version__, dtype, generate)


if __name__ == "__main__":
    serve(load)
