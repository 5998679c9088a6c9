"""vLLM in its own environment; runs where `benchmarks/install_peers.py vllm` has installed it."""

from __future__ import annotations

from pathlib import Path

import pytest

import ingot
from ingot.bench.environment import Environment, peers_folder

VLLM = Environment("vllm", peers_folder() / "vllm.txt")


@pytest.mark.slow
@pytest.mark.skipif(VLLM.unavailable_reason() is not None, reason="vLLM is not installed")
def test_vllm_gives_whole_distributions(smollm2: Path) -> None:
    found = ingot.compare(smollm2, "vllm", python=VLLM.python, tokens=48)
    drift = found.distribution
    assert found.other.startswith("vLLM 0.")
    assert drift.positions == 48
    assert not drift.is_lower_bound
    assert drift.kl_mean is not None
    assert 1e-5 < drift.kl_mean < 1e-2
    assert found.ops == ()
    assert "vLLM" in (found.note or "")
