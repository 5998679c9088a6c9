from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from ingot.bench.calibrate import model_costs
from ingot.nn import Decoder, preset
from ingot.serving.costs import CostModel

Run = Callable[..., subprocess.CompletedProcess[str]]


def test_lines_for_people(cli: Run) -> None:
    result = cli("simulate", "--num-requests", "200", "--request-rate", "4", "--slo.ttft", "2")
    assert result.returncode == 0, result.stderr
    assert "200 requests in" in result.stdout
    assert "200 length" in result.stdout
    assert "TTFT <= 2 s" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_json_says_what_was_simulated_and_what_came_of_it(cli: Run) -> None:
    result = cli(
        "simulate", "--num-requests", "150", "--scheduler.max-num-batched-tokens", "128", "--json"
    )
    found = json.loads(result.stdout)
    assert found["workload"]["num_requests"] == 150
    assert found["scheduler"]["max_num_batched_tokens"] == 128
    assert found["report"]["finish_reasons"] == {"length": 150}
    assert found["report"]["decisions_per_s"] > 0
    assert set(found["report"]["ttft"]) == {"p50", "p90", "p99"}


def test_a_fleet_and_its_failure(cli: Run) -> None:
    options = ("--num-requests", "300", "--request-rate", "30", "--replicas", "3")
    result = cli("simulate", *options, "--policy", "round-robin", "--fail-at", "5")
    assert result.returncode == 0, result.stderr
    assert "requests each" in result.stdout
    assert "of the time, mean" in result.stdout
    assert "pause p50" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
    found = json.loads(cli("simulate", *options, "--json").stdout)
    assert found["fleet"]["policy"] == "prefix"
    assert len(found["report"]["replicas"]) == 3
    assert found["report"]["failover"] is None


def test_one_engine_is_not_compared_with_a_fleet(cli: Run) -> None:
    result = cli("simulate", "--compare", "--replicas", "2")
    assert result.returncode == 2
    assert "leave out --replicas" in result.stderr


def test_where_nothing_is_answered_it_says_so(cli: Run) -> None:
    result = cli(
        "simulate", "--num-requests", "3", "--scheduler.num-blocks", "1", "--prefix-len", "100"
    )
    assert result.returncode == 0, result.stderr
    assert "3 rejected" in result.stdout
    assert "no request completed" in result.stdout


def test_a_wrong_number_has_a_hint(cli: Run) -> None:
    result = cli("simulate", "--request-rate", "0")
    assert result.returncode == 2
    assert "hint: give a number from" in result.stderr


def test_costs_of_a_model(tmp_path: Path) -> None:
    from ingot.interop import hf

    decoder = Decoder.from_config(preset("tiny"), seed=0)
    hf.save(decoder, tmp_path)
    costs = model_costs(tmp_path, CostModel(overhead_s=0.5))
    parameters = sum(parameter.numel() for parameter in decoder.parameters())
    assert costs.flops_per_token == 2 * parameters
    assert costs.weight_bytes == 4 * parameters
    assert costs.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4
    assert costs.attention_flops == 4 * 2 * 4 * 16
    assert costs.overhead_s == 0.5


def test_costs_of_a_mixture_of_experts_are_an_error(tmp_path: Path) -> None:
    from ingot.core.errors import IngotError
    from ingot.interop import hf

    hf.save(Decoder.from_config(preset("tiny-moe"), seed=0), tmp_path)
    with pytest.raises(IngotError, match="mixture of experts"):
        model_costs(tmp_path, CostModel())


def test_a_measurement_needs_a_model(cli: Run) -> None:
    result = cli("simulate", "--calibrate")
    assert result.returncode == 2
    assert "--model DIR" in result.stderr


def test_the_steps_of_a_model_are_measured_and_the_load_served(cli: Run, tmp_path: Path) -> None:
    from ingot.interop import hf

    hf.save(Decoder.from_config(preset("tiny"), seed=0), tmp_path)
    asked = (
        "--num-requests",
        "20",
        "--request-rate",
        "50",
        "--shared-prefix-ratio",
        "0",
        "--input-len",
        "32",
        "--output-len",
        "8",
    )
    options = ("--model", str(tmp_path), "--calibrate", "--compare", "--json")
    result = cli("simulate", *asked, *options)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["costs"]["bandwidth"] != CostModel().bandwidth
    assert found["report"]["output_tokens"] == found["measured"]["output_tokens"]
    assert found["measured"]["finish_reasons"] == {"length": 20}
