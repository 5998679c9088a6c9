"""Compare `torch.compile(backend="ingot")` with eager PyTorch and Inductor on transformers' models.

    python benchmarks/optimize.py gpt2 llama bert vit --threads 1 --dtype bfloat16 --mode inference

The models have random weights, the widths of their published small versions and fewer layers, since
all layers cost the same. Systems are timed one call each in turn, so that a change of the machine
affects all; with one thread, times are CPU times. A row has the median time of each system, the
median over the rounds of the ratio of its time to ingot's, and the shares of the FLOPs and bytes of
the forward pass in ingot's kernels.

With `--processes`, each system compiles in a process of its own, first with empty caches (cold),
then again (warm). A row has the time of the first call and the peak memory of later ones, ratios
are ingot's over Inductor's. In inference, `package` is the same for an AOTInductor package of the
rewritten model (docs/optimize.md#export): exported and loaded the first time, then only loaded.
"""

# pyright: basic
from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ingot.fuse import cost
from ingot.fuse.backend import Optimized, compile_graph
from ingot.fuse.export import export
from ingot.fuse.report import recent

Step = Callable[[], object]
SIZES = {
    "tiny": {"dim": 64, "ffn": 128, "layers": 2, "heads": 4, "vocab": 512},
    "small": {"dim": 768, "ffn": 3072, "layers": 4, "heads": 12, "vocab": 32000},
}
NAMES = ("gpt2", "llama", "qwen2", "bert", "vit", "t5", "whisper", "resnet")
SYSTEMS = ("eager", "inductor", "ingot", "always")
SPECIAL: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0}


def build(name: str, size: str) -> Any:
    """Return a model of transformers with random weights and without dropout."""
    import transformers as hf

    s = SIZES[size]
    dim, ffn, layers, heads, vocab = (s[k] for k in ("dim", "ffn", "layers", "heads", "vocab"))
    common: dict[str, Any] = {"hidden_size": dim, "intermediate_size": ffn}
    common |= {"num_hidden_layers": layers, "num_attention_heads": heads}
    text: dict[str, Any] = {"vocab_size": vocab, **common}
    gqa: dict[str, Any] = {"num_key_value_heads": heads // 4, "use_cache": False, **SPECIAL}
    match name:
        case "gpt2":
            widths: dict[str, Any] = {"n_embd": dim, "n_layer": layers, "n_head": heads}
            drop = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
            config: Any = hf.GPT2Config(
                vocab_size=vocab, use_cache=False, **widths, **drop, **SPECIAL
            )
            model = hf.GPT2LMHeadModel(config)
            model.loss_type = "ForCausalLM"  # without it, a warning breaks the graph
            return model
        case "llama":
            return hf.LlamaForCausalLM(hf.LlamaConfig(**text, **gqa))
        case "qwen2":
            return hf.Qwen2ForCausalLM(hf.Qwen2Config(**text, **gqa))
        case "bert":
            drop = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
            return hf.BertModel(hf.BertConfig(**text, **drop))
        case "vit":
            return hf.ViTModel(hf.ViTConfig(**common))
        case "t5":
            widths = {"d_model": dim, "d_kv": dim // heads, "d_ff": ffn, "num_heads": heads}
            config = hf.T5Config(vocab_size=vocab, num_layers=layers, **widths)
            config.update({"dropout_rate": 0.0, "use_cache": False, "decoder_start_token_id": 0})
            return hf.T5ForConditionalGeneration(config)
        case "whisper":
            return hf.WhisperForConditionalGeneration(whisper_config(size))
        case _:
            narrow: dict[str, Any] = {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1]}
            return hf.ResNetForImageClassification(
                hf.ResNetConfig(**(narrow | {"embedding_size": 8} if size == "tiny" else {}))
            )


def whisper_config(size: str) -> Any:
    """Return the sizes of Whisper-tiny, or of one that is smaller still."""
    import transformers as hf

    dim, heads, layers = (384, 6, 4) if size == "small" else (64, 4, 2)
    sides = {
        f"{side}_{key}": value
        for side in ("encoder", "decoder")
        for key, value in (("layers", layers), ("attention_heads", heads), ("ffn_dim", 4 * dim))
    }
    return hf.WhisperConfig(d_model=dim, dropout=0.0, use_cache=False, **sides)


def make_inputs(name: str, model: Any, batch: int, length: int, training: bool) -> dict[str, Any]:
    """Return random inputs, with labels if the model has a loss."""
    if name in ("vit", "resnet"):
        return {"pixel_values": torch.randn(batch, 3, 224, 224, dtype=model.dtype)}
    tokens = torch.randint(0, min(model.config.vocab_size, 32000), (batch, length))
    labels = {"labels": tokens} if training else {}
    match name:
        case "t5":
            return {"input_ids": tokens, **(labels or {"decoder_input_ids": tokens})}
        case "whisper":
            features = torch.randn(batch, 80, 3000, dtype=model.dtype)
            return {"input_features": features, **(labels or {"decoder_input_ids": tokens})}
        case "bert":
            return {"input_ids": tokens}
        case _:
            return {"input_ids": tokens, **labels}


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
        "always": (torch.compile(model, backend=partial(compile_graph, always=True)), none),
    }
    if freeze and not training:
        frozen = config.patch(freezing=True, max_autotune=True)
        found["frozen"] = (torch.compile(model, options={"freezing": True}), frozen)
        found["ingot"] = (Optimized(model, freeze=True), none)
    return found


