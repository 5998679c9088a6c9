"""The search on objectives that are known, and once on the real kernels."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from ingot.bench import cpu_tuning
from ingot.bench.cpu_tuning import Bench, Measurement, Search, Values, Workload
from ingot.core.device import detect
from ingot.kernels import tuned
from ingot.kernels.cpu import tuning

pytest.importorskip("optuna", reason="the search is Optuna's")
pytestmark = pytest.mark.skipif(detect().compiler is None, reason="no C++ compiler")

FASTEST = {"task_elements": 65536, "tasks_per_thread": 2}


@pytest.fixture(autouse=True)
def _empty_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tuned, "database_path", lambda: tmp_path / "tuned.db")
    yield
    tuning._load_stored.cache_clear()


class KnownBench(Bench):
    """Times that follow a formula: how far the values are from the fastest, in steps of a space."""

    def __init__(self, gain: float, *, bits_differ: bool = False) -> None:
        self.workloads = cpu_tuning.workloads("tasks")[:6]
        self.gain, self.bits_differ, self.tried = gain, bits_differ, list[dict[str, int]]()

    def ratio(self, workload: Workload, values: Values, seconds: float | None = None) -> float:
        if workload is self.workloads[0]:
            self.tried.append(dict(values))
        return self.gain ** (1 - self._distance(values) / self._distance(tuning.defaults()))

    def same_bits(self, values: Values) -> bool:
        return not self.bits_differ

    def _distance(self, values: Values) -> float:
        steps = 0.0
        for each in tuning.space("tasks"):
            steps += abs(math.log2(values[each.name] / FASTEST[each.name]))
        return steps


@pytest.mark.parametrize("method", ["tpe", "random", "evolution", "grid"])
def test_every_method_finds_the_fastest_of_a_small_space(
    method: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_tuning, "PATIENCE", 100)
    result = cpu_tuning.search("tasks", KnownBench(1.2), trials=60, method=method)
    assert result.chosen is not None
    assert result.best.speedup > 1.15
    assert result.best.speedup == max(each.speedup for each in result.trials)


def test_a_search_starts_with_what_is_stored_for_this_machine_and_others() -> None:
    tuning.save("tasks", FASTEST, 1.0)
    bench = KnownBench(1.2)
    other = {"task_elements": 4096, "tasks_per_thread": 8}
    key = msgspec.structs.replace(tuning._key("tasks"), device="another CPU")
    tuned.save(key, json.dumps(other), 1.1)
    result = cpu_tuning.search("tasks", bench, trials=20)
    assert bench.tried[:2] == [FASTEST, other]
    assert result.chosen == FASTEST
    assert len(result.trials) + result.pruned < 20  # it ends when nothing better is found


@pytest.mark.parametrize("bench", [KnownBench(1.005), KnownBench(1.2, bits_differ=True)])
def test_small_gains_and_other_bits_are_not_chosen(bench: KnownBench) -> None:
    assert cpu_tuning.search("tasks", bench, trials=30).chosen is None


def test_slow_trials_are_pruned() -> None:
    result = cpu_tuning.search("tasks", KnownBench(1.2), trials=40, method="random")
    assert result.pruned > 0


@pytest.mark.parametrize("group", tuning.GROUPS)
def test_real_kernels_are_timed_and_keep_their_bits(group: str) -> None:
    chosen = cpu_tuning.workloads(group)
    assert len(chosen) >= 8
    bench = Bench(chosen[:3], seconds=0.01)
    values = {each.name: each.choices[0] for each in tuning.space(group)}
    measured: Measurement = bench.measure(values)
    assert 0.01 < measured.speedup < 100
    assert list(measured.by_workload) == [cpu_tuning.name_of(each) for each in chosen[:3]]
    assert bench.same_bits(values)
    assert tuning.values() == tuning.defaults()


def test_other_bits_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(cpu_tuning.workloads("tasks")[:1], seconds=0.01)
    results = bench._results

    def wrong(workload: Workload, values: Values) -> Any:
        found = results(workload, values)
        if values["tasks_per_thread"] == 1:
            with torch.inference_mode():
                found[0].view(-1)[7] = 12345.0
        return found

    monkeypatch.setattr(bench, "_results", wrong)
    assert not bench.same_bits({**tuning.defaults(), "tasks_per_thread": 1})
