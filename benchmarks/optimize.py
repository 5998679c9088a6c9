"""Compare `torch.compile(backend="ingot")` with eager PyTorch and Inductor on transformers' models.

    python benchmarks/optimize.py gpt2 llama bert vit --threads 1 --dtype bfloat16 --mode inference

The models have random weights, the widths of their published small versions and fewer layers, since
all layers cost the same. Systems are timed one call each in turn, so that a change of the machine
affects all. A row has the median time of each system, and the median over the rounds of the ratio
of Inductor's time to ingot's.
"""

# pyright: basic
from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from typing import Any

import torch

from ingot.fuse.backend import Optimized

Step = Callable[[], object]
SIZES = {
    "tiny": {"dim": 64, "ffn": 128, "layers": 2, "heads": 4, "vocab": 512},
    "small": {"dim": 768, "ffn": 3072, "layers": 4, "heads": 12, "vocab": 32000},
}
NAMES = ("gpt2", "llama", "qwen2", "bert", "vit")


def build(name: str, size: str) -> torch.nn.Module:
    """Return a model of transformers with random weights."""
    import transformers as hf

    s = SIZES[size]
    dim, ffn, layers, heads, vocab = (s[k] for k in ("dim", "ffn", "layers", "heads", "vocab"))
    common: dict[str, Any] = {"hidden_size": dim, "intermediate_size": ffn}
    common |= {"num_hidden_layers": layers, "num_attention_heads": heads}
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    match name:
        case "gpt2":
            widths = {"n_embd": dim, "n_layer": layers, "n_head": heads}
            drop = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
            return hf.GPT2LMHeadModel(
                hf.GPT2Config(vocab_size=vocab, **widths, **drop, **tokens, use_cache=False)
            )
        case "llama" | "qwen2":
            kind = (hf.LlamaConfig, hf.LlamaForCausalLM)
            if name == "qwen2":
                kind = (hf.Qwen2Config, hf.Qwen2ForCausalLM)
            gqa = {"num_key_value_heads": heads // 4, "use_cache": False}
            return kind[1](kind[0](vocab_size=vocab, **common, **gqa, **tokens))
        case "bert":
            drop = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
            return hf.BertModel(hf.BertConfig(vocab_size=vocab, **common, **drop))
        case _:
            return hf.ViTModel(hf.ViTConfig(**common))


def make_inputs(name: str, model: Any, batch: int, length: int, training: bool) -> dict[str, Any]:
    """Return random inputs, with labels if the model has a loss."""
    if name == "vit":
        return {"pixel_values": torch.randn(batch, 3, 224, 224, dtype=model.dtype)}
    tokens = torch.randint(0, model.config.vocab_size, (batch, length))
    return {"input_ids": tokens} | ({"labels": tokens} if training and name != "bert" else {})


def make_step(call: Callable[..., Any], model: Any, inputs: dict[str, Any], training: bool) -> Step:
    """Return one forward pass, or one with its backward pass."""

    def inference() -> object:
        with torch.no_grad():
            return call(**inputs)[0]

    def training_step() -> object:
        out = call(**inputs)[0]
        out = out if out.dim() == 0 else out.float().square().mean()
        model.zero_grad()
        out.backward()
        return out

    return training_step if training else inference


def systems(model: Any, training: bool, freeze: bool) -> dict[str, tuple[Any, Any]]:
    """Return what is compared, each with the context to compile it in."""
    from torch._inductor import config

    none: AbstractContextManager[Any] = nullcontext()
    found: dict[str, tuple[Any, Any]] = {
        "eager": (model, none),
        "inductor": (torch.compile(model), none),
        "ingot": (torch.compile(model, backend="ingot"), none),
    }
    if freeze and not training:
        frozen = config.patch(freezing=True, max_autotune=True)
        found["frozen"] = (torch.compile(model, options={"freezing": True}), frozen)
        found["ingot"] = (Optimized(model, freeze=True), none)
    return found


def measure(steps: dict[str, Step], rounds: int) -> dict[str, list[float]]:
    """Time the steps one after the other, `rounds` times."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def run(name: str, args: argparse.Namespace, batch: int) -> dict[str, float]:
    """Measure one model; print its row and return the ratios."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    training = args.mode == "training"
    model = build(name, args.size).to(getattr(torch, args.dtype)).train(training)
    inputs = make_inputs(name, model, batch, args.length, training)
    steps: dict[str, Step] = {}
    compile_seconds: dict[str, float] = {}
    for system, (call, context) in systems(model, training, args.freeze).items():
        steps[system] = make_step(call, model, inputs, training)
        with context:
            start = time.perf_counter()
            steps[system]()
            compile_seconds[system] = time.perf_counter() - start
            steps[system]()
    times = measure(steps, args.rounds)
    p50 = {system: median(values) for system, values in times.items()}
    ratios = {
        system: median(a / b for a, b in zip(values, times["ingot"], strict=True))
        for system, values in times.items()
    }
    row = [f"{name:6}", f"{batch:3}"]
    row += [f"{system} {p50[system] * 1e3:8.2f} ms" for system in times]
    row += [f"{system}/ingot {ratio:5.2f}" for system, ratio in ratios.items() if system != "ingot"]
    row += [f"compile {compile_seconds['inductor']:.0f} s, {compile_seconds['ingot']:.0f} s"]
    print("  ".join(row), flush=True)  # noqa: T201
    return ratios


def main() -> None:
    """Measure the models and print the geometric means."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", choices=NAMES)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--mode", choices=("inference", "training"), default="inference")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument(
        "--freeze",
        action="store_true",
        help="also time max-autotune with freezing, and freeze ingot too",
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"torch {torch.__version__}, {args}", flush=True)  # noqa: T201
    found = [run(name, args, batch) for name in args.models for batch in args.batch]
    for system in found[0]:
        mean = math.exp(sum(math.log(ratios[system]) for ratios in found) / len(found))
        print(f"{system}/ingot, geometric mean: {mean:.2f}")  # noqa: T201


if __name__ == "__main__":
    main()
