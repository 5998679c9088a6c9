from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.bench.calibrate import fit_costs, solve_costs
from ingot.bench.serve import Load, run_on_engine, summarize
from ingot.nn import Decoder, preset
from ingot.serving.engine.engine import Engine
from ingot.serving.engine.scheduler import Limits
from ingot.serving.simulate import Costs, Goal, Trace, simulate


@given(
    st.floats(1e9, 1e12),
    st.floats(1e10, 1e14),
    st.floats(1e3, 1e6),
    st.floats(0.0, 1e6),
    st.integers(0, 2**32 - 1),
)
def test_solve_costs_recovers_the_costs(
    bandwidth: float, peak: float, kv: float, attention: float, seed: int
) -> None:
    true = Costs(bandwidth=bandwidth, peak=peak, kv=kv, attention=attention, overhead=0.0)
    random = np.random.default_rng(seed)
    tokens, keys = random.integers(1, 512, 200), random.integers(1, 10**5, 200)
    pairs = np.where(random.random(200) < 0.5, 0, random.integers(1, 10**5, 200))
    shapes = [(int(t), int(k), float(p)) for t, k, p in zip(tokens, keys, pairs, strict=True)]
    noise = 1 + 0.02 * random.random(200)
    steps = [(*s, true.seconds(*s) * n) for s, n in zip(shapes, noise, strict=True)]
    found = solve_costs(steps, Costs())
    for shape in shapes:
        assert found.seconds(*shape) == pytest.approx(true.seconds(*shape), rel=0.05)


def test_delayed_steps_are_ignored() -> None:
    true = Costs(bandwidth=2e10, peak=1e12, overhead=0.0)
    shapes = [(t, 10 * t, 0.0) for t in range(1, 101)]
    steps = [(*s, true.seconds(*s) * (50 if s[0] % 20 == 0 else 1)) for s in shapes]
    found = solve_costs(steps, Costs())
    assert found.seconds(50, 500, 0) == pytest.approx(true.seconds(50, 500, 0), rel=0.01)


@pytest.mark.slow
def test_simulation_predicts_the_engine() -> None:
    """With a model whose steps take milliseconds, under a load that keeps the engine busy."""
    decoder, limits = (
        Decoder.from_config(preset("llama-100m"), seed=0).bfloat16(),
        Limits(blocks=1024),
    )
    costs = fit_costs(decoder, limits, Costs(), lambda _: None)
    shares: list[float] = []
    for seed in range(3):
        trace = Trace(requests=64, rate=40.0, prompt=128, output=64, seed=seed)
        served = summarize(
            [run_on_engine(Engine(decoder, limits=limits), Load(trace=trace))], Goal()
        )
        simulated = simulate(limits, costs, trace, Goal())
        shares.append(simulated.output_tokens_per_s / served.output_tokens_per_s)
    assert 0.9 <= sorted(shares)[1] <= 1.1, f"simulated over real throughput: {shares}"
