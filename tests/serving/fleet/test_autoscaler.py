from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.core.errors import ConfigError
from ingot.serving.fleet.autoscaler import AutoscalerConfig, LoadSample, desired_replicas

CONFIG = AutoscalerConfig(min_replicas=2, max_replicas=20, startup_s=60, cooldown_s=600)

samples = st.lists(
    st.builds(
        LoadSample,
        at=st.sampled_from([10.0, 50.0, 300.0, 700.0]),  # since the sample before; see `history`
        num_replicas=st.integers(1, 25),
        queue_delay_s=st.sampled_from([0.0, 0.4, 0.6, 5.0]),
        kv_use=st.sampled_from([0.0, 0.1, 0.5, 0.8, 0.9, 1.0]),
    ),
    min_size=1,
    max_size=6,
)


def history(steps: list[LoadSample]) -> list[LoadSample]:
    now, found = 0.0, []
    for step in steps:
        now += step.at
        found.append(step._replace(at=now))
    return found


@given(samples.map(history))
def test_the_number_is_within_its_bounds_and_independent_of_the_clock(
    past: list[LoadSample],
) -> None:
    desired = desired_replicas(CONFIG, past)
    assert 2 <= desired <= 20
    assert desired <= max(2, 2 * past[-1].num_replicas)
    later = [sample._replace(at=sample.at + 1e6) for sample in past]
    assert desired_replicas(CONFIG, later) == desired


@given(samples.map(history), st.sampled_from(["queue_delay_s", "kv_use"]))
def test_more_load_never_gives_fewer_replicas(past: list[LoadSample], name: str) -> None:
    more = past[-1]._replace(**{name: 2 * getattr(past[-1], name) + 0.1})
    assert desired_replicas(CONFIG, [*past[:-1], more]) >= desired_replicas(CONFIG, past)


def test_load_of_the_past_adds_no_replica() -> None:
    past = [LoadSample(10.0, 3, 5.0, 0.0), LoadSample(310.0, 3, 0.0, 0.0)]
    assert desired_replicas(CONFIG, [*past, LoadSample(610.0, 3, 0.0, 0.5)]) == 3


@given(samples.map(history))
def test_replicas_are_removed_only_after_a_quiet_time(past: list[LoadSample]) -> None:
    now, current = past[-1].at, past[-1].num_replicas
    if desired_replicas(CONFIG, past) < min(current, CONFIG.max_replicas):
        recent = [sample for sample in past if sample.at > now - CONFIG.cooldown_s]
        assert past[0].at <= now - CONFIG.cooldown_s
        assert {sample.num_replicas for sample in recent} == {current}
        assert max(sample.queue_delay_s for sample in recent) <= CONFIG.max_queue_delay_s
        assert max(sample.kv_use for sample in recent) < CONFIG.max_kv_use


@given(samples.map(history))
def test_replicas_are_not_added_while_others_start(past: list[LoadSample]) -> None:
    now, current = past[-1].at, past[-1].num_replicas
    counts = [sample.num_replicas for sample in past if sample.at > now - CONFIG.startup_s]
    if len(set(counts)) > 1:
        assert desired_replicas(CONFIG, past) <= max(current, CONFIG.min_replicas)


def simulate(load: list[float]) -> list[int]:
    """A fleet whose replicas start after 60 s; `load` has replicas' worth of work, each 30 s."""
    counts, past = [2], []
    for index, work in enumerate(load):
        running = (
            counts[max(0, index - 2)] if counts[-1] > counts[max(0, index - 2)] else counts[-1]
        )
        use = min(1.0, 0.8 * work / running)
        delay = 5.0 if work > running else 0.0
        past.append(LoadSample(30.0 * index, counts[-1], delay, use))
        counts.append(desired_replicas(CONFIG, past))
    return counts


def test_a_fleet_follows_its_load_without_oscillation() -> None:
    counts = simulate([2.0] * 30 + [9.0] * 60 + [3.0] * 90)
    assert counts[30] == 2
    assert 9 <= counts[90] <= 16
    assert counts[-1] == 3
    directions = [(b > a) - (b < a) for a, b in pairwise(counts) if a != b]
    assert directions == sorted(directions, reverse=True), "up, then down"


def test_without_samples_it_is_the_minimum() -> None:
    assert desired_replicas(CONFIG, []) == 2


@pytest.mark.parametrize(
    "wrong", [{"min_replicas": 0}, {"max_kv_use": 0.0}, {"min_replicas": 5, "max_replicas": 4}]
)
def test_settings_are_bounded(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        AutoscalerConfig(**wrong)
