"""The alarm of a run that trains: it warns before the loss diverges, and does what the recipe says.

It never stops a run; the guard (`ingot.training.guard`) remains as it is. An alarm is a function of
the lines of metrics, so a run that is resumed has the same ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from ingot.core import log
from ingot.forecast.alarm import AHEAD, Alarm, Hazard, Warned
from ingot.observe.history import FORECASTS, RunHistory
from ingot.training.recipe import Recipe

_DONE = {
    "note": "",
    "checkpoint": "; a checkpoint is written",
    "lower_lr": "; the learning rate is halved",
}


class Responder(Protocol):
    """What acts on an alarm: the trainer."""

    def ask(self, action: str) -> None:
        """Ask for a "checkpoint" or to "lower_lr" after the current step."""


class LiveAlarm:
    """Watches a run, and asks its trainer to act as the recipe says."""

    def __init__(self, recipe: Recipe, directory: Path, trainer: Responder) -> None:
        self.directory, self.trainer = directory, trainer
        self.action = recipe.forecast.alarm
        schedule, steps = recipe.schedule, recipe.steps
        self._alarm: Alarm | None = None
        if self.action != "off":
            self._alarm = Alarm(Hazard.load(), lambda step: schedule.lr_factor(step, steps))

    def resume(self, step: int) -> None:
        """Read the metrics of a run up to this step."""
        if step and self._alarm is not None:
            for line in RunHistory.read(self.directory).lines:
                if line["step"] <= step:
                    self._alarm.add(line)

    def add(self, line: Mapping[str, Any]) -> Warned | None:
        """Read a line; warn and act if there is an alarm."""
        found = None if self._alarm is None else self._alarm.add(line)
        if found is None:
            return None
        text = describe_alarm(found) + _DONE[self.action]
        log.logger(__name__).warning("step %d: %s", found.step, text)
        row = {"step": found.step, "alarm": found.probability, "reasons": found.reasons}
        with (self.directory / FORECASTS).open("a") as file:
            file.write(json.dumps(row) + "\n")
        if self.action != "note":
            self.trainer.ask(self.action)
        return found


def describe_alarm(found: Warned) -> str:
    """Describe an alarm.

    >>> describe_alarm(Warned(512, 0.12, ("the loss rises",)))
    'divergence is likely within 25 steps (12 %): the loss rises'
    """
    reasons = ", ".join(found.reasons)
    return f"divergence is likely within {AHEAD} steps ({100 * found.probability:.0f} %): {reasons}"