def measure(steps: dict[str, Step], rounds: int) -> dict[str, list[float]]:
    """Time the steps one after the other, `rounds` times."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    now = cost.clock()
    for _ in range(rounds):
        for name, step in steps.items():
            start = now()
            step()
            seconds[name].append(now() - start)
    return seconds


def prepare(name: str, args: argparse.Namespace, batch: int) -> tuple[Any, dict[str, Any]]:
    """Return a model and its inputs."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    training = args.mode == "training"
    model = build(name, args.size).to(getattr(torch, args.dtype))
    model.train(training and name != "whisper")  # which would break the graph to drop a layer
    return model, make_inputs(name, model, batch, args.length, training)


def run(name: str, args: argparse.Namespace, batch: int) -> dict[str, float]:
    """Measure one model; print its row and return the ratios."""
    model, inputs = prepare(name, args, batch)
    training = args.mode == "training"
    steps: dict[str, Step] = {}
    share = 0.0, 0.0
    for system, (call, context) in systems(model, training, args.freeze).items():
        if system not in args.systems:
            continue
        steps[system] = make_step(call, model, inputs, training)
        with context:
            steps[system]()
            steps[system]()
        if system == "ingot":
            share = recent()[-1].shares
    times = measure(steps, args.rounds)
    ratios = {
        system: median(a / b for a, b in zip(values, times["ingot"], strict=True))
        for system, values in times.items()
    }
    if {"inductor", "always"} <= times.keys():  # no rewrite at all, and all of them
        pairs = zip(times["inductor"], times["always"], times["ingot"], strict=True)
        ratios["best"] = median(min(a, b) / c for a, b, c in pairs)
    row = [f"{name:7}", f"{batch:3}"]
    row += [f"{system} {median(values) * 1e3:8.2f} ms" for system, values in times.items()]
    row += [f"{system}/ingot {ratio:5.2f}" for system, ratio in ratios.items() if system != "ingot"]
    row += [f"in ingot {share[0]:4.0%} of FLOPs {share[1]:4.0%} of bytes"]
    print("  ".join(row), flush=True)  # noqa: T201
    return ratios


