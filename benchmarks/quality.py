"""How far are the quantized models of ingot and of llama.cpp from the original?

    python benchmarks/install_peers.py llamacpp
    python benchmarks/quality.py MODEL QUANTIZED ...

QUANTIZED are directories of `ingot compress MODEL`. llama.cpp's own quantizer, without an
importance matrix, writes MODEL in three of its types. Prints perplexity, the KL divergence to the
original in nats, and the fraction of tokens with the same most likely successor, over 4,096 tokens
of Python's standard library that `ingot compress` does not calibrate with.

Bits are those of a weight of the linear layers in the file. The files of llama.cpp are read with
weights in bfloat16, and activations are not rounded, as llama.cpp would; ours are computed as they
are served.
"""

# pyright: basic
from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from torch import Tensor

from ingot.bench.environment import Environment, peers_folder
from ingot.interop import gguf, gguf_file, hf
from ingot.interop.tokenizer import Tokenizer
from ingot.nn import Decoder
from ingot.workflows.compress import measure_bits_per_weight
from ingot.workflows.derive import hidden_states, measure_drift, perplexity, tokenize_text

_TYPES = ("Q4_0", "Q4_K_M", "Q5_K_M")
_POSITIONS, _SKIPPED = 4096, 64  # tokens; documents, of which `ingot compress` uses some
_QUANTIZE = """
import ctypes, sys
from pathlib import Path
import llama_cpp as lib
from peers.weights import bf16
model, directory = Path(sys.argv[1]), Path(sys.argv[2])
source = bf16(model, directory)
for name in sys.argv[3:]:
    params = lib.llama_model_quantize_default_params()
    params.ftype = getattr(lib, "LLAMA_FTYPE_MOSTLY_" + name)
    target = directory / (name + ".gguf")
    paths = str(source).encode(), str(target).encode()
    assert lib.llama_model_quantize(*paths, ctypes.byref(params)) == 0
"""


def main(model: Path, quantized: list[Path]) -> None:
    """Print the table."""
    original = hf.load(model)
    text = {"positions": _POSITIONS, "skip": _SKIPPED}
    sequences = tokenize_text("stdlib", Tokenizer.load(model), original, **text)
    original_TD = hidden_states(original, sequences)
    print(f"{'':24} bits  perplexity       KL   KL p99   top-1")  # noqa: T201

    def show(name: str, bits: float, decoder: Decoder, hidden_TD: Tensor) -> None:
        drift = measure_drift(original, original_TD, decoder, hidden_TD)
        text = f"{perplexity(decoder, hidden_TD, sequences):11.3f} {drift.kl_mean:8.2g}"
        text += f" {drift.kl_p99:8.2g}  {drift.argmax_agreement:6.1%}"
        print(f"{name:24} {bits:4.2f} {text}", flush=True)  # noqa: T201

    show("original", 16, original, original_TD)
    for path in quantized:
        decoder = hf.load(path)
        bits = measure_bits_per_weight(decoder, hf.describe(path).bytes)
        show(path.name, bits, decoder, hidden_states(decoder, sequences))
    with tempfile.TemporaryDirectory() as directory:
        for file in _quantize_by_llamacpp(model, Path(directory)):
            gguf.convert(file, file.with_suffix(""), keep_quantized=False)
            decoder = hf.load(file.with_suffix(""))
            hidden_TD = hidden_states(decoder, sequences)
            show(f"llama.cpp {file.stem}", _gguf_bits(file), decoder, hidden_TD)


def _quantize_by_llamacpp(model: Path, directory: Path) -> list[Path]:
    environment = Environment("llamacpp", peers_folder() / "llamacpp.txt")
    if reason := environment.unavailable_reason():
        sys.exit(f"llama.cpp: {reason}")
    command = [environment.python, "-c", _QUANTIZE, model.resolve(), directory, *_TYPES]
    subprocess.run(command, cwd=peers_folder().parent, check=True, capture_output=True)
    return [directory / f"{name}.gguf" for name in _TYPES]


def _gguf_bits(path: Path) -> float:
    tensors = gguf_file.read(path).tensors.values()
    linear = [t for t in tensors if t.name.startswith("blk.") and len(t.shape) == 2]
    weights = sum(t.shape[0] * t.shape[1] for t in linear)
    return 8 * sum(t.num_bytes for t in linear) / weights


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(argument) for argument in sys.argv[2:]])
