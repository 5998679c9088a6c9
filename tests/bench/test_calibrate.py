from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.bench.calibrate import fit_costs, solve_costs
from ingot.bench.serve import Load, run_on_engine, summarize
from ingot.nn import Decoder, preset
from ingot.serving.costs import CostModel
from ingot.serving.engine.engine import Engine
from ingot.serving.engine.scheduler import SchedulerConfig
from ingot.serving.simulate import SLO, simulate
from ingot.serving.workload import RequestWorkload


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
    true = CostModel(
        bandwidth=bandwidth,
        peak_flops=peak,
        kv_bytes_per_token=kv,
        attention_flops=attention,
        overhead_s=0.0,
    )
    random = np.random.default_rng(seed)
    tokens, keys = random.integers(1, 512, 200), random.integers(1, 10**5, 200)
    pairs = np.where(random.random(200) < 0.5, 0, random.integers(1, 10**5, 200))
    shapes = [(int(t), int(k), float(p)) for t, k, p in zip(tokens, keys, pairs, strict=True)]
    noise = 1 + 0.02 * random.random(200)
    steps = [(*s, true.step_seconds(*s) * n) for s, n in zip(shapes, noise, strict=True)]
    found = solve_costs(steps, CostModel())
    for shape in shapes:
        assert found.step_seconds(*shape) == pytest.approx(true.step_seconds(*shape), rel=0.05)


def test_delayed_steps_are_ignored() -> None:
    true = CostModel(bandwidth=2e10, peak_flops=1e12, overhead_s=0.0)
    shapes = [(t, 10 * t, 0.0) for t in range(1, 101)]
    steps = [(*s, true.step_seconds(*s) * (50 if s[0] % 20 == 0 else 1)) for s in shapes]
    found = solve_costs(steps, CostModel())
    assert found.step_seconds(50, 500, 0) == pytest.approx(true.step_seconds(50, 500, 0), rel=0.01)


@pytest.mark.slow
def test_simulation_predicts_the_engine() -> None:
    """With a model whose steps take milliseconds, under a load that keeps the engine busy."""
    decoder, config = (
        Decoder.from_config(preset("llama-100m"), seed=0).bfloat16(),
        SchedulerConfig(num_blocks=1024),
    )
    costs = fit_costs(decoder, config, CostModel(), lambda _: None)
    shares: list[float] = []
    for seed in range(3):
        workload = RequestWorkload(
            num_requests=64, request_rate=40.0, input_len=128, output_len=64, seed=seed
        )
        served = summarize(
            [run_on_engine(Engine(decoder, scheduler_config=config), Load(workload=workload))],
            SLO(),
        )
        simulated = simulate(config, costs, workload, SLO())
        shares.append(simulated.output_tokens_per_s / served.output_tokens_per_s)
    assert 0.9 <= sorted(shares)[1] <= 1.1, f"simulated over real throughput: {shares}"
