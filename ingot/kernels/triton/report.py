"""Tables about compiled and interpreted kernels, and the ranking of default configurations."""

# pyright: basic
from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any

from ingot.kernels.triton import config_store
from ingot.kernels.triton.ceiling import ceiling
from ingot.kernels.triton.codegen_checks import violations
from ingot.kernels.triton.compiler import CompiledKernel, compile_launch, inspect_binary
from ingot.kernels.triton.disassembly import disassemble
from ingot.kernels.triton.interpreter import Interpreter, all_samples, bandwidth_bound_ops
from ingot.kernels.triton.launch import KernelConfig, Launch
from ingot.kernels.triton.provider import Example, ExampleInputs, triton_ops
from ingot.kernels.triton.target import CHIPS, TARGETS
from ingot.kernels.triton.tutorial_kernels import tutorial_launches
from ingot.ops.arguments import tensors

Accuracy = dict[str, dict[str, Any]]
"""By op: the number of compared tensors, and the largest forward and backward error."""


def kernel_rows(kernels: Sequence[CompiledKernel]) -> list[dict[str, Any]]:
    """Return a table row for each compiled kernel."""
    return [
        {
            "kernel": compiled.name,
            "target": compiled.target,
            "config": compiled.config,
            "registers": compiled.stats.registers,
            "spills": compiled.stats.spills,
            "shared": compiled.shared_bytes,
            "occupancy": f"{compiled.occupancy:.0%}",
            "loads": _format_widths(compiled.stats.loads),
            "stores": _format_widths(compiled.stats.stores),
            "tensor cores": _format_tensor_ops(compiled.stats.tensor_ops),
            "async copies": compiled.stats.async_copies,
        }
        for compiled in kernels
    ]


def _format_widths(counts: dict[int, int]) -> str:
    return " ".join(f"{count}x{bits}" for bits, count in sorted(counts.items(), reverse=True))


def _format_tensor_ops(counts: dict[str, int]) -> str:
    return " ".join(f"{count} {name}" for name, count in counts.items()) or "-"


