"""Writes a Llama of random weights, in bfloat16, with a tokenizer trained on Python's standard
library: a model for speed comparisons that needs no download.

    python benchmarks/random_llama.py llama-100m            # 100 million weights
    python benchmarks/random_llama.py llama-1.1b 1.1b       # the dimensions of TinyLlama
    ingot bench compare llama-100m --batch-size 8 --input-len 128
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch

from ingot.data import Source
from ingot.data.tokenizer import DocumentTokenizer
from ingot.interop import hf
from ingot.nn import Decoder, preset

_100M = preset("llama-100m")
_DIMENSIONS = {"dim": 2048, "layers": 22, "heads": 32, "kv_heads": 4, "ffn_dim": 5632}
SIZES = {"100m": _100M, "1.1b": replace(_100M, **_DIMENSIONS)}


def main(directory: Path, size: str = "100m") -> None:
    """Write the directory, which must not hold weights yet."""
    config = SIZES[size]
    hf.save(Decoder.from_config(config, seed=0, dtype=torch.bfloat16), directory)
    DocumentTokenizer.train(Source("stdlib").documents(), config.vocab_size).save(directory)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
