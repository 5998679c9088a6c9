"""`benchmarks/replicas.py`, as small as it gets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.replicas import Outcome, parse_outcome
from tests import models

sys.path.insert(0, str(Path(__file__).parents[2]))

PROGRAM = Path(__file__).parents[2] / "benchmarks/replicas.py"


def run(*arguments: str) -> dict[str, Any]:
    found = subprocess.run(
        [sys.executable, str(PROGRAM), *arguments, "--json"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    return json.loads(found.stdout)


def outcome(*events: str, status: int = 200) -> Outcome:
    body = "".join(f"data: {event}\n\n" for event in events)
    return parse_outcome(7, 0.0, None, f"HTTP/1.1 {status} x\r\n\r\n{body}".encode())


def test_ends_and_contents_of_streams() -> None:
    events = [
        json.dumps({"choices": [{"text": text, "logprobs": {"token_logprobs": [value]}}]})
        for text, value in (("a", -1.0), ("b", -2.0))
    ]
    error = json.dumps({"error": {"message": "x"}})
    good = outcome(*events, "[DONE]")
    assert (good.num_ends, good.failed, good.content) == (1, False, ("ab", (-1.0, -2.0)))
    assert outcome(*events, "[DONE]", "[DONE]").num_ends == 2
    assert outcome(*events).num_ends == 0
    cut = outcome(*events, error)
    assert (cut.num_ends, cut.failed) == (1, True)
    refused = outcome(status=503)
    assert (refused.num_ends, refused.failed) == (1, True)


def test_no_request_is_lost_when_engines_are_killed(tmp_path: Path) -> None:
    directory = models.small(tmp_path / "small")
    options = ("--replicas", "2", "--requests", "120", "--kills", "2", "--rate", "15")
    found = run("kill", str(directory), *options)
    assert (found["requests"], found["kills"]) == (120, 2)
    assert (found["failed"], found["not_one_end"], found["other_bits"]) == (0, 0, 0)
    assert found["statuses"] == {"200": 120}
    assert found["ttft_s_undisturbed"]["requests"] == 12
