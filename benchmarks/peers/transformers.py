"""Hugging Face transformers: `generate` in bfloat16.

Quantized weights are decompressed to bfloat16 in the first forward pass, by compressed-tensors, and
rounded to their grid again in each one.
"""

from __future__ import annotations

from pathlib import Path
from time import perf_counter

from peers.protocol import LoadedModel, Prompts, serve


def load(model: Path) -> LoadedModel:
    """Load as its documentation recommends. A streamer gets the prompt, then each token."""
    import torch
    import transformers

    class Clock(transformers.generation.BaseStreamer):
        def __init__(self) -> None:
            self.times: list[float] = []

        def put(self, value: object) -> None:
            self.times.append(perf_counter())

        def end(self) -> None:
            pass

    decoder = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()

    def generate(prompts: Prompts, output_len: int) -> tuple[float, list[list[int]]]:
        start, clock, ids = perf_counter(), Clock(), torch.tensor(prompts)
        with torch.inference_mode():
            all_ids = decoder.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=output_len,
                eos_token_id=None,
                pad_token_id=0,
                do_sample=False,
                streamer=clock,
            )
        return clock.times[1] - start, all_ids[:, ids.shape[1] :].tolist()

    return LoadedModel(transformers.__version__, "bf16", generate)


if __name__ == "__main__":
    serve(load)
