"""Run hypothesis with a number of examples that fits the fast or the slow tier, and count them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

Explore = Callable[[st.SearchStrategy[Any], Callable[[Any], None], int], None]

# Fast tests use the same examples in each run, slow tests use new ones.
_PHASES = (Phase.explicit, Phase.generate, Phase.shrink)


@pytest.fixture
def explore(request: pytest.FixtureRequest, record_property: Callable[..., None]) -> Explore:
    """Check a number of examples of a strategy; pytest prints their total at the end of the run."""
    slow = request.node.get_closest_marker("slow") is not None

    def run(strategy: st.SearchStrategy[Any], check: Callable[[Any], None], examples: int) -> None:
        tried = 0

        @settings(
            max_examples=examples,
            deadline=None,
            derandomize=not slow,
            database=None,
            phases=_PHASES,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
            print_blob=False,
        )
        @given(strategy)
        def explored(example: Any) -> None:
            nonlocal tried
            tried += 1
            check(example)

        try:
            explored()
        finally:
            record_property(request.module.KIND, tried)

    return run


@pytest.fixture(autouse=True)
def _restore_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