def run_in_processes(name: str, args: argparse.Namespace, batch: int) -> dict[str, float]:
    """Compile a model in processes of its own, with empty caches and again; print its row."""
    row, found = [f"{name:7}", f"{batch:3}"], dict[str, dict[str, float]]()
    exported = ("package",) if args.mode == "inference" else ()
    for system in ("inductor", "ingot", *exported):
        with tempfile.TemporaryDirectory() as cache:
            environ = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache}
            given = ["--child", system, "--batch", str(batch), "--length", str(args.length)]
            given += ["--size", args.size, "--dtype", args.dtype, "--mode", args.mode]
            command = [sys.executable, __file__, name, *given, "--threads", str(args.threads)]
            for state in ("cold", "warm"):
                out = subprocess.run(command, env=environ, check=True, stdout=subprocess.PIPE)
                found[f"{system} {state}"] = json.loads(out.stdout.splitlines()[-1])
        cold, warm = found[f"{system} cold"], found[f"{system} warm"]
        row += [f"{system} cold {cold['compile']:5.1f} s warm {warm['compile']:5.1f} s"]
        row += [f"peak {warm['running']:,.0f} MB ({cold['peak']:,.0f} MB compiling)"]
    print("  ".join(row), flush=True)  # noqa: T201
    theirs, ours = found["inductor cold"], found["ingot cold"]
    ratios = {
        "compile time": ours["compile"] / theirs["compile"],
        "warm over cold": found["ingot warm"]["compile"] / ours["compile"],
        "the same of inductor": found["inductor warm"]["compile"] / theirs["compile"],
        "peak memory": found["ingot warm"]["running"] / found["inductor warm"]["running"],
    }
    if exported:
        ratios["package over cold"] = found["package warm"]["compile"] / ours["compile"]
    return ratios


def compile_in_child(system: str, model: Any, inputs: dict[str, Any], training: bool) -> Any:
    """Return the model compiled by a system; `package` is exported if it is not in the cache."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    if system != "package":
        return systems(model, training, False)[system][0]
    path = Path(cache_dir()) / "package.pt2"
    if not path.exists():
        torch._inductor.aoti_compile_and_package(export(model, inputs), package_path=str(path))
    package = torch._inductor.aoti_load_package(str(path))
    return lambda **inputs: list(package(**inputs).values())


def run_child(name: str, args: argparse.Namespace) -> None:
    """Print the compile time of one system in seconds, and its peak memory in MB."""
    for kind in ("linear/torch/{}/contiguous", "attention/torch/{}/causal"):
        mode = "training" if args.mode == "training" else "forward"
        cost.rate(kind.format(f"{args.dtype}/{mode}"), 1)  # of the machine, not of the model
    model, inputs = prepare(name, args, args.batch[0])
    training = args.mode == "training"
    start = time.perf_counter()
    step = make_step(compile_in_child(args.child, model, inputs, training), model, inputs, training)
    step()
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    for _ in range(3):
        step()
    status = Path("/proc/self/status").read_text()
    running = int(status.partition("VmHWM:")[2].split()[0]) / 1024
    print(json.dumps({"compile": seconds, "peak": peak, "running": running}))  # noqa: T201


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
        "--systems",
        nargs="+",
        choices=SYSTEMS,
        default=["eager", "inductor", "ingot"],
        help="`always` makes every rewrite, whatever its predicted time; "
        "with it, the row has the better one of `inductor` and `always` as `best`",
    )
    parser.add_argument(
        "--freeze",
        action="store_true",
        help="also time max-autotune with freezing, and freeze ingot too",
    )
    parser.add_argument(
        "--processes", action="store_true", help="measure compile time and peak memory instead"
    )
    parser.add_argument("--child", choices=(*SYSTEMS, "package"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.child:
        run_child(args.models[0], args)
        return
    args.systems += ["frozen"] if args.freeze else []
    print(f"torch {torch.__version__}, {args}", flush=True)  # noqa: T201
    measure_model = run_in_processes if args.processes else run
    found = [measure_model(name, args, batch) for name in args.models for batch in args.batch]
    for key in found[0]:
        mean = math.exp(sum(math.log(ratios[key]) for ratios in found) / len(found))
        what = key if args.processes else f"{key}/ingot"
        print(f"{what}, geometric mean: {mean:.2f}")  # noqa: T201


if __name__ == "__main__":
    main()
