"""Explain where a model spends its time, and what to do about it.

The model is captured by `torch.compile`, its calls are timed one by one, and those of a kind are
put together and compared with the roofline of the machine. Then it is optimized, and timed before
and after.
"""

# pyright: basic
from __future__ import annotations

import importlib.util
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ingot.core.errors import ConfigError, IngotError
from ingot.core.paths import write_atomic
from ingot.fuse.advice import Advice, advise
from ingot.fuse.backend import rewrite_graph
from ingot.fuse.profile import CallProfile, profile_graph
from ingot.fuse.report import GraphReport
from ingot.observe import page, plot

FIGURE = "roofline"
_CAUSAL = ("ForCausalLM", "LMHeadModel")
ROUNDS = 5
HEADINGS = ("calls", "count", "ms", "time", "GB/s", "GFLOPS", "of roofline", "bound", "pass")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What the machine can do: GB/s read from memory, and GFLOPS of a matmul by dtype."""

    bandwidth: float
    gflops: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class CallGroup:
    """Calls of one kind and dtype."""

    name: str
    count: int
    seconds: float
    share: float
    """Of the time of all calls."""
    bytes: int
    flops: int
    roofline: float
    """Speed as a fraction of the roofline's."""
    bound: str
    """Which roof limits it: `memory` or `compute`."""
    passes: str
    """The passes that replace some of the calls, "" for Inductor."""

    def row(self) -> tuple[str, ...]:
        """Return the cells of a table."""
        return (
            self.name,
            str(self.count),
            f"{self.seconds * 1e3:.2f}",
            f"{self.share:.1%}",
            f"{self.bytes / self.seconds / 1e9:.1f}",
            f"{self.flops / self.seconds / 1e9:.1f}",
            f"{self.roofline:.0%}",
            self.bound,
            self.passes or "-",
        )


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What `explain` found out about a model."""

    name: str
    groups: list[CallGroup]
    """The slowest first."""
    advice: list[Advice]
    """The largest saving first."""
    reports: list[GraphReport]
    machine: Machine
    eager_seconds: float
    optimized_seconds: float


def explain(
    model: Callable[..., Any], example_inputs: Sequence[Any], machine: Machine, name: str = "model"
) -> Explanation:
    """Profile a model on some inputs, without gradients, and optimize it.

    explain(model, (tokens,), Machine(bandwidth=40, gflops={"float32": 200}))
    """
    from torch._inductor.compile_fx import compile_fx

    calls: list[CallProfile] = []
    reports: list[GraphReport] = []

    def backend(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        calls.extend(profile_graph(module, inputs))
        report = rewrite_graph(module, inputs)
        reports.append(report)
        touched.update(report.touched)
        return compile_fx(module, list(inputs))

    touched: dict[str, str] = {}
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend)
    with torch.no_grad():
        compiled(*example_inputs)
        eager, optimized = _time([model, compiled], example_inputs)
    return Explanation(
        name=name,
        groups=_group(calls, touched, machine),
        advice=advise(calls),
        reports=reports,
        machine=machine,
        eager_seconds=eager,
        optimized_seconds=optimized,
    )


def _time(models: Sequence[Callable[..., Any]], inputs: Sequence[Any]) -> list[float]:
    """Return the shortest time of each model, called in turn."""
    seconds = [float("inf")] * len(models)
    for _ in range(ROUNDS):
        for i, model in enumerate(models):
            start = time.perf_counter()
            model(*inputs)
            seconds[i] = min(seconds[i], time.perf_counter() - start)
    return seconds


def _group(
    calls: Sequence[CallProfile], touched: Mapping[str, str], machine: Machine
) -> list[CallGroup]:
    kinds: dict[tuple[str, str], list[CallProfile]] = defaultdict(list)
    for call in calls:
        if call.bytes:  # not a view
            kinds[call.name, call.dtype].append(call)
    total = sum(call.seconds for call in calls)
    groups = [
        _summarize(name, dtype, own, touched, machine, total)
        for (name, dtype), own in kinds.items()
    ]
    return sorted(groups, key=lambda group: -group.seconds)


def _summarize(
    name: str,
    dtype: str,
    calls: Sequence[CallProfile],
    touched: Mapping[str, str],
    machine: Machine,
    total: float,
) -> CallGroup:
    seconds = sum(call.seconds for call in calls)
    num_bytes, flops = sum(c.bytes for c in calls), sum(c.flops for c in calls)
    peak = machine.gflops.get(dtype) or max(machine.gflops.values())
    memory, compute = num_bytes / machine.bandwidth / 1e9, flops / peak / 1e9
    return CallGroup(
        name=f"{name} {dtype}".strip(),
        count=len(calls),
        seconds=seconds,
        share=seconds / total,
        bytes=num_bytes,
        flops=flops,
        roofline=max(memory, compute) / seconds,
        bound="memory" if memory >= compute else "compute",
        passes=", ".join(sorted({touched[c.node] for c in calls if c.node in touched})),
    )


def load_target(target: str, batch: int, length: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a model and its inputs: of a directory of transformers, or from `file.py:function`.

    The function takes no arguments and returns the model and the tuple of its inputs.
    """
    file, _, function = target.rpartition(":")
    if file.endswith(".py"):
        return _from_function(Path(file), function)
    if not (Path(target) / "config.json").is_file():
        raise ConfigError(
            f"{target}: neither a model directory nor file.py:function",
            hint="pass a directory with config.json, or a function that returns (model, inputs)",
        )
    if importlib.util.find_spec("transformers") is None:
        raise IngotError("transformers is not installed", hint="pip install 'ingot[transformers]'")
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    config: Any = AutoConfig.from_pretrained(target)
    causal = any(str(name).endswith(_CAUSAL) for name in config.architectures or ())
    auto = AutoModelForCausalLM if causal else AutoModel
    model = auto.from_pretrained(target, dtype="auto").eval()
    if causal:
        model.config.use_cache = False
    return model, (torch.randint(0, config.vocab_size, (batch, length)),)


