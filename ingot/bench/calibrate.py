"""What the engine's steps cost, measured: a cost model for `ingot simulate`.

    seconds = a + b * tokens + c * keys + d * pairs        (see `CostModel`)

fitted by least squares to the steps of a load that has all kinds of them: prompts alone, answers of
one and of many, both together. Each step counts by its time relative to what was predicted, so that
short and long ones weigh the same; the slowest tenth, which is other programs, is left out.
"""

# pyright: basic
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from ingot.bench.serve import Load, run_on_engine
from ingot.nn import Decoder
from ingot.serving.engine.engine import Engine
from ingot.serving.engine.scheduler import SchedulerConfig, SchedulerOutput
from ingot.serving.simulate import CostModel, RequestWorkload, count_work

# Clients at once, and the tokens of their prompts.
_KINDS = ((1, 64), (2, 256), (4, 32), (8, 256), (16, 64), (32, 128))
_PREFIX = 32
NUM_REQUESTS = sum(2 * clients for clients, _ in _KINDS)


def _loads(context: int) -> list[Load]:
    longest = (context - _PREFIX) // 2
    return [
        Load(
            workload=RequestWorkload(
                num_requests=2 * clients,
                input_len=min(prompt, longest),
                output_len=min(24, longest),
                length_sigma=0.6,
                max_len=longest,
                shared_prefix_ratio=0.2,
                prefix_len=_PREFIX,
                seed=clients,
            ),
            clients=clients,
        )
        for clients, prompt in _KINDS
    ]


def fit_costs(
    decoder: Decoder, config: SchedulerConfig, costs: CostModel, advance: Callable[[int], object]
) -> CostModel:
    """The costs of a model with what its steps take here; `advance` hears of each request."""
    steps: list[tuple[float, ...]] = []

    def record(output: SchedulerOutput, seconds: float) -> None:
        steps.append((*count_work(output.scheduled), seconds))

    engine = Engine(decoder, scheduler_config=config, on_step=record)
    loads = _loads(decoder.config.max_seq_len)
    run_on_engine(engine, loads[-1])  # first touches, recordings
    steps.clear()
    for load in loads:
        run_on_engine(engine, load, advance)
    return solve_costs(steps, costs)


def solve_costs(steps: Sequence[tuple[float, ...]], costs: CostModel) -> CostModel:
    """The costs that fit these steps of (tokens, keys, pairs, seconds) best.

    >>> true = CostModel(bandwidth=2e10, peak_flops=1e12, overhead_s=0.0)
    >>> steps = [(t, k, p, exact.step_seconds(t, k, p)) for t, k, p in
    ...          ((1, 9, 0), (8, 999, 0), (64, 64, 2e3), (500, 900, 1e5), (32, 4e4, 0))]
    >>> found = solve_costs(steps, CostModel())
    >>> round(found.bandwidth / 1e9, 3), round(found.peak_flops / 1e12, 3)
    (20.0, 1.0)
    """
    table = np.array(steps)
    features, seconds = np.c_[np.ones(len(table)), table[:, :3]], table[:, 3]
    kept = np.ones(len(table), bool)
    for _ in range(4):
        weights = 1 / seconds[kept]
        found = _non_negative(features[kept] * weights[:, None], np.ones(kept.sum()))
        excess = seconds / (features @ found)
        kept = excess <= np.quantile(excess, 0.9)
    fixed, token, key, pair = (max(float(value), 1e-15) for value in found)
    bandwidth, peak = costs.weight_bytes / fixed, costs.flops_per_token / token
    return dataclasses.replace(
        costs,
        bandwidth=bandwidth,
        peak_flops=peak,
        kv_bytes_per_token=key * bandwidth,
        attention_flops=pair * peak,
        overhead_s=0.0,
    )


def _non_negative(matrix: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Least squares of columns that may only add: what would come out negative is left out."""
    scale = np.linalg.norm(matrix, axis=0) + 1e-30
    used = list(range(matrix.shape[1]))
    while True:
        found, *_ = np.linalg.lstsq(matrix[:, used] / scale[used], wanted, rcond=None)
        if (found >= 0).all():
            full = np.zeros(matrix.shape[1])
            full[used] = found / scale[used]
            return full
        used.pop(int(found.argmin()))
