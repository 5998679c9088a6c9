"""Canaries of a real server, with planted faults."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.serving.releases import (
    CANARY,
    FAULTY,
    FILE,
    Load,
    chat,
    complete,
    rejected,
    releasing,
    roles,
    write,
)


def check_canaries(folder: Path, log: Path, bad: dict[str, str], record: Any) -> None:
    """Those that are bad are rolled back for the reason that is given, one after the other; then a
    good one is promoted."""
    stable = FILE.format(model="v1")
    with releasing(folder, log, stable, FAULTY) as served:
        load = Load(served, 8)
        for model, reason in bad.items():
            write(folder, stable + CANARY.format(model=model))
            load.until(lambda model=model: "canary" in chat(served) or model in rejected(served))
            seconds = load.until(lambda model=model: model in rejected(served))
            record(f"seconds until a {model} canary was rolled back", round(seconds, 1))
            assert reason in rejected(served)[model]
            load.until(lambda: roles(served) == {"stable": "v1"})
        loads = served.log.read_text().count("chat: loading")
        text = stable + CANARY.format(model=[*bad][-1])
        write(folder, text + "# the same again\n")
        load.until(lambda: served.log.read_text().count("using the new") > len(bad))
        assert served.log.read_text().count("chat: loading") == loads, "it is not tried again"
        write(folder, stable + CANARY.format(model="v2"))
        load.until(lambda: roles(served) == {"stable": "v2"})
        engines, count = served.workers, served.log.read_text().count("using the new")
        write(folder, FILE.format(model="v2"))
        load.until(lambda: served.log.read_text().count("using the new") > count)
        load.stop()
        assert (roles(served), served.workers) == ({"stable": "v2"}, engines), "it serves already"
        assert served.metric("ingot:releases_promoted") == 1
        outcomes = ("ingot:releases_rolled_back", "ingot:releases_failed")
        assert sum(map(served.metric, outcomes)) == len(bad)
        assert all("engine step failed" in error for error in load.errors), load.errors[:3]
        assert {version.split("@")[0] for version, _, _ in load.answers} >= {"v1", "v2"}


def test_a_canary_that_drifts_is_rolled_back_and_a_good_one_is_promoted(
    folder: Path, tmp_path: Path, record_property: Callable[[str, float], None]
) -> None:
    bad = {"drifting": "log-probabilities differ by"}
    check_canaries(folder, tmp_path, bad, record_property)


def test_a_rollback_is_remembered_over_a_restart(folder: Path, tmp_path: Path) -> None:
    stable, canary = FILE.format(model="v1"), CANARY.format(model="drifting")
    with releasing(folder, tmp_path, stable + canary, FAULTY) as served:
        load = Load(served, 4)
        load.until(lambda: "drifting" in rejected(served))
        load.stop()
        reason = rejected(served)["drifting"]
    with releasing(folder, tmp_path, stable + canary, FAULTY) as served:
        for _ in range(3):
            complete(served)
        assert rejected(served) == {"drifting": reason}
        assert roles(served) == {"stable": "v1"}
        assert "chat: loading" not in served.log.read_text()
        write(folder, stable + canary.replace("0.5", "0.4"))
        served.wait(lambda: "chat: loading drifting" in served.log.read_text(), 60)
        assert rejected(served) == {}
    with releasing(folder, tmp_path, stable + canary, FAULTY) as served:
        served.wait(lambda: "chat: loading drifting" in served.log.read_text(), 60)


@pytest.mark.slow
def test_bad_canaries_are_rolled_back(
    folder: Path, tmp_path: Path, record_property: Callable[[str, float], None]
) -> None:
    """Those that fail, are slow or give other log-probabilities; and one that cannot be loaded."""
    bad = {
        "failing": "requests failed",
        "slow": "median",
        "drifting": "log-probabilities differ by",
        "broken": "cannot be loaded",
    }
    check_canaries(folder, tmp_path, bad, record_property)
