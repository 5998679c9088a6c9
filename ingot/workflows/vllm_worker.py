"""Computes the log-probabilities of a prompt with vLLM, in the environment that vLLM is in.

    VENV/bin/python vllm_worker.py MODEL DTYPE IDS.json OUT.npy VERSION.txt

A script of its own: it imports vLLM and nothing of ingot, which need not be installed there. It
writes float32 log-probabilities of the whole vocabulary, one row for each token but the first.
"""

# pyright: basic
from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main(model: str, dtype: str, ids_file: str, out_file: str, version_file: str) -> None:
    """Compute and write the matrix, then vLLM's version. vLLM itself writes to stdout."""
    import numpy as np
    import vllm  # pyright: ignore[reportMissingImports]

    ids = json.loads(Path(ids_file).read_text())
    engine = vllm.LLM(
        model, dtype=dtype, max_model_len=len(ids) + 1, max_logprobs=-1, seed=0, enforce_eager=True
    )
    params = vllm.SamplingParams(
        temperature=0, max_tokens=1, prompt_logprobs=-1, flat_logprobs=True, detokenize=False
    )
    (result,) = engine.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
    flat = result.prompt_logprobs
    vocab_size = engine.llm_engine.model_config.get_vocab_size()
    matrix = np.full((len(ids) - 1, vocab_size), np.nan, np.float32)
    for row in range(1, len(ids)):
        begin, end = flat.start_indices[row], flat.end_indices[row]
        matrix[row - 1, flat.token_ids[begin:end]] = flat.logprobs[begin:end]
    np.save(out_file, matrix)
    Path(version_file).write_text(vllm.__version__)
    engine.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # vLLM 0.32 aborts at times when the interpreter ends ("terminate called")
