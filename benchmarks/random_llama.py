"""Writes a Llama of 100 million random weights, in bfloat16, with a tokenizer trained on Python's
standard library: a model for speed comparisons that needs no download.

    python benchmarks/random_llama.py llama-100m
    ingot bench compare llama-100m --batch-size 8 --input-len 128
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from ingot.data import Source
from ingot.data.tokenizer import DocumentTokenizer
from ingot.interop import hf
from ingot.nn import Decoder, preset


def main(directory: Path) -> None:
    """Write the directory, which must not hold weights yet."""
    config = preset("llama-100m")
    hf.save(Decoder.from_config(config, seed=0, dtype=torch.bfloat16), directory)
    DocumentTokenizer.train(Source("stdlib").documents(), config.vocab_size).save(directory)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
