"""What `ingot kernels` shows: tables, and the page of the documentation made of them."""

# pyright: basic
from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from typing import Any

import triton

from ingot.core import paths
from ingot.core.device import detect
from ingot.kernels.triton import config_store
from ingot.kernels.triton.ceiling import ceiling, disassemble
from ingot.kernels.triton.codegen_checks import ALLOWED_SPILLS, violations
from ingot.kernels.triton.compiler import CompiledKernel, compile_launch, inspect_binary
from ingot.kernels.triton.interpreter import Interpreter, samples, streaming
from ingot.kernels.triton.launch import KernelConfig, Launch
from ingot.kernels.triton.provider import triton_ops
from ingot.kernels.triton.target import CHIPS, TARGETS
from ingot.kernels.triton.tutorial_kernels import tutorial_launches
from ingot.ops.op import tensors

Errors = dict[str, dict[str, Any]]


def fact_rows(facts: Sequence[CompiledKernel]) -> list[dict[str, Any]]:
    """A row for each compiled kernel, as a terminal shows it."""
    return [
        {
            "kernel": fact.name,
            "target": fact.target,
            "config": fact.config,
            "registers": fact.stats.registers,
            "spills": fact.stats.spills,
            "shared": fact.shared_bytes,
            "occupancy": f"{fact.occupancy:.0%}",
            "loads": _widths(fact.stats.loads),
            "stores": _widths(fact.stats.stores),
            "tensor cores": _tensor(fact),
            "copies": fact.stats.async_copies,
        }
        for fact in facts
    ]


def _widths(counts: dict[int, int]) -> str:
    return " ".join(f"{count}x{bits}" for bits, count in sorted(counts.items(), reverse=True))


def _tensor(fact: CompiledKernel) -> str:
    return " ".join(f"{count} {name}" for name, count in fact.stats.tensor_ops.items()) or "-"


