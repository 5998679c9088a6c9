from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.bench.server_costs import (
    LoadUsage,
    RandomPrompts,
    calibration_loads,
    count_tokens,
    fit_machine,
)
from ingot.serving.costs import CostModel
from ingot.serving.machine import ProcessCosts
from tests import models

ROOT = Path(__file__).parents[2]
TRUE = CostModel(overhead_s=0.0, sequence_s=4e-6, admission_s=1e-4)
SERVER = ProcessCosts(wakeup_s=3e-5, request_s=4e-4, prompt_token_s=1e-6, token_s=5e-6)
CLIENTS = ProcessCosts(wakeup_s=9e-6, request_s=6e-5, prompt_token_s=4e-7, token_s=1e-6)


def process_seconds(costs: ProcessCosts, wakeups: float, load: LoadUsage) -> float:
    return float(np.dot((wakeups, *load.messages()), list(vars(costs).values())))


def usage(tokens: list[tuple[int, int]], clients: int, noise: float) -> LoadUsage:
    """What a server with these costs takes for a load, if all clients get a token in each step."""
    steps = sum(new for _, new in tokens) / clients
    load = LoadUsage(
        tokens=tokens,
        steps=steps,
        engine_s=0.0,
        server_s=0.0,
        server_wakeups=steps + len(tokens) / 2,
        clients_s=0.0,
        clients_wakeups=2 * steps,
    )
    return dataclasses.replace(
        load,
        engine_s=noise * steps * TRUE.step_seconds(*load.step()[:-1]),
        server_s=noise * process_seconds(SERVER, load.server_wakeups, load),
        clients_s=noise * process_seconds(CLIENTS, load.clients_wakeups, load),
    )


def test_costs_are_found_again() -> None:
    rng = np.random.default_rng(0)
    usages: list[LoadUsage] = []
    for clients, workload in calibration_loads(4096):
        tokens = count_tokens(workload)
        usages += [usage(tokens, clients, 1 + 0.02 * rng.standard_normal()) for _ in range(3)]
    costs, machine = fit_machine(usages, CostModel(), cores=2)
    assert machine.cores == 2
    for one in usages:
        shape = one.step()[:-1]
        assert costs.step_seconds(*shape) == pytest.approx(TRUE.step_seconds(*shape), rel=0.04)
        for found, true, wakeups in (
            (machine.server, SERVER, one.server_wakeups),
            (machine.clients, CLIENTS, one.clients_wakeups),
        ):
            seconds = process_seconds(true, wakeups, one)
            assert process_seconds(found, wakeups, one) == pytest.approx(seconds, rel=0.04)


def test_prompts_of_a_small_vocabulary_share_only_their_prefix() -> None:
    workload = RandomPrompts(num_requests=600, input_len=40, prefix_len=64, num_prefixes=3)
    prompts = [request.prompt for _, request, _ in workload.generate()]
    assert all(0 <= token < 256 for prompt in prompts for token in prompt)
    shared = [prompt for prompt in prompts if len(prompt) > 64]
    heads = [prompt[:64] for prompt in shared]
    assert max(map(heads.count, set(heads))) * 3 > 200
    assert len({prompt[:32] for prompt in prompts if len(prompt) >= 32}) > 100
    again = [request.prompt for _, request, _ in workload.generate()]
    assert again == prompts
    other = [r.prompt for _, r, _ in dataclasses.replace(workload, salt=1).generate()]
    assert [len(prompt) for prompt in other] == [len(prompt) for prompt in prompts]
    long = {p for p in prompts if len(p) >= 32 and p[:64] not in set(heads)}
    assert {p[:32] for p in long}.isdisjoint({p[:32] for p in other if len(p) >= 32})


@pytest.mark.slow
def test_four_real_replicas_do_what_is_predicted(
    tmp_path: Path, record_property: Callable[[str, Any], None]
) -> None:
    """Errors depend on what else the machine does; alone it is far below this bound."""
    directory = models.small(tmp_path / "small", max_seq_len=4096)
    program = [sys.executable, str(ROOT / "benchmarks/replicas.py"), "predict", str(directory)]
    options = ["--requests", "4000", "--rounds", "3", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [*program, *options], env=environment, capture_output=True, text=True, check=True
    )
    found = json.loads(run.stdout)
    for trace in ("overload", "load"):
        record_property(trace, found[trace])
    assert abs(found["overload"]["requests_per_s"]["error"]) < 0.3
