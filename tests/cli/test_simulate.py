from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from ingot.cli.simulate import of_model
from ingot.nn import Decoder, preset
from ingot.serving.simulate import Costs

Run = Callable[..., subprocess.CompletedProcess[str]]


def test_lines_for_people(ingot: Run) -> None:
    result = ingot("simulate", "--requests", "200", "--rate", "4", "--goal.first", "2")
    assert result.returncode == 0, result.stderr
    assert "200 requests in" in result.stdout
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


def test_a_wrong_number_has_a_hint(ingot: Run) -> None:
    result = ingot("simulate", "--rate", "0")
    assert result.returncode == 2
    assert "hint: give a number from" in result.stderr


def test_costs_of_a_model(tmp_path: Path) -> None:
    from ingot.interop import hf

    decoder = Decoder.from_config(preset("tiny"), seed=0)
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

    hf.save(Decoder.from_config(preset("tiny-moe"), seed=0), tmp_path)
    with pytest.raises(IngotError, match="mixture of experts"):
        of_model(tmp_path, Costs())


def test_a_measurement_needs_a_model(ingot: Run) -> None:
    result = ingot("simulate", "--measured")
    assert result.returncode == 2
    assert "--model DIR" in result.stderr


def test_the_steps_of_a_model_are_measured_and_the_load_served(ready: Run, tmp_path: Path) -> None:
    from ingot.interop import hf

    hf.save(Decoder.from_config(preset("tiny"), seed=0), tmp_path)
    asked = ("--requests", "20", "--rate", "50", "--shared", "0", "--prompt", "32", "--output", "8")
    options = ("--model", str(tmp_path), "--measured", "--real", "--json")
    result = ready("simulate", *asked, *options)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["costs"]["bandwidth"] != Costs().bandwidth
    assert found["report"]["output_tokens"] == found["real"]["output_tokens"]
    assert found["real"]["ends"] == {"length": 20}
