"""What the backend did to a model: which rewrites, how large their error was, what was left."""

# pyright: basic
from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import fx

from ingot.fuse.rewrite import Applied, Skipped
from ingot.fuse.work import total
from ingot.ops import Cost

NO_WORK = Cost(bytes=0, flops=0)
MAX_RECENT = 64
"""Graphs of which a process keeps a report."""
_RECENT: deque[GraphReport] = deque(maxlen=MAX_RECENT)


@dataclass(frozen=True, kw_only=True)
class RewriteRow:
    """Equal rewrites of a graph."""

    name: str
    """The pass, which has the name of its op."""
    description: str
    """Dtype and shape of the result."""
    count: int
    error: float | None
    """The largest error, divided by its bound; None if it was not proved."""
    dropped: str | None
    """Why it was undone; None if it was kept."""


@dataclass(frozen=True, kw_only=True)
class GraphReport:
    """What was done to one graph."""

    rows: tuple[RewriteRow, ...]
    skipped: tuple[tuple[str, str, int], ...]
    """Pass, reason and number of the matches that were left as they were."""
    calls_left: int
    """Calls that Inductor compiles."""
    touched: dict[str, str] = field(default_factory=dict[str, str])
    """Call of the original graph -> pass that replaced it."""
    work: Cost = NO_WORK
    """FLOPs and bytes of the original graph, forward."""
    replaced: Cost = NO_WORK
    """Those of the calls that were replaced by ingot's ops."""

    @property
    def shares(self) -> tuple[float, float]:
        """Shares of the FLOPs and of the bytes of the graph that run in ingot's kernels.

        >>> GraphReport(
        ...     rows=(),
        ...     skipped=(),
        ...     calls_left=0,
        ...     work=Cost(flops=4, bytes=2),
        ...     replaced=Cost(flops=3, bytes=1),
        ... ).shares
        (0.75, 0.5)
        """
        ours, all_of_it = self.replaced, self.work
        return ours.flops / max(1, all_of_it.flops), ours.bytes / max(1, all_of_it.bytes)

    @property
    def kept(self) -> Counter[str]:
        """Number of rewrites that were kept, by pass."""
        counts: Counter[str] = Counter()
        for row in self.rows:
            counts[row.name] += row.count if row.dropped is None else 0
        return +counts

    @property
    def dropped(self) -> list[RewriteRow]:
        """The rewrites that failed their proof."""
        return [row for row in self.rows if row.dropped is not None]

    def __str__(self) -> str:
        flops, num_bytes = self.shares
        lines = [
            f"{flops:.0%} of FLOPs and {num_bytes:.0%} of bytes in ingot's kernels, "
            f"{self.calls_left} calls left to Inductor"
        ]
        for row in self.rows:
            outcome = f"error {row.error or 0:.2f} of the bound"
            if row.dropped is not None:
                outcome = f"dropped: {row.dropped}"
            lines.append(f"  {row.count:3} x {row.name:15} {row.description:28} {outcome}")
        lines += [f"  {count:3} x {name:15} left: {why}" for name, why, count in self.skipped]
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class FusionReport:
    """What was done to all graphs of a model, in the order of compilation."""

    graphs: list[GraphReport] = field(default_factory=list[GraphReport])

    def __str__(self) -> str:
        return "\n".join(f"graph {i}: {graph}" for i, graph in enumerate(self.graphs))


def summarize(
    applied: Iterable[Applied],
    skipped: Iterable[Skipped],
    graph: fx.Graph,
    work: Mapping[str, Cost],
) -> GraphReport:
    """Describe the rewrites of a graph without holding on to it.

    `work` is that of each call before the passes.
    """
    applied = list(applied)
    kept = [rewrite for rewrite in applied if rewrite.dropped is None]
    equal: dict[tuple[str, str, bool], list[Applied]] = defaultdict(list)
    for rewrite in applied:
        equal[rewrite.rewrite.name, rewrite.description, rewrite.dropped is None].append(rewrite)
    rows = tuple(
        RewriteRow(
            name=name,
            description=description,
            error=max((r.error for r in own if r.error is not None), default=None),
            dropped=own[0].dropped,
            count=len(own),
        )
        for (name, description, _), own in equal.items()
    )
    left = Counter((s.name, s.reason) for s in skipped)
    calls = (node for node in graph.nodes if node.op in ("call_function", "call_method"))
    ours = sum("ingot" in str(node.target) for node in graph.nodes)
    touched = {name: a.rewrite.name for a in kept for name in a.replaced}
    return GraphReport(
        rows=rows,
        skipped=tuple((name, why, count) for (name, why), count in left.items()),
        calls_left=sum(1 for _ in calls) - ours,
        touched=touched,
        work=total(work.values()),
        replaced=total(work[name] for name in touched if name in work),
    )


def record(report: GraphReport) -> None:
    """Add a graph to those that `recent` returns."""
    _RECENT.append(report)


def recent() -> list[GraphReport]:
    """Return the reports of the graphs that this process compiled last.

    >>> from ingot.fuse.report import recent
    >>> len(recent()) <= 64
    True
    """
    return list(_RECENT)
