from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest

from ingot.core.errors import ConfigError
from ingot.serving.workload import RequestWorkload


def test_a_trace_is_what_it_is_asked_to_be() -> None:
    workload = RequestWorkload(
        num_requests=20_000,
        request_rate=5,
        burst_size=10,
        input_len=100,
        output_len=50,
        shared_prefix_ratio=0.25,
        prefix_len=7,
    )
    drawn = list(workload.generate())
    times = [arrival for arrival, _, _ in drawn]
    assert times == sorted(times)
    assert set(Counter(times).values()) == {10}
    assert times[-1] == pytest.approx(20_000 / 5, rel=0.1)
    prompts = [len(request.prompt) for _, request, _ in drawn]
    assert sum(prompts) / 20_000 == pytest.approx(100 + 0.25 * 7, rel=0.05)
    assert sum(r.max_tokens for _, r, _ in drawn) / 20_000 == pytest.approx(50, rel=0.05)
    assert len({request.prompt for _, request, _ in drawn}) == 20_000


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_requests": 0},
        {"request_rate": 0.0},
        {"request_rate": math.nan},
        {"shared_prefix_ratio": 1.5},
        {"deadline": -1.0},
        {"prefix_len": 10**5, "num_prefixes": 10**5},
    ],
)
def test_a_trace_is_bounded(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        RequestWorkload(**wrong)
