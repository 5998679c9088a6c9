"""What `ingot kernels` shows: tables, and the page of the documentation made of them."""

# pyright: basic
from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import triton

from ingot.core import paths
from ingot.core.device import detect
from ingot.kernels.triton import tuned
from ingot.kernels.triton.ceiling import ceiling, disassemble
from ingot.kernels.triton.compiler import Fact, compile_launch, fact_of
from ingot.kernels.triton.gate import SPILLS, faults
from ingot.kernels.triton.interpreter import Interpreter, samples, streaming
from ingot.kernels.triton.kernel import Config, Launch
from ingot.kernels.triton.plain import plain
from ingot.kernels.triton.provider import provided
from ingot.kernels.triton.target import CHIPS, TARGETS
from ingot.ops.op import tensors

Errors = dict[str, dict[str, Any]]


def fact_rows(facts: Sequence[Fact]) -> list[dict[str, Any]]:
    """A row for each compiled kernel, as a terminal shows it."""
    return [
        {
            "kernel": fact.name,
            "target": fact.target,
            "config": fact.config,
            "registers": fact.code.registers,
            "spills": fact.code.spills,
            "shared": fact.shared_bytes,
            "occupancy": f"{fact.occupancy:.0%}",
            "loads": _widths(fact.code.loads),
            "stores": _widths(fact.code.stores),
            "tensor cores": _tensor(fact),
            "copies": fact.code.copies,
        }
        for fact in facts
    ]


def _widths(counts: dict[int, int]) -> str:
    return " ".join(f"{count}x{bits}" for bits, count in sorted(counts.items(), reverse=True))


def _tensor(fact: Fact) -> str:
    return " ".join(f"{count} {name}" for name, count in fact.code.tensor.items()) or "-"


def roofline_rows(names: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The least time that a chip's published peaks allow each representative call."""
    rows: list[dict[str, Any]] = []
    for name, one in provided().items():
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
    from ingot.kernels.triton.provider import Meta

    return "x".join(map(str, tensors(example(Meta()))[0].shape))


def ceiling_rows() -> list[dict[str, Any]]:
    """The main loops of products on sm_90, in their default configurations, and the plainest ones
    beside them."""
    target = TARGETS["sm_90"]
    wanted = plain()
    for op in ("linear", "linear_swiglu", "attention"):
        launch = provided()[op].launches("forward")[0]
        wanted[op] = launch, tuned.default(launch, target.name)
    return [_ceiling_row(name, *wanted[name]) for name in sorted(wanted, key=_beside)]


def _beside(name: str) -> tuple[bool, bool, str]:
    return "attention" in name, "tutorial" in name, name


def _ceiling_row(name: str, launch: Launch, config: Config) -> dict[str, Any]:
    target = TARGETS["sm_90"]
    binary = compile_launch(launch, config, target)
    fact = fact_of(name, launch, config, target, binary)
    tile = launch.constants | dict(config.constants)
    if "KEYS" in tile:
        needed = 2 * tile["ROWS"] * tile["KEYS"] * tile["WIDTH"]
    else:
        needed = tile["ROWS"] * tile["COLUMNS"] * tile["INNER"] * tile.get("PRODUCTS", 1)
    found = ceiling(disassemble(binary.asm["cubin"]), config.warps, needed)
    return {
        "kernel": name,
        "config": str(config),
        "products an iteration": found.products,
        "copies an iteration": found.copies,
        "stages": config.stages,
        "registers": fact.code.registers,
        "spills": fact.code.spills,
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


def wrong(facts: Sequence[Fact]) -> list[str]:
    """All faults of all kernels."""
    return [fault for fact in facts for fault in faults(fact)]


def summary(facts: Sequence[Fact], seconds: float) -> str:
    """One line: how many, how long, how many faults."""
    kernels = len({fact.kernel for fact in facts})
    configs = len({(fact.kernel, fact.config) for fact in facts})
    targets = len({fact.target for fact in facts})
    spilled = sum(fact.code.spills > 0 for fact in facts)
    return (
        f"{len(facts)} binaries of {kernels} kernels in {configs} configurations for {targets} "
        f"targets, in {seconds:.0f} s; {spilled} spill, {len(wrong(facts))} faults"
    )


def write_defaults(facts: Sequence[Fact]) -> None:
    """Choose the default configurations from these facts."""
    lines = [
        f'  "{kernel}": {{\n'
        + ",\n".join(f'    "{target}": {json.dumps(of)}' for target, of in by_target.items())
        + "\n  }"
        for kernel, by_target in tuned.ranked(facts).items()
    ]
    paths.write_atomic(tuned.DEFAULTS, "{\n" + ",\n".join(lines) + "\n}\n")
    tuned.defaults.cache_clear()


def write_page(path: Path, facts: Sequence[Fact], seconds: float) -> None:
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


def _facts_of_run(facts: Sequence[Fact], seconds: float) -> str:
    cpu = detect().cpu
    reasons = "".join(f"\n- {kernel} on {on}: {why}" for (kernel, on), why in SPILLS.items())
    return (
        f"{datetime.date.today()}, Triton {triton.__version__}, on {cpu.cores} cores, "
        f"{cpu.name}: {summary(facts, seconds)} (what was compiled before is not compiled again)."
        f"{reasons}"
    )


def _page_rows(facts: Sequence[Fact]) -> list[dict[str, Any]]:
    """A line for each kernel and target: the first launch that was compiled, in the configuration
    that dispatch takes."""
    first: dict[tuple[str, str], Fact] = {}
    for fact in facts:
        first.setdefault((fact.kernel, fact.target), fact)
    order = list(TARGETS)
    found = sorted(first.values(), key=lambda fact: (fact.kernel, order.index(fact.target)))
    return fact_rows(found)


def _markdown(rows: list[dict[str, Any]]) -> str:
    heads = list(rows[0])
    lines = [heads, ["---"] * len(heads), *([str(v) for v in row.values()] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