def roofline_rows(names: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return the roofline time of each representative call, from the chips' published peaks."""
    rows: list[dict[str, Any]] = []
    for name, triton_op in triton_ops().items():
        if names and name not in names:
            continue
        num_bytes, flops = triton_op.cost
        times = {
            chip.name: f"{chip.seconds(num_bytes, flops) * 1e6:.1f} us" for chip in CHIPS.values()
        }
        rows.append(
            {
                "op": name,
                "shape": _first_shape(triton_op.example),
                "MB": f"{num_bytes / 1e6:.1f}",
                "GFLOP": f"{flops / 1e9:.1f}",
                "bound by": CHIPS["H100"].bound_by(num_bytes, flops),
                **times,
            }
        )
    return rows


def _first_shape(example: Example) -> str:
    return "x".join(map(str, tensors(example(ExampleInputs()))[0].shape))


def ceiling_rows() -> list[dict[str, Any]]:
    """Return the utilization bounds of GEMM main loops on sm_90, next to Triton's tutorials."""
    target = TARGETS["sm_90"]
    launches = tutorial_launches()
    for op in ("linear", "gated_linear", "attention"):
        launch = triton_ops()[op].launches("forward")[0]
        launches[op] = launch, config_store.default_config(launch, target.name)

    def order(name: str) -> tuple[bool, bool, str]:
        return "attention" in name, "tutorial" in name, name

    return [_ceiling_row(name, *launches[name]) for name in sorted(launches, key=order)]


def _ceiling_row(name: str, launch: Launch, config: KernelConfig) -> dict[str, Any]:
    target = TARGETS["sm_90"]
    binary = compile_launch(launch, config, target)
    compiled = inspect_binary(name, launch, config, target, binary)
    blocks = launch.constants | dict(config.constants)
    if "BLOCK_KV" in blocks:
        multiply_adds = 2 * blocks["BLOCK_M"] * blocks["BLOCK_KV"] * blocks["BLOCK_D"]
    else:
        multiply_adds = blocks["BLOCK_M"] * blocks["BLOCK_N"] * blocks["BLOCK_K"]
        multiply_adds *= blocks.get("NUM_ACCS", 1)
    bound = ceiling(disassemble(binary.asm["cubin"]), config.num_warps, multiply_adds)
    return {
        "kernel": name,
        "config": str(config),
        "MMA per iteration": bound.mma_instructions,
        "async copies per iteration": bound.async_copies,
        "registers": compiled.stats.registers,
        "spills": compiled.stats.spills,
        "occupancy": f"{compiled.occupancy:.0%}",
        "ceiling": f"{bound.fraction:.0%} of peak",
    }


def measure_accuracy(
    names: Sequence[str] = (), on_done: Callable[[], object] = lambda: None
) -> Accuracy:
    """Run every sample of the op records in the interpreter; return each op's largest errors."""
    accuracy: Accuracy = {}
    with Interpreter() as interpreter:
        for op, sample, dtype in all_samples():
            if names and op not in names:
                continue
            errors = interpreter.call("errors", op=op, sample=sample, dtype=dtype)
            entry = accuracy.setdefault(op, {"cases": 0, "forward": 0.0, "backward": None})
            entry["cases"] += len(errors)
            entry["forward"] = max(entry["forward"], errors.pop("forward"))
            if errors:
                entry["backward"] = max(entry["backward"] or 0.0, *errors.values())
            on_done()
    return accuracy


def accuracy_rows(accuracy: Accuracy) -> list[dict[str, Any]]:
    """Return a table row for each op."""
    return [
        {
            "op": op,
            "cases": entry["cases"],
            "forward": f"{entry['forward']:.2f}",
            "backward": "-" if entry["backward"] is None else f"{entry['backward']:.2f}",
        }
        for op, entry in accuracy.items()
    ]


def traffic_rows() -> list[dict[str, Any]]:
    """Return the bytes moved by bandwidth-bound ops in the interpreter vs. the op's cost."""
    with Interpreter() as interpreter:
        traffic = {op: interpreter.call("traffic", op=op) for op in bandwidth_bound_ops()}
    return [
        {
            "op": op,
            "bytes moved": f"{entry['moved']:,}",
            "cost in bytes": f"{entry['cost']:,}",
            "ratio": f"{entry['moved'] / entry['cost']:.3f}",
        }
        for op, entry in traffic.items()
    ]


def all_violations(kernels: Sequence[CompiledKernel]) -> list[str]:
    """Return the violated codegen checks of all kernels."""
    return [violation for compiled in kernels for violation in violations(compiled)]


def summary(kernels: Sequence[CompiledKernel], seconds: float) -> str:
    """Return one line with the number of binaries, the time and the number of violations."""
    num_kernels = len({compiled.kernel for compiled in kernels})
    num_configs = len({(compiled.kernel, compiled.config) for compiled in kernels})
    num_targets = len({compiled.target for compiled in kernels})
    num_spilling = sum(compiled.stats.spills > 0 for compiled in kernels)
    return (
        f"{len(kernels)} binaries of {num_kernels} kernels in {num_configs} configurations for "
        f"{num_targets} targets in {seconds:.0f} s: {num_spilling} with spills, "
        f"{len(all_violations(kernels))} violations"
    )


def rank_configs(kernels: Sequence[CompiledKernel]) -> dict[str, dict[str, list[str]]]:
    """Rank each kernel's configurations for each target, best first, from the compiled code.

    Configurations with a violation in any launch are left out. For GEMMs the score is the
    arithmetic intensity of the tile, with at most 128 columns, then occupancy. A single row uses
    the same tile as thousands of rows, and launches one program per tile of columns: with 256, the
    4096 columns of a typical weight are 16 programs on a hundred SMs. For all other kernels the
    score is the number of load bits in flight per SM.
    """
    scores: dict[tuple[str, str], dict[str, float]] = {}
    for compiled in kernels:
        by_config = scores.setdefault((compiled.kernel, compiled.target), {})
        score = -inf if violations(compiled) else _score(compiled)
        by_config[compiled.config] = min(score, by_config.get(compiled.config, inf))
    ranking: dict[str, dict[str, list[str]]] = {}
    for (kernel, target), by_config in sorted(scores.items()):
        valid = [config for config in by_config if by_config[config] > -inf]
        best_first = sorted(valid, key=by_config.__getitem__, reverse=True)
        ranking.setdefault(kernel, {})[target] = best_first
    return ranking


def _score(compiled: CompiledKernel) -> float:
    config = dict(pair.split("=") for pair in compiled.config.split())
    if compiled.bound_by == "tensor cores":
        block_m, block_n = int(config["BLOCK_M"]), int(config.get("BLOCK_N") or config["BLOCK_KV"])
        return min(block_m * block_n / (block_m + block_n), 64) + compiled.occupancy
    in_flight = sum(bits * count for bits, count in compiled.stats.loads.items())
    target = TARGETS[compiled.target]
    resident_threads = compiled.occupancy * target.max_warps * target.warp_size
    return min(in_flight, 512) * resident_threads
