"""Fits the cost model of `ingot simulate` to a model and to measured steps of the engine.

    seconds = a + b * tokens + c * keys + d * pairs        (see `CostModel`)

is fitted by least squares to the steps of a load that has all types of them: prefill alone, decode
of one and of many requests, and both together. Errors are relative to the time of a step, so that
short and long steps have the same weight; the slowest tenth, delayed by other programs, is ignored.
"""

# pyright: basic
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from ingot.bench.serve import Load, run_on_engine
from ingot.core.errors import IngotError
from ingot.interop import hf
from ingot.nn import Decoder
from ingot.serving.costs import CostModel, count_work
from ingot.serving.engine.engine import Engine
from ingot.serving.engine.scheduler import SchedulerConfig, SchedulerOutput
from ingot.serving.workload import RequestWorkload

# Concurrent clients, and the tokens of their prompts.
_LOADS = ((1, 64), (2, 256), (4, 32), (8, 256), (16, 64), (32, 128))
_PREFIX = 32
NUM_REQUESTS = sum(2 * clients for clients, _ in _LOADS)


def _loads(max_seq_len: int) -> list[Load]:
    max_len = (max_seq_len - _PREFIX) // 2
    return [
        Load(
            workload=RequestWorkload(
                num_requests=2 * clients,
                input_len=min(prompt, max_len),
                output_len=min(24, max_len),
                length_sigma=0.6,
                max_len=max_len,
                shared_prefix_ratio=0.2,
                prefix_len=_PREFIX,
                seed=clients,
            ),
            clients=clients,
        )
        for clients, prompt in _LOADS
    ]


def model_costs(directory: Path, costs: CostModel) -> CostModel:
    """Return the costs with the sizes and FLOPs of the model of a directory."""
    described = hf.describe(directory)
    config = described.config
    if config.moe:
        raise IngotError(
            f"{directory}: in a mixture of experts, the bytes a step reads depend on its tokens",
            hint="give --costs.weight-bytes and --costs.flops-per-token instead of --model",
        )
    return dataclasses.replace(
        costs,
        weight_bytes=float(described.bytes),
        flops_per_token=2.0 * described.parameters,
        kv_bytes_per_token=float(described.kv.bytes_per_token),
        attention_flops=4.0 * config.layers * config.heads * config.head_dim,
    )


def fit_costs(
    decoder: Decoder, config: SchedulerConfig, costs: CostModel, advance: Callable[[int], object]
) -> CostModel:
    """Fit the costs to steps of the engine here; `advance` is called when a request finishes."""
    steps: list[tuple[float, ...]] = []

    def record(output: SchedulerOutput, seconds: float) -> None:
        steps.append((*count_work(output.scheduled), seconds))

    engine = Engine(decoder, scheduler_config=config, on_step=record)
    loads = _loads(decoder.config.max_seq_len)
    run_on_engine(engine, loads[-1])  # warm-up: page faults, graph captures
    steps.clear()
    for load in loads:
        run_on_engine(engine, load, advance)
    return solve_costs(steps, costs)


def solve_costs(steps: Sequence[tuple[float, ...]], costs: CostModel) -> CostModel:
    """Return the costs that fit these steps of (tokens, keys, pairs, seconds) best.

    Before the seconds may be two more numbers: of sequences, and of those that are admitted.

    >>> true = CostModel(bandwidth=2e10, peak_flops=1e12, overhead_s=0.0)
    >>> steps = [(t, k, p, true.step_seconds(t, k, p)) for t, k, p in
    ...          ((1, 9, 0), (8, 999, 0), (64, 64, 2e3), (500, 900, 1e5), (32, 4e4, 0))]
    >>> costs = solve_costs(steps, CostModel())
    >>> round(costs.bandwidth / 1e9, 3), round(costs.peak_flops / 1e12, 3)
    (20.0, 1.0)
    """
    table = np.array(steps)
    features, seconds = np.c_[np.ones(len(table)), table[:, :-1]], table[:, -1]
    kept = np.ones(len(table), bool)
    for _ in range(4):
        weights = 1 / seconds[kept]
        coefficients = non_negative_lstsq(features[kept] * weights[:, None], np.ones(kept.sum()))
        excess = seconds / (features @ coefficients)
        kept = excess <= np.quantile(excess, 0.9)
    fixed, token, key, pair, *more = (max(float(value), 1e-15) for value in coefficients)
    sequence, admitted = more or (0.0, 0.0)
    bandwidth, peak = costs.weight_bytes / fixed, costs.flops_per_token / token
    return dataclasses.replace(
        costs,
        bandwidth=bandwidth,
        peak_flops=peak,
        kv_bytes_per_token=key * bandwidth,
        attention_flops=pair * peak,
        overhead_s=0.0,
        sequence_s=sequence,
        admission_s=admitted,
    )


def non_negative_lstsq(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Solve least squares; columns whose coefficient would be negative are left out."""
    scale = np.linalg.norm(matrix, axis=0) + 1e-30
    used = list(range(matrix.shape[1]))
    while True:
        solution, *_ = np.linalg.lstsq(matrix[:, used] / scale[used], target, rcond=None)
        if (solution >= 0).all():
            full = np.zeros(matrix.shape[1])
            full[used] = solution / scale[used]
            return full
        used.pop(int(solution.argmin()))
