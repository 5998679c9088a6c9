"""Autotuning on a GPU: time each kernel's configurations and store the fastest for dispatch.

    for task in tuning_tasks():
        result = tune(task, timer=time_on_gpu, device="cuda")

The launches of the ops' representative calls are tuned. Launches that dispatch cannot distinguish
(same kernel, constants, shape bucket and dtype) share one configuration, the one with the lowest
geometric mean of their times: prefill and decode, for example, must share theirs.

A configuration is only stored if it is accurate: the calls are repeated in it, on a few rows where
the op works on rows, and their errors must be within the tolerance of the op's record.

The timer is an argument, so that all of this also runs in Triton's interpreter.
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
"""Runs a function any number of times and returns the seconds of one run."""

CHECKED_ROWS = 64
"""Rows of the calls whose accuracy is checked."""


@dataclass(frozen=True)
class LaunchSite:
    """The origin of a launch: an op's representative calls, forward or backward."""

    op: str
    direction: str
    index: int
    """Index among the launches of all calls in that direction."""


@dataclass(frozen=True, eq=False)
class TuneTask:
    """Launches that share one configuration."""

    launch: Launch
    """One of them, on meta tensors."""
    dtype: torch.dtype
    sites: list[LaunchSite] = field(default_factory=list[LaunchSite])

    @property
    def name(self) -> str:
        """The name in tables."""
        first = self.sites[0]
        return f"{first.op}.{first.direction}.{self.launch.kernel.name}"


@dataclass(frozen=True, kw_only=True)
class TuneResult:
    """The outcome of a task; times are geometric means over its launches."""

    name: str
    config: KernelConfig | None
    """The fastest accurate configuration; None if there is none."""
    seconds: float
    previous: KernelConfig
    """The configuration that dispatch used before."""
    previous_seconds: float
    num_tried: int
    rejected: tuple[str, ...]
    """Configurations that failed to launch, or were faster but inaccurate, with the reason."""


def tuning_tasks(names: Sequence[str] = (), dtype: torch.dtype = torch.bfloat16) -> list[TuneTask]:
    """Return the tasks for these ops on this device; for all ops if none is named."""
    target, _ = config_store.current_target()
    tasks: dict[Any, TuneTask] = {}
    seen: set[Any] = set()
    for name, triton_op in triton_ops().items():
        if names and name not in names:
            continue
        for direction in ("forward", "backward"):
            for index, launch in enumerate(triton_op.launches(direction, dtype)):
                if len(launch.configs(target)) < 2 or _signature(launch) in seen:
                    continue
                seen.add(_signature(launch))
                key = config_store.dispatch_key(launch)
                task = tasks.setdefault(key, TuneTask(launch, dtype))
                task.sites.append(LaunchSite(name, direction, index))
    return list(tasks.values())


def tune(task: TuneTask, timer: Timer, device: str, rows: int | None = None) -> TuneResult:
    """Find the fastest accurate configuration of a task and store it.

    `rows` limits the size of the timed calls, for slow devices.
    """
    target, device_name = config_store.current_target()
    previous = config_store.choose_config(task.launch)
    seconds, rejected = _time_configs(task, timer, device, rows)
    winner = None
    for config in sorted(seconds, key=seconds.__getitem__):
        error = max(_error(site, task, config, device, rows) for site in task.sites)
        if error <= 1:
            winner = config
            config_store.save(task.launch, device_name, config, seconds[config] * 1e6)
            break
        rejected.append(f"{config}: error is {error:.2f} times the tolerance")
    return TuneResult(
        name=task.name,
        config=winner,
        seconds=seconds[winner] if winner else math.nan,
        previous=previous,
        previous_seconds=seconds.get(previous, math.nan),
        num_tried=len(task.launch.configs(target)),
        rejected=tuple(rejected),
    )


def _time_configs(
    task: TuneTask, timer: Timer, device: str, rows: int | None
) -> tuple[dict[KernelConfig, float], list[str]]:
    """Return the mean seconds of each configuration that launches, and the failures."""
    target, _ = config_store.current_target()
    times: dict[KernelConfig, list[float]] = {c: [] for c in task.launch.configs(target)}
    failures: list[str] = []
    for site in task.sites:
        calls = _calls(site, task.dtype, device, rows)
        launch = _run_and_record(calls, site, task.dtype)[site.index]
        for config in list(times):
            try:
                times[config].append(timer(partial(launch.run, config)))
            except TritonError as error:  # for example, too much shared memory for this device
                failures.append(f"{config}: {str(error).partition(chr(10))[0]}")
                del times[config]
    return {config: geometric_mean(values) for config, values in times.items()}, failures


def time_on_gpu(run: Callable[[], object]) -> float:
    """Return the median seconds of a launch with a cold L2 cache."""
    from triton.testing import do_bench

    milliseconds: Any = do_bench(run, return_mode="median")
    return milliseconds / 1e3


def _signature(launch: Launch) -> Any:
    """Return what a launch's time depends on: of equal launches, one is timed."""
    args = [(a.shape, a.dtype) if isinstance(a, torch.Tensor) else a for a in launch.args]
    return launch.kernel.name, repr(args), repr(sorted(launch.constants.items()))


def _calls(
    site: LaunchSite, dtype: torch.dtype, device: str, rows: int | None
) -> list[tuple[Any, ...]]:
    """Return the arguments of the calls, cut to their first rows where the op works on rows."""
    triton_op = triton_ops()[site.op]
    is_row_arg = [name in triton_op.op.row_args for name in triton_op.op.signature.parameters]
    return [
        tuple(a[:rows] if cut else a for a, cut in zip(args, is_row_arg, strict=True))
        for args in triton_op.calls(site.direction, ExampleInputs(dtype, device))
    ]


def _run_and_record(
    calls: list[tuple[Any, ...]], site: LaunchSite, dtype: torch.dtype
) -> list[Launch]:
    """Run the calls and return their launches."""
    triton_op = triton_ops()[site.op]
    with record_launches(execute=True) as launches:
        for args in calls:
            triton_op.run(site.direction, args, dtype)
    return launches


def _error(
    site: LaunchSite, task: TuneTask, config: KernelConfig, device: str, rows: int | None
) -> float:
    """Return the largest error of the calls, relative to the tolerance, in a configuration."""
    target, _ = config_store.current_target()
    op = triton_ops()[site.op].op
    calls = _calls(site, task.dtype, device, min(rows or CHECKED_ROWS, CHECKED_ROWS))
    launches = [
        launch
        for launch in _run_and_record(calls, site, task.dtype)
        if launch.kernel is task.launch.kernel and config in launch.configs(target)
    ]
    errors: list[float] = []
    with _override_config(config, launches):
        for args in calls:
            if site.direction == "forward":
                errors += forward_errors(op, "triton", args)
            else:
                errors += backward_errors(op, "triton", args).values()
    return max(errors) if launches else math.inf


@contextmanager
def _override_config(config: KernelConfig, launches: list[Launch]) -> Generator[None]:
    """Make dispatch use a configuration for launches with the keys of these."""
    keys = [config_store.dispatch_key(launch) for launch in launches]
    cache = config_store.config_cache
    saved = {key: cache[key] for key in keys if key in cache}
    cache.update(dict.fromkeys(keys, config))
    try:
        yield
    finally:
        for key in keys:
            cache.pop(key, None)
        cache.update(saved)
