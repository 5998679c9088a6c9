"""Times the configurations of kernels on a GPU, and keeps the fastest where dispatch finds it.

    for task in tasks():
        result = tune(task, timer=time_on_gpu)

What is tuned are the launches of representative calls. Launches that dispatch cannot tell apart
(the same kernel, constants, shape bucket and dtype) get one configuration together: that of the
least geometric mean of their times, since prefill and decode, for one, have to share theirs.

Nothing wins that computes something else. With the configuration that is to win, the calls are
made once more, of a few rows where an op is one of rows, and have to err less than their records
allow.

The timer is an argument, so that all of this runs in Triton's interpreter too.
"""

# pyright: basic
from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import geometric_mean
from typing import Any, TypeAlias

import torch
from triton.errors import TritonError

from ingot.kernels.triton import config_store
from ingot.kernels.triton.launch import KernelConfig, Launch, record_launches
from ingot.kernels.triton.provider import ExampleInputs, triton_ops
from ingot.ops.accuracy import backward_errors, forward_errors

Timer: TypeAlias = Callable[[Callable[[], object]], float]
"""Runs something as often as it likes, and says how many seconds once takes."""

ROWS = 64  # of a call whose numbers are looked at


@dataclass(frozen=True)
class LaunchSite:
    """Where a launch comes from: an op's representative calls, forward or backward."""

    op: str
    direction: str
    index: int
    """Among the launches of all of them."""


@dataclass(frozen=True, eq=False)
class TuneTask:
    """Launches that get one configuration."""

    launch: Launch
    """One of them, on tensors without memory."""
    dtype: torch.dtype
    sites: list[LaunchSite] = field(default_factory=list[LaunchSite])

    @property
    def name(self) -> str:
        """As a table shows it."""
        first = self.sites[0]
        return f"{first.op}.{first.direction}.{self.launch.kernel.name}"


@dataclass(frozen=True, kw_only=True)
class TuneResult:
    """What came of a task; times are geometric means over its launches."""

    name: str
    config: KernelConfig | None
    """The fastest that is right; None where there is none."""
    seconds: float
    before: KernelConfig
    """What dispatch took until now."""
    before_seconds: float
    tried: int
    wrong: tuple[str, ...]
    """Configurations that were faster and failed, or erred too much."""


def tasks(names: Sequence[str] = (), dtype: torch.dtype = torch.bfloat16) -> list[TuneTask]:
    """All there is to choose on this device for these ops, all if none is named."""
    target, _ = config_store.current_target()
    found: dict[Any, TuneTask] = {}
    seen: set[Any] = set()
    for name, one in triton_ops().items():
        if names and name not in names:
            continue
        for direction in ("forward", "backward"):
            for index, launch in enumerate(one.launches(direction, dtype)):
                if len(launch.configs(target)) < 2 or _signature(launch) in seen:
                    continue
                seen.add(_signature(launch))
                task = found.setdefault(config_store.dispatch_key(launch), TuneTask(launch, dtype))
                task.sites.append(LaunchSite(name, direction, index))
    return list(found.values())


def tune(task: TuneTask, timer: Timer, device: str, rows: int | None = None) -> TuneResult:
    """Find the fastest configuration that is right, and keep it.

    `rows` makes the calls shorter that are timed, for devices that are slow.
    """
    target, device_name = config_store.current_target()
    before = config_store.choose_config(task.launch)
    times: dict[KernelConfig, list[float]] = {c: [] for c in task.launch.configs(target)}
    wrong: list[str] = []
    for place in task.sites:
        calls = _calls(place, task.dtype, device, rows)
        launch = _launches(calls, place, task.dtype)[place.index]
        for config in list(times):
            try:
                times[config].append(timer(partial(launch.run, config)))
            except TritonError as error:  # too much of something for this device
                wrong.append(f"{config}: {str(error).partition(chr(10))[0]}")
                del times[config]
    means = {config: geometric_mean(of) for config, of in times.items()}
    winner = None
    for config in sorted(means, key=means.__getitem__):
        share = max(_error(place, task, config, device, rows) for place in task.sites)
        if share <= 1:
            winner = config
            config_store.save(task.launch, device_name, config, means[config] * 1e6)
            break
        wrong.append(f"{config}: {share:.2f} times the error that is allowed")
    return TuneResult(
        name=task.name,
        config=winner,
        seconds=means[winner] if winner else math.nan,
        before=before,
        before_seconds=means.get(before, math.nan),
        tried=len(task.launch.configs(target)),
        wrong=tuple(wrong),
    )


def time_on_gpu(run: Callable[[], object]) -> float:
    """Seconds of a launch, with nothing of its arguments in L2: the median of some."""
    from triton.testing import do_bench

    milliseconds: Any = do_bench(run, return_mode="median")
    return milliseconds / 1e3


def _signature(launch: Launch) -> Any:
    """What a launch takes its time from: of those that look the same, one is timed."""
    args = [(a.shape, a.dtype) if isinstance(a, torch.Tensor) else a for a in launch.args]
    return launch.kernel.name, repr(args), repr(sorted(launch.constants.items()))


def _calls(
    place: LaunchSite, dtype: torch.dtype, device: str, rows: int | None
) -> list[tuple[Any, ...]]:
    """The arguments of the calls, the first rows of them where the op is one of rows."""
    one = triton_ops()[place.op]
    by_row = [name in one.op.row_args for name in one.op.signature.parameters]
    return [
        tuple(a[:rows] if cut else a for a, cut in zip(args, by_row, strict=True))
        for args in one.calls(place.direction, ExampleInputs(dtype, device))
    ]


def _launches(calls: list[tuple[Any, ...]], place: LaunchSite, dtype: torch.dtype) -> list[Launch]:
    """Make the calls, and say what they launched."""
    one = triton_ops()[place.op]
    with record_launches(execute=True) as launches:
        for args in calls:
            one.run(place.direction, args, dtype)
    return launches


def _error(
    place: LaunchSite, task: TuneTask, config: KernelConfig, device: str, rows: int | None
) -> float:
    """The worst error of the calls as a share of what the record allows, where their launches of
    the task's kernel are made in a configuration."""
    target, _ = config_store.current_target()
    op = triton_ops()[place.op].op
    calls = _calls(place, task.dtype, device, min(rows or ROWS, ROWS))
    launches = [
        launch
        for launch in _launches(calls, place, task.dtype)
        if launch.kernel is task.launch.kernel and config in launch.configs(target)
    ]
    shares: list[float] = []
    with _taking(config, launches):
        for args in calls:
            if place.direction == "forward":
                shares += forward_errors(op, "triton", args)
            else:
                shares += backward_errors(op, "triton", args).values()
    return max(shares) if launches else math.inf


@contextmanager
def _taking(config: KernelConfig, launches: list[Launch]) -> Generator[None]:
    """Have dispatch give these launches, and those it cannot tell from them, a configuration."""
    keys = [config_store.dispatch_key(launch) for launch in launches]
    before = {
        key: config_store.config_cache[key] for key in keys if key in config_store.config_cache
    }
    config_store.config_cache.update(dict.fromkeys(keys, config))
    try:
        yield
    finally:
        for key in keys:
            config_store.config_cache.pop(key, None)
        config_store.config_cache.update(before)
