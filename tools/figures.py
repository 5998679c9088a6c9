"""Draw the README's plots and write its table from the kept benchmark results.

    python -m tools.figures

reads `benchmarks/results/*.csv`, writes `docs/images/` and replaces what is between the markers in
README.md. A test fails when the README does not match the results.
"""

# pyright: basic
from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS, IMAGES, README = ROOT / "benchmarks/results", ROOT / "docs/images", ROOT / "README.md"
BEGIN, END = "<!-- figures: python -m tools.figures -->", "<!-- /figures -->"
MODEL, INPUT, OUTPUT = "smollm2", "128", "128"
NAMES = {
    "ingot": "ingot",
    "openvino": "OpenVINO GenAI",
    "llamacpp": "llama.cpp",
    "vllm": "vLLM",
    "transformers": "transformers",
    "compile": "torch.compile",
    "eager": "PyTorch eager",
    "trainer": "HF Trainer",
}
COLORS = {"ingot": "#1f5fa8"}
_OTHER = "#9ca3af"

ISA_NAMES = {"amx": "AMX", "avx512_vnni": "AVX-512"}

Row = dict[str, str]
Batches = dict[str, list[Row]]
"""The systems of a comparison, fastest first, by batch size."""


def generation() -> dict[str, Batches]:
    """Return the latest comparison at each batch size, for each instruction set."""
    latest: dict[str, Batches] = {}
    for row in _read("compare.csv"):
        if (row["model"], row["input_len"], row["output_len"]) != (MODEL, INPUT, OUTPUT):
            continue
        rows = latest.setdefault(row["isa"], {}).setdefault(row["batch_size"], [])
        if rows and rows[0]["date"] != row["date"]:
            rows.clear()
        if not row["error"]:
            rows.append(row)
    for batches in latest.values():
        for rows in batches.values():
            rows.sort(key=lambda row: -float(row["tokens_per_s"]))
    return {
        isa: dict(sorted(batches.items(), key=lambda item: int(item[0])))
        for isa, batches in sorted(latest.items())
    }


def training() -> list[Row]:
    """Return the bf16 systems of the latest training benchmark, fastest first."""
    rows = [row for row in _read("train.csv") if row["precision"] == "bf16" and not row["error"]]
    last = [row for row in rows if row["date"] == rows[-1]["date"]]
    plain = [r for r in last if r["recompute"] == "none" and r["state_dtype"] == "fp32"]
    return sorted(plain, key=lambda row: -float(row["tokens_per_s"]))


def block() -> str:
    """Render the README's block: tables for generation, one for training, and the plot."""
    trained = training()
    generated: list[str] = []
    for batches in generation().values():
        generated += [_heading(batches), _generation_table(batches)]
    steps = [
        (
            _bold(NAMES[row["system"]], row["system"]),
            _bold(f"{float(row['tokens_per_s']):,.0f}", row["system"]),
            _bold(f"{int(row['peak_memory_bytes']) / 1e9:.1f} GB", row["system"]),
        )
        for row in trained
    ]
    return "\n\n".join(
        (
            f"Generation with SmolLM2-135M in 16 bits, {INPUT} tokens in and {OUTPUT} out per\n"
            "request; in parentheses the fraction of the roofline (weights and KV cache read once\n"
            "per step).",
            *generated,
            f"A training step of GPT-2 124M, {trained[0]['batch_size']} x {trained[0]['seq_len']} "
            f"tokens, bf16, AdamW ({_origin(trained[0])}):",
            _markdown(("", "tokens/s", "peak memory"), steps),
            "![Tokens per second of each system by batch size](docs/images/generation.svg)",
            "Small models on virtual machines, medians of interleaved rounds. Reproduce with\n"
            "`ingot bench compare` and `ingot bench train`; [all results](docs/bench.md), also\n"
            "those where PyTorch is faster.",
        )
    )


def _heading(batches: Batches) -> str:
    row = next(iter(batches.values()))[0]
    return f"On a CPU with {_isa_name(row['isa'])} ({_origin(row)}):"


def _origin(row: Row) -> str:
    return f"{row['cpu']}, {row['date'][:10]}, torch {row['torch']}"


def _isa_name(isa: str) -> str:
    return ISA_NAMES.get(isa, isa)


def _generation_table(batches: Batches) -> str:
    systems = [row["system"] for row in next(iter(batches.values()))]
    cells = {(row["system"], batch): row for batch, rows in batches.items() for row in rows}
    lines = [
        (_bold(NAMES[s], s), *(_bold(_cell(cells.get((s, batch))), s) for batch in batches))
        for s in systems
    ]
    return _markdown(("tokens/s", *(f"batch {batch}" for batch in batches)), lines)


def draw(by_isa: dict[str, Batches], path: Path) -> None:
    """Draw tokens per second of each system, a row of panels for each instruction set."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    columns = max(len(batches) for batches in by_isa.values())
    with mpl.rc_context({"font.size": 9, "svg.hashsalt": "ingot"}):
        figure = Figure(figsize=(9, 2.4 * len(by_isa)), layout="constrained")
        grid = figure.subplots(len(by_isa), columns, squeeze=False)
        for axes, (isa, batches) in zip(grid, by_isa.items(), strict=True):
            for axis in axes[len(batches) :]:
                axis.remove()
            for axis, (batch, rows) in zip(axes, batches.items(), strict=False):
                _draw_panel(axis, rows)
                axis.set_title(f"batch {batch}, {_isa_name(isa)}", loc="left", fontsize=9)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None})


def _draw_panel(axis: Any, rows: list[Row]) -> None:
    names = [NAMES[row["system"]] for row in rows][::-1]
    values = [float(row["tokens_per_s"]) for row in rows][::-1]
    low = [v - float(row["p20"]) for v, row in zip(values, rows[::-1], strict=True)]
    high = [float(row["p80"]) - v for v, row in zip(values, rows[::-1], strict=True)]
    spread = [[max(0.0, v) for v in low], [max(0.0, v) for v in high]]
    colors = [COLORS.get(row["system"], _OTHER) for row in rows][::-1]
    axis.barh(names, values, xerr=spread, color=colors, ecolor="#4b5563", capsize=2)
    for index, value in enumerate(values):
        axis.text(value * 0.02, index, f"{value:,.0f}", va="center", color="white")
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_xlabel("tokens/s")


def updated(readme: str) -> str:
    """Return the README with the block between the markers replaced."""
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{block()}\n\n{END}{after}"


def main() -> int:
    """Write the plots and the README."""
    draw(generation(), IMAGES / "generation.svg")
    README.write_text(updated(README.read_text()))
    return 0


def _read(name: str) -> list[Row]:
    with (RESULTS / name).open(newline="") as file:
        return list(csv.DictReader(file))


def _cell(row: Row | None) -> str:
    if row is None:
        return "-"
    return f"{float(row['tokens_per_s']):,.0f} ({float(row['roofline_fraction']):.0%})"


def _bold(text: str, system: str) -> str:
    return f"**{text}**" if system == "ingot" and text else text


def _markdown(header: tuple[str, ...], lines: list[tuple[str, ...]]) -> str:
    rows = (header, ("---",) * len(header), *lines)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


if __name__ == "__main__":
    sys.exit(main())
