"""Recorded collectives; tests/parallel/test_replicas.py writes those of real processes."""

from __future__ import annotations

import os

import pytest

from ingot.parallel.trace import describe, record_collectives


def test_the_last_collective_in_words() -> None:
    entry = {"profiling_name": "nccl:all_to_all", "collective_seq_id": 3}
    assert describe({**entry, "input_sizes": [[8]], "input_dtypes": ["BFloat16"]}) == (
        "all_to_all 3 of [8] BFloat16"
    )
    assert describe({**entry, "input_sizes": [], "input_dtypes": []}) == "all_to_all 3 of []"


def test_a_given_size_of_the_record_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "7")
    record_collectives()
    monkeypatch.delenv("TORCH_FR_BUFFER_SIZE")
    record_collectives()
    assert os.environ["TORCH_FR_BUFFER_SIZE"] == "1000"
