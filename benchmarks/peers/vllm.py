"""vLLM on the CPU: `LLM.generate` in bfloat16, compiled as it is by default.

It reads the directory of a quantized model and has kernels for some formats.
"""

from __future__ import annotations

import os
from pathlib import Path

from peers.formats import read_format
from peers.protocol import LoadedModel, Prompts, serve


def load(model: Path) -> LoadedModel:
    """Load as its documentation recommends; its statistics, which have the TTFT, are enabled."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
    import vllm

    engine = vllm.LLM(
        str(model), dtype="bfloat16", max_model_len=2048, disable_log_stats=False, seed=0
    )

    def generate(prompts: Prompts, output_len: int) -> tuple[float, list[list[int]]]:
        options = vllm.SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        results = engine.generate(inputs, options, use_tqdm=False)
        first = max(result.metrics.first_token_latency for result in results)
        return first, [list(result.outputs[0].token_ids) for result in results]

    return LoadedModel(vllm.__version__, str(read_format(model) or "bf16"), generate)


if __name__ == "__main__":
    serve(load)
