"""Large results have memory that the kernels get themselves: aligned, and given back."""

from __future__ import annotations

import resource

import torch

from ingot import ops

_LARGE = 2**20  # values, 2 MB of them in bfloat16


def _grown(times: int) -> int:
    """By how many bytes the process grew at most, making as many large tensors in turn."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    x = torch.ones(_LARGE // 256, 256, dtype=torch.bfloat16)
    for _ in range(times):
        ops.silu(x)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


def test_large_results_begin_at_a_cache_line() -> None:
    x = torch.randn(1031, 515)  # 2.1 MB
    made = [ops.silu(x) for _ in range(5)]
    assert all(y.data_ptr() % 64 == 0 for y in made)
    assert all(torch.equal(y, made[0]) for y in made)


def test_large_results_are_given_back() -> None:
    assert _grown(400) < 100 * _LARGE  # 800 MB if they were not
