"""OpenVINO GenAI: `LLMPipeline` on a GGUF in float16, the only 16-bit type it reads there, or in
the format of a quantized model."""

from __future__ import annotations

from pathlib import Path

from peers.protocol import LoadedModel, Prompts, serve
from peers.weights import f16, type_name


def load(model: Path) -> LoadedModel:
    """Load as its documentation recommends; the TTFT is its own metric."""
    import numpy as np
    import openvino
    import openvino_genai

    pipeline = openvino_genai.LLMPipeline(str(model), "CPU")

    def generate(prompts: Prompts, output_len: int) -> tuple[float, list[list[int]]]:
        options = openvino_genai.GenerationConfig()
        options.max_new_tokens, options.ignore_eos, options.do_sample = output_len, True, False
        ids = np.array(prompts, dtype=np.int64)
        inputs = openvino_genai.TokenizedInputs(
            openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids))
        )
        result = pipeline.generate(inputs, options)
        return result.perf_metrics.get_ttft().mean / 1000, result.tokens

    return LoadedModel(openvino_genai.__version__, type_name(model), generate)


if __name__ == "__main__":
    serve(load, prepare=f16)
