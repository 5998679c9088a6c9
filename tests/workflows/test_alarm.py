from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ingot.observe.history import read_forecasts
from ingot.observe.metrics import read
from ingot.training.forecast import ForecastConfig
from ingot.training.guard import SpikeGuardConfig
from ingot.training.optimizer import SGDConfig
from ingot.training.schedule import LRSchedule
from ingot.workflows.alarm import LiveAlarm, describe_alarm
from ingot.workflows.train import TrainingRun, train
from tests.training.runs import xor


class Recorder:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def ask(self, action: str) -> None:
        self.calls.append(action)


def ramp(action: Any, **options: Any) -> Any:
    """A run whose learning rate rises until it diverges."""
    return xor(
        steps=200,
        optimizer=SGDConfig(lr=300.0, momentum=0.0),
        schedule=LRSchedule(kind="constant", warmup_steps=200),
        guard=SpikeGuardConfig(policy="skip", z_threshold=1e6, patience=1000),
        forecast=ForecastConfig(alarm=action),
        **options,
    )


def lines(count: int) -> list[dict[str, Any]]:
    return [
        {"step": s, "loss": 0.7 * 1.1 ** max(0, s - 100), "grad_norm": 1.1 ** max(0, s - 90)}
        for s in range(1, count + 1)
    ]


@pytest.mark.parametrize("action", ["note", "checkpoint", "lower_lr"])
def test_an_alarm_is_logged_and_does_what_the_recipe_says(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, action: str
) -> None:
    trainer = Recorder()
    alarm = LiveAlarm(ramp(action), tmp_path, trainer)
    found = [warned for line in lines(160) if (warned := alarm.add(line))]
    assert found
    assert trainer.calls == [action] * (0 if action == "note" else len(found))
    assert describe_alarm(found[0]) in caplog.text
    rows = read_forecasts(tmp_path)
    assert [row["step"] for row in rows] == [warned.step for warned in found]
    assert len(rows[0]["reasons"]) in (1, 2, 3)


def test_no_alarm_if_it_is_off(tmp_path: Path) -> None:
    alarm = LiveAlarm(ramp("off"), tmp_path, Recorder())
    assert not any(alarm.add(line) for line in lines(160))


def test_the_rate_is_halved_after_an_alarm(tmp_path: Path) -> None:
    train(ramp("lower_lr"), run_dir=tmp_path / "lowered")
    train(ramp("note"), run_dir=tmp_path / "noted")
    steps = [row["step"] for row in read_forecasts(tmp_path / "lowered") if "alarm" in row]
    assert steps
    noted, lowered = (
        {line["step"]: line["lr"] for line in read(tmp_path / name) if "lr" in line}
        for name in ("noted", "lowered")
    )
    first = steps[0]
    assert lowered[first] == noted[first]
    assert lowered[first + 1] == pytest.approx(noted[first + 1] / 2)


def test_a_resumed_run_has_the_same_alarms_and_bits(tmp_path: Path) -> None:
    whole = train(ramp("lower_lr"), run_dir=tmp_path / "whole").run_dir
    first = next(row["step"] for row in read_forecasts(whole) if "alarm" in row)
    run = TrainingRun(ramp("lower_lr"), run_dir=tmp_path / "parts")
    run.train(lambda line: run.stop() if line["step"] == first else None)
    train(ramp("lower_lr"), run_dir=tmp_path / "parts", resume=True)
    kept = ("step", "loss", "lr", "grad_norm")
    one, other = (
        [[line.get(key) for key in kept] for line in read(tmp_path / name)]
        for name in ("whole", "parts")
    )
    assert repr(one) == repr(other)


def test_notes_and_forecasts_leave_the_bits_of_training(tmp_path: Path) -> None:
    for action in ("note", "off"):
        train(ramp(action), run_dir=tmp_path / action)
    one, other = (
        [(line["step"], line.get("loss"), line.get("grad_norm")) for line in read(tmp_path / name)]
        for name in ("note", "off")
    )
    assert repr(one) == repr(other)


def test_an_alarm_writes_a_checkpoint(tmp_path: Path) -> None:
    run = train(ramp("checkpoint", checkpoint_every=10**6), run_dir=tmp_path / "run").run_dir
    first = next(row["step"] for row in read_forecasts(run) if "alarm" in row)
    names = [path.name for path in (run / "checkpoints").iterdir()]
    assert any(str(first) in name for name in names), names
