"""Who waits says so in a trace of torch.profiler."""

from __future__ import annotations

from torch.profiler import ProfilerActivity, profile

from ingot.core import spans
from ingot.data import Loader, xor
from ingot.parallel.ranks import waiting


def test_waiting_has_spans() -> None:
    loader = Loader(xor(), batch_size=2)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        next(loader)
        with waiting("all_gather", 0):
            pass
    names = [event.name for event in recorded.events() or ()]
    assert names == [spans.DATA, f"{spans.COMMUNICATION}: all_gather"]
