"""What the engine's steps cost, measured: a cost model for `ingot simulate`.

    seconds = a + b * tokens + c * keys + d * pairs        (see `Costs`)

fitted by least squares to the steps of a load that has all kinds of them: prompts alone, answers of
one and of many, both together. Each step counts by its time relative to what was predicted, so that
short and long ones weigh the same; the slowest tenth, which is other programs, is left out.
"""

# pyright: basic
from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

import numpy as np

from ingot.bench.serve import Load, run_on_engine
from ingot.nn import Decoder
from ingot.serving.engine.engine import Engine
from ingot.serving.engine.scheduler import Limits, Work
from ingot.serving.simulate import Costs, Trace, counted

# Clients at once, and the tokens of their prompts.
_KINDS = ((1, 64), (2, 256), (4, 32), (8, 256), (16, 64), (32, 128))
_PREFIX = 32
NUM_REQUESTS = sum(2 * clients for clients, _ in _KINDS)


def _loads(context: int) -> list[Load]:
    longest = (context - _PREFIX) // 2
    return [
        Load(
            trace=Trace(
                requests=2 * clients,
                prompt=min(prompt, longest),
                output=min(24, longest),
                spread=0.6,
                longest=longest,
                shared=0.2,
                prefix=_PREFIX,
                seed=clients,
            ),
            clients=clients,
        )
        for clients, prompt in _KINDS
    ]


def fit_costs(
    decoder: Decoder, limits: Limits, costs: Costs, advance: Callable[[int], object]
) -> Costs:
    """The costs of a model with what its steps take here; `advance` hears of each request."""
    engine = Engine(decoder, limits=limits)
    timed, loads = _Timed(engine), _loads(decoder.config.max_seq_len)
    run_on_engine(engine, loads[-1])  # first touches, recordings
    timed.steps.clear()
    for load in loads:
        run_on_engine(engine, load, advance)
    return solve_costs(timed.steps, costs)


class _Timed:
    """Notes each step of an engine: its tokens, keys and pairs, and its seconds."""

    def __init__(self, engine: Engine) -> None:
        self.steps: list[tuple[float, ...]] = []
        self._run, self._step = engine.runner.run, engine.step
        self._work: Sequence[Work] = ()
        engine.runner.run, engine.step = self._noting, self._timing

    def _noting(self, work: Sequence[Work]):
        self._work = work
        return self._run(work)

    def _timing(self):
        self._work, begin = (), time.perf_counter()
        outputs = self._step()
        if self._work:
            self.steps.append((*counted(self._work), time.perf_counter() - begin))
        return outputs


def solve_costs(steps: Sequence[tuple[float, ...]], costs: Costs) -> Costs:
    """The costs that fit these steps of (tokens, keys, pairs, seconds) best.

    >>> exact = Costs(bandwidth=2e10, peak=1e12, overhead=0.0)
    >>> steps = [(t, k, p, exact.seconds(t, k, p)) for t, k, p in
    ...          ((1, 9, 0), (8, 999, 0), (64, 64, 2e3), (500, 900, 1e5), (32, 4e4, 0))]
    >>> found = solve_costs(steps, Costs())
    >>> round(found.bandwidth / 1e9, 3), round(found.peak / 1e12, 3)
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
    bandwidth, peak = costs.weights / fixed, costs.flops / token
    return dataclasses.replace(
        costs,
        bandwidth=bandwidth,
        peak=peak,
        kv=key * bandwidth,
        attention=pair * peak,
        overhead=0.0,
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
