"""Compare the times that the cost model of fusion predicts with measured ones.

    python -m benchmarks.fusion_cost gpt2 llama bert vit --batch 1 8 --dtype bfloat16

The models are those of `benchmarks/optimize.py`. Each distinct rewrite that matches is timed on
random inputs of its shapes: the calls that it replaces, compiled by Inductor, and the replacement.
A row has the predicted and the measured time of both. The time of a whole model is predicted as
the sum of its rewrites, each in the faster form, and of the bytes that the other calls move, three
times as many in training; it is compared with the model that the backend compiled. With one thread,
times are CPU times.
"""

# pyright: basic
from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, fx

from benchmarks.optimize import NAMES, SIZES, make_step, measure, prepare
from ingot.fuse import cost
from ingot.fuse.cost import Prediction
from ingot.fuse.graph import value_of
from ingot.fuse.passes import PASSES
from ingot.fuse.rewrite import Applied, is_call, live_nodes, run_passes
from ingot.fuse.work import hint, work_of


@dataclass(frozen=True, kw_only=True)
class Found:
    """The rewrites of a model that have a prediction, and the bytes of its other calls."""

    rewrites: list[tuple[Applied, Prediction]]
    other_bytes: int

    @property
    def seconds(self) -> float:
        """Predicted time of the model."""
        chosen = (p.after if p.pays else p.before for _, p in self.rewrites)
        return sum(chosen) + self.other_bytes / cost.BYTES_PER_SECOND


def find(model: Any, inputs: dict[str, Any], training: bool) -> Found:
    """Capture a model and predict each rewrite that matches."""
    predictions: dict[str, Prediction | None] = {}
    found: list[Found] = []

    def predict(rewrite: Any, match: Any) -> None:
        predictions[match["root"].name] = cost.predict(rewrite, match, training)

    def backend(module: fx.GraphModule, _: Any) -> Callable[..., Any]:
        graph = module.graph
        work = {n.name: work_of(n).bytes for n in live_nodes(graph) if is_call(n)}
        applied, _ = run_passes(graph, PASSES, predict)
        pairs = [(a, p) for a in applied if (p := predictions[a.replaced[-1]]) is not None]
        for rewrite, _ in pairs:
            for name in rewrite.replaced:
                work.pop(name, None)
        passes = 3 if training else 1  # a gradient is read, and one or two are written
        found.append(Found(rewrites=pairs, other_bytes=passes * sum(work.values())))
        return module.forward

    with torch.set_grad_enabled(training):
        torch.compile(model, backend=backend)(**inputs)
    return found[0]


def distinct(rewrites: Iterable[tuple[Applied, Prediction]]) -> list[tuple[Applied, Prediction]]:
    """Return one of all rewrites with equal calls and shapes."""
    known = {}
    for applied, predicted in rewrites:
        shapes = [str(getattr(value_of(node), "shape", None)) for node in applied.inputs]
        known[applied.before.code, applied.after.code, *shapes] = applied, predicted
    return list(known.values())


def time_rewrite(applied: Applied, training: bool) -> list[float]:
    """Return the seconds of what is replaced, compiled by Inductor, and of the replacement."""
    values = [_random(node) for node in applied.inputs]

    def runner(function: Callable[..., Any]) -> Callable[[], object]:
        leaves = [_leaf(value, training) for value in values]
        wanted = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]

        def run() -> None:
            with torch.set_grad_enabled(training):
                out = function(*leaves)[0]
                if training:
                    torch.autograd.grad(out, wanted, torch.ones_like(out))

        return run

    torch._dynamo.reset()
    return cost.shortest(
        [runner(torch.compile(applied.before, dynamic=False)), runner(applied.after)]
    )


def _random(node: fx.Node) -> Any:
    value = value_of(node)
    if not isinstance(value, Tensor):
        return hint(value)
    sizes, strides = ([hint(size) for size in sizes] for sizes in (value.shape, value.stride()))
    tensor = torch.empty_strided(sizes, strides, dtype=value.dtype)
    return tensor.normal_() if value.is_floating_point() else tensor.fill_(1)


def _leaf(value: Any, training: bool) -> Any:
    floating = isinstance(value, Tensor) and value.is_floating_point()
    return value.detach().requires_grad_(training) if floating else value


def compare(name: str, args: argparse.Namespace, batch: int) -> tuple[list[float], float]:
    """Print the rows of a model; return the errors of its ops, and its own."""
    training = args.mode == "training"
    model, inputs = prepare(name, args, batch)
    found = find(model, inputs, training)
    errors: list[float] = []
    for applied, predicted in distinct(found.rewrites):
        row = [f"{name:8} {batch:3}  {applied.rewrite.name:16} {applied.description:28}"]
        times = time_rewrite(applied, training)
        sides = ("inductor", predicted.before), ("ingot", predicted.after)
        for (side, seconds), measured in zip(sides, times, strict=True):
            errors.append(abs(seconds / measured - 1))
            row.append(f"{side} {_pair(seconds, measured)}")
        print("  ".join(row), flush=True)  # noqa: T201
    torch._dynamo.reset()
    step = make_step(torch.compile(model, backend="ingot"), model, inputs, training)
    step()
    step()
    measured = median(measure({"ingot": step}, args.rounds)["ingot"])
    print(f"{name:8} {batch:3}  {_pair(found.seconds, measured)}", flush=True)  # noqa: T201
    return errors, abs(found.seconds / measured - 1)


def _pair(predicted: float, measured: float) -> str:
    error = predicted / measured - 1
    return f"predicted {predicted * 1e3:8.2f} ms measured {measured * 1e3:8.2f} ms ({error:+.0%})"


def main() -> None:
    """Compare the models and print the median errors."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", choices=NAMES)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--mode", choices=("inference", "training"), default="inference")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"torch {torch.__version__}, {args}", flush=True)  # noqa: T201
    results = [compare(name, args, batch) for name in args.models for batch in args.batch]
    ops = [error for errors, _ in results for error in errors]
    models = [error for _, error in results]
    print(f"median error: {median(ops):.0%} per op ({len(ops)} times)")  # noqa: T201
    print(f"median error: {median(models):.0%} per model ({len(models)} models)")  # noqa: T201


if __name__ == "__main__":
    main()
