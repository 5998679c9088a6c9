from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from ingot.cli.simulate import of_machine, of_model
from ingot.nn import Decoder, preset
from ingot.serve.simulate import Costs

Run = Callable[..., subprocess.CompletedProcess[str]]


def test_lines_for_people(ingot: Run) -> None:
    result = ingot("simulate", "--requests", "200", "--rate", "4", "--goal.first", "2")
    assert result.returncode == 0, result.stderr
    assert "200 in" in result.stdout
    assert "200 length" in result.stdout
    assert "first token within 2 s" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_json_says_what_was_simulated_and_what_came_of_it(ingot: Run) -> None:
    result = ingot("simulate", "--requests", "150", "--limits.budget", "128", "--json")
    found = json.loads(result.stdout)
    assert found["trace"]["requests"] == 150
    assert found["limits"]["budget"] == 128
    assert found["report"]["ends"] == {"length": 150}
    assert found["report"]["decisions_per_s"] > 0
    assert set(found["report"]["first_token"]) == {"p50", "p90", "p99"}


def test_where_nothing_is_answered_it_says_so(ingot: Run) -> None:
    result = ingot("simulate", "--requests", "3", "--limits.blocks", "1", "--prefix", "100")
    assert result.returncode == 0, result.stderr
    assert "3 refused" in result.stdout
    assert "none was answered" in result.stdout


def test_a_wrong_number_has_a_remedy(ingot: Run) -> None:
    result = ingot("simulate", "--rate", "0")
    assert result.returncode == 2
    assert "remedy: give a number from" in result.stderr


def test_costs_of_a_model(tmp_path: Path) -> None:
    from ingot.interop import hf

    decoder = Decoder.new(preset("tiny"), seed=0)
    hf.save(decoder, tmp_path)
    costs = of_model(tmp_path, Costs(overhead=0.5))
    parameters = sum(parameter.numel() for parameter in decoder.parameters())
    assert costs.flops == 2 * parameters
    assert costs.weights == 4 * parameters
    assert costs.kv == 2 * 2 * 2 * 16 * 4
    assert costs.attention == 4 * 2 * 4 * 16
    assert costs.overhead == 0.5


def test_costs_of_a_mixture_of_experts_are_not_guessed(tmp_path: Path) -> None:
    from ingot.core.errors import IngotError
    from ingot.interop import hf

    hf.save(Decoder.new(preset("tiny-moe"), seed=0), tmp_path)
    with pytest.raises(IngotError, match="mixture of experts"):
        of_model(tmp_path, Costs())


def test_costs_of_this_machine_are_its_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    from datetime import UTC, datetime

    from ingot.bench import peaks
    from ingot.bench.peaks import Peak, Peaks

    bf16, fp32 = Peak.of(3000.0, [2500.0]), Peak.of(300.0, [250.0])
    found = Peaks(
        method=1,
        measured=datetime.now(UTC),
        read_bandwidth=Peak.of(40.0, [35.0]),
        matmul={"fp32": fp32, "bf16": bf16, "int8": None},
    )
    monkeypatch.setattr(peaks, "peaks", lambda: found)
    costs = of_machine(Costs(kv=5.0))
    assert (costs.bandwidth, costs.peak, costs.kv) == (40e9, 3e12, 5.0)