def roofline_rows(names: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The least time that a chip's published peaks allow each representative call."""
    rows: list[dict[str, Any]] = []
    for name, one in triton_ops().items():
        if names and name not in names:
            continue
        num_bytes, flops = one.cost
        times = {
            chip.name: f"{chip.seconds(num_bytes, flops) * 1e6:.1f} us" for chip in CHIPS.values()
        }
        rows.append(
            {
                "op": name,
                "shape": _shape(one.example),
                "MB": f"{num_bytes / 1e6:.1f}",
                "GFLOP": f"{flops / 1e9:.1f}",
                "bound by": CHIPS["H100"].limit(num_bytes, flops),
                **times,
            }
        )
    return rows


def _shape(example: Callable[..., tuple[Any, ...]]) -> str:
    from ingot.kernels.triton.provider import ExampleInputs

    return "x".join(map(str, tensors(example(ExampleInputs()))[0].shape))


def ceiling_rows() -> list[dict[str, Any]]:
    """The main loops of products on sm_90, in their default configurations, and the plainest ones
    beside them."""
    target = TARGETS["sm_90"]
    wanted = tutorial_launches()
    for op in ("linear", "linear_swiglu", "attention"):
        launch = triton_ops()[op].launches("forward")[0]
        wanted[op] = launch, config_store.default_config(launch, target.name)
    return [_ceiling_row(name, *wanted[name]) for name in sorted(wanted, key=_beside)]


def _beside(name: str) -> tuple[bool, bool, str]:
    return "attention" in name, "tutorial" in name, name


def _ceiling_row(name: str, launch: Launch, config: KernelConfig) -> dict[str, Any]:
    target = TARGETS["sm_90"]
    binary = compile_launch(launch, config, target)
    fact = inspect_binary(name, launch, config, target, binary)
    tile = launch.constants | dict(config.constants)
    if "BLOCK_KV" in tile:
        needed = 2 * tile["BLOCK_M"] * tile["BLOCK_KV"] * tile["BLOCK_D"]
    else:
        needed = tile["BLOCK_M"] * tile["BLOCK_N"] * tile["BLOCK_K"] * tile.get("NUM_ACCS", 1)
    found = ceiling(disassemble(binary.asm["cubin"]), config.num_warps, needed)
    return {
        "kernel": name,
        "config": str(config),
        "products an iteration": found.products,
        "copies an iteration": found.async_copies,
        "stages": config.num_stages,
        "registers": fact.stats.registers,
        "spills": fact.stats.spills,
        "occupancy": f"{fact.occupancy:.0%}",
        "ceiling": f"{found.share:.0%} of peak",
    }


def numbers(names: Sequence[str] = (), done: Callable[[], object] = lambda: None) -> Errors:
    """Every sample of the records in the interpreter: the worst error of each op."""
    found: Errors = {}
    with Interpreter() as interpreter:
        for op, sample, dtype in samples():
            if names and op not in names:
                continue
            shares = interpreter.call("errors", op=op, sample=sample, dtype=dtype)
            one = found.setdefault(op, {"cases": 0, "forward": 0.0, "backward": None})
            one["cases"] += len(shares)
            one["forward"] = max(one["forward"], shares.pop("forward"))
            if shares:
                one["backward"] = max(one["backward"] or 0.0, *shares.values())
            done()
    return found


def number_rows(errors: Errors) -> list[dict[str, Any]]:
    """A row for each op."""
    return [
        {
            "op": op,
            "cases": one["cases"],
            "forward": f"{one['forward']:.2f}",
            "backward": "-" if one["backward"] is None else f"{one['backward']:.2f}",
        }
        for op, one in errors.items()
    ]


def traffic_rows() -> list[dict[str, Any]]:
    """Bytes that kernels load and store in the interpreter, beside those that the record counts."""
    with Interpreter() as interpreter:
        found = {op: interpreter.call("traffic", op=op) for op in streaming()}
    return [
        {
            "op": op,
            "moved": f"{one['moved']:,}",
            "counted": f"{one['counted']:,}",
            "ratio": f"{one['moved'] / one['counted']:.3f}",
        }
        for op, one in found.items()
    ]


def wrong(facts: Sequence[CompiledKernel]) -> list[str]:
    """All violations of all kernels."""
    return [fault for fact in facts for fault in violations(fact)]


def summary(facts: Sequence[CompiledKernel], seconds: float) -> str:
    """One line: how many, how long, how many violations."""
    kernels = len({fact.kernel for fact in facts})
    configs = len({(fact.kernel, fact.config) for fact in facts})
    targets = len({fact.target for fact in facts})
    spilled = sum(fact.stats.spills > 0 for fact in facts)
    return (
        f"{len(facts)} binaries of {kernels} kernels in {configs} configurations for {targets} "
        f"targets, in {seconds:.0f} s; {spilled} spill, {len(wrong(facts))} violations"
    )


def rank_configs(facts: Sequence[CompiledKernel]) -> dict[str, dict[str, list[str]]]:
    """Rank each kernel's configurations for each target, best first, from the compiled code.

    Configurations with a violation in any launch are left out. For GEMMs the score is the
    arithmetic intensity of the tile, with at most 128 columns, then occupancy. A single row uses
    the same tile as thousands, and launches one program per tile of columns: with 256, the 4096
    columns of a typical weight are 16 programs on a hundred SMs. For all other kernels the score is
    the number of load bits in flight per SM.
    """
    scores: dict[tuple[str, str], dict[str, float]] = {}
    for fact in facts:
        by_config = scores.setdefault((fact.kernel, fact.target), {})
        score = -inf if violations(fact) else _score(fact)
        by_config[fact.config] = min(score, by_config.get(fact.config, inf))
    ranking: dict[str, dict[str, list[str]]] = {}
    for (kernel, target), by_config in sorted(scores.items()):
        valid = [config for config in by_config if by_config[config] > -inf]
        best_first = sorted(valid, key=by_config.__getitem__, reverse=True)
        ranking.setdefault(kernel, {})[target] = best_first
    return ranking


def _score(fact: CompiledKernel) -> float:
    config = dict(pair.split("=") for pair in fact.config.split())
    if fact.bound_by == "tensor cores":
        block_m, block_n = int(config["BLOCK_M"]), int(config.get("BLOCK_N") or config["BLOCK_KV"])
        return min(block_m * block_n / (block_m + block_n), 64) + fact.occupancy
    in_flight = sum(bits * count for bits, count in fact.stats.loads.items())
    target = TARGETS[fact.target]
    resident = fact.occupancy * target.warps * target.warp_size
    return min(in_flight, 512) * resident


def write_defaults(facts: Sequence[CompiledKernel]) -> None:
    """Choose the default configurations from these facts."""
    lines = [
        f'  "{kernel}": {{\n'
        + ",\n".join(f'    "{target}": {json.dumps(of)}' for target, of in by_target.items())
        + "\n  }"
        for kernel, by_target in rank_configs(facts).items()
    ]
    paths.write_atomic(config_store.DEFAULTS, "{\n" + ",\n".join(lines) + "\n}\n")
    config_store.load_defaults.cache_clear()


def write_page(path: Path, facts: Sequence[CompiledKernel], seconds: float) -> None:
    """Put the tables of compiled code and of traffic into the page, between its marks."""
    _write(path, "summary", _facts_of_run(facts, seconds))
    _write(path, "kernels", _markdown(_page_rows(facts)))
    _write(path, "ceilings", _markdown(ceiling_rows()))
    _write(path, "roofline", _markdown(roofline_rows()))
    _write(path, "traffic", _markdown(traffic_rows()))


def write_numbers(path: Path, errors: Errors) -> None:
    """Put the table of errors into the page."""
    when = f"By `ingot kernels --numbers`, {datetime.date.today()}, Triton {triton.__version__}."
    _write(path, "numbers", f"{when}\n\n{_markdown(number_rows(errors))}")


def _write(path: Path, mark: str, content: str) -> None:
    begin, end = f"<!-- {mark} -->", f"<!-- end {mark} -->"
    before, _, rest = path.read_text().partition(begin)
    _, _, after = rest.partition(end)
    paths.write_atomic(path, f"{before}{begin}\n\n{content}\n\n{end}{after}")


def _facts_of_run(facts: Sequence[CompiledKernel], seconds: float) -> str:
    cpu = detect().cpu
    reasons = "".join(
        f"\n- {kernel} on {on}: {why}" for (kernel, on), why in ALLOWED_SPILLS.items()
    )
    return (
        f"{datetime.date.today()}, Triton {triton.__version__}, on {cpu.cores} cores, "
        f"{cpu.name}: {summary(facts, seconds)} (what was compiled before is not compiled again)."
        f"{reasons}"
    )


def _page_rows(facts: Sequence[CompiledKernel]) -> list[dict[str, Any]]:
    """A line for each kernel and target: the first launch that was compiled, in the configuration
    that dispatch takes."""
    first: dict[tuple[str, str], CompiledKernel] = {}
    for fact in facts:
        first.setdefault((fact.kernel, fact.target), fact)
    order = list(TARGETS)
    found = sorted(first.values(), key=lambda fact: (fact.kernel, order.index(fact.target)))
    return fact_rows(found)


def _markdown(rows: list[dict[str, Any]]) -> str:
    heads = list(rows[0])
    lines = [heads, ["---"] * len(heads), *([str(v) for v in row.values()] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
