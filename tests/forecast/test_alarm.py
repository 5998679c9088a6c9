from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.core.errors import DataError
from ingot.forecast.alarm import EVERY, FEATURES, PAUSE, Alarm, Hazard, StepFeatures


def line(step: int, loss: float = 2.0, norm: float = 1.0, **more: Any) -> dict[str, Any]:
    return {"step": step, "loss": loss, "grad_norm": norm, **more}


def noisy(count: int, scale: float = 1.0) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    return [
        line(s, scale * (2 + 3 / s + 0.1 * rng.random()), scale * (1 + rng.random()))
        for s in range(1, count + 1)
    ]


def features(lines: list[dict[str, Any]], lr: float = 1.0) -> list[Any]:
    found = StepFeatures(lambda step: lr)
    return [values for row in lines if (values := found.add(row)) is not None]


def test_features_come_at_every_fifth_step_after_twenty() -> None:
    assert len(features(noisy(100))) == (100 - 20) // EVERY + 1
    assert all(len(row) == len(FEATURES) and np.isfinite(row).all() for row in features(noisy(100)))


def test_factors_of_loss_norm_and_rate_change_nothing() -> None:
    one, other = features(noisy(80)), features(noisy(80, scale=7.0), lr=1e-4)
    np.testing.assert_allclose(one, other, atol=1e-9)


def test_features_name_what_happens() -> None:
    at = {name: i for i, name in enumerate(FEATURES)}
    quiet = [line(s) for s in range(1, 60)]
    risen = features([*quiet, line(60, loss=4.0, norm=3.0, clip_factor=0.5)])[-1]
    assert risen[at["the loss is above its recent values"]] > 3
    assert risen[at["the gradient norm is above its recent values"]] > 3
    assert risen[at["gradients are clipped"]] == pytest.approx(1 / 20)
    ramp = StepFeatures(lambda step: 1.0 + step)
    values = [found for row in [*quiet, line(60)] if (found := ramp.add(row)) is not None][-1]
    assert values[at["the learning rate has risen"]] == 0.1
    assert values[at["the learning rate will rise"]] == 0.1
    assert risen[at["the learning rate will rise"]] == 0


@pytest.mark.parametrize(
    "row", [{}, {"step": 5}, line(5, loss=float("nan")), line(5, norm=0.0), line(5, loss=-1.0)]
)
def test_lines_without_a_positive_loss_and_norm_are_ignored(row: dict[str, Any]) -> None:
    assert StepFeatures(lambda step: 1.0).add(row) is None


def hazard(threshold: float = 0.5) -> Hazard:
    size = len(FEATURES)
    weight = np.zeros(size)
    weight[0], weight[1] = 2.0, 1.0
    return Hazard(np.zeros(size), np.ones(size), weight, -3.0, threshold)


def test_an_alarm_names_its_largest_terms_and_pauses() -> None:
    alarm = Alarm(hazard(), lambda step: 1.0)
    found = [alarm.add(line(s, loss=2.0 * 1.05 ** max(0, s - 60))) for s in range(1, 200)]
    alarms = [warned for warned in found if warned is not None]
    assert alarms[0].reasons[0] == FEATURES[0]
    assert alarms[0].probability >= 0.5
    gaps = np.diff([warned.step for warned in alarms])
    assert len(gaps) > 0
    assert (gaps >= PAUSE).all()


def test_later_lines_change_no_alarm() -> None:
    lines = [line(s, loss=2.0 * 1.05 ** max(0, s - 60)) for s in range(1, 200)]
    one, other = Alarm(hazard(), lambda step: 1.0), Alarm(hazard(), lambda step: 1.0)
    whole = [one.add(row) for row in lines]
    assert [other.add(row) for row in lines[:120]] == whole[:120]


def test_a_hazard_is_written_and_read(tmp_path: Path) -> None:
    hazard(0.25).save(tmp_path / "alarm.json")
    read = Hazard.load(tmp_path / "alarm.json")
    assert (read.threshold, read.bias) == (0.25, -3.0)
    np.testing.assert_allclose(read.weight, hazard().weight)
    (tmp_path / "alarm.json").write_text('{"bias": 1}')
    with pytest.raises(DataError, match=r"alarm\.json: cannot be read"):
        Hazard.load(tmp_path / "alarm.json")


def test_a_healthy_run_raises_no_alarm() -> None:
    alarm = Alarm(Hazard.load(), lambda step: 1.0)
    assert not any(alarm.add(row) for row in noisy(1000))