def _from_function(path: Path, name: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    if not path.is_file():
        raise ConfigError(f"{path} is not a file", hint="pass path/to/file.py:function")
    spec = importlib.util.spec_from_file_location(f"explained_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # Dynamo imports the modules of what it traces
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{path} has no function {name}", hint="name one of its functions")
    found = function()
    if not (isinstance(found, tuple) and len(found) == 2 and callable(found[0])):
        raise ConfigError(
            f"{name} returned {type(found).__name__}, not a model and its inputs",
            hint="return (model, (tokens,))",
        )
    model, inputs = found
    return model, inputs if isinstance(inputs, tuple) else (inputs,)


def write_page(explanation: Explanation, directory: Path) -> Path:
    """Write `report.html` and its roofline plot to a directory."""
    directory.mkdir(parents=True, exist_ok=True)
    e = explanation
    sections = [
        page.Section(
            heading="What to do",
            headings=("", "estimated saving"),
            rows=[(advice.text, f"{advice.saving:.0%}") for advice in e.advice],
            note="" if e.advice else "Nothing that would save 2 % of the time.",
        ),
        page.Section(
            heading="Where the time goes",
            headings=HEADINGS,
            rows=[group.row() for group in e.groups[:30]],
            numbers=True,
            note="Calls of the captured graph, timed one by one before they are fused.",
        ),
        page.figure(
            directory,
            FIGURE,
            lambda files: draw(explanation, files),
            alt="GFLOPS of each kind of call by FLOPs per byte, below the roofline of the machine",
            heading="Roofline",
        ),
        page.Section(heading="Rewrites", text="\n".join(str(report) for report in e.reports)),
    ]
    tiles = [
        ("eager", f"{e.eager_seconds * 1e3:.2f} ms"),
        ("optimized", f"{e.optimized_seconds * 1e3:.2f} ms"),
        ("speedup", f"{e.eager_seconds / e.optimized_seconds:.2f}x"),
    ]
    status = "time of one forward pass"
    text = page.render(e.name, status, sections, path=directory, seconds=time.time(), tiles=tiles)
    write_atomic(directory / page.NAME, text)
    return directory / page.NAME


def draw(explanation: Explanation, paths: Sequence[Path]) -> None:
    """Plot the groups of calls below the roofline; areas show their time."""
    with plot.styled():
        from matplotlib.figure import Figure

        machine = explanation.machine
        shown = [group for group in explanation.groups if group.flops and group.share > 0.002]
        figure = Figure(figsize=(9, 5), dpi=120, layout="constrained")
        axes: Any = figure.add_subplot(xscale="log", yscale="log")
        intensities = [group.flops / group.bytes for group in shown] or [1.0]
        left, right = min(0.1, *intensities) / 2, max(100.0, *intensities) * 4
        for dtype, peak in machine.gflops.items():
            ridge = peak / machine.bandwidth
            axes.plot((left, ridge, right), (left * machine.bandwidth, peak, peak), color=plot.INK)
            axes.annotate(
                f"{dtype} {peak:,.0f} GFLOPS",
                (right, peak),
                (0, 4),
                ha="right",
                textcoords="offset points",
                fontsize=8,
            )
        for group, x in zip(shown, intensities, strict=False):
            y = group.flops / group.seconds / 1e9
            axes.scatter(x, y, s=20 + 600 * group.share, color=plot.ACCENT, alpha=0.6)
            axes.annotate(
                f"{group.name} {group.share:.0%}",
                (x, y),
                (6, -10),
                textcoords="offset points",
                fontsize=8,
            )
        axes.set(xlabel="FLOP / byte", ylabel="GFLOPS")
        axes.grid(alpha=0.2)
        for path in paths:
            plot.save(figure, path)
