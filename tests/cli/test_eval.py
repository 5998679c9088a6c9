"""`ingot eval`: options, summary, and Ctrl-C."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ingot.cli.eval import EvalOptions
from ingot.interop import hf
from tests import adapters


@pytest.fixture
def task(tmp_path: Path) -> Path:
    path = tmp_path / "questions.jsonl"
    rows = [{"prompt": f"{n} plus {n} is", "answer": str(2 * n)} for n in range(6)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_summary_has_metrics_and_the_directory(
    cli: Any, tiny: Path, task: Path, tmp_path: Path
) -> None:
    arguments = ("eval", str(task), str(tiny), "--max-tokens", "4", "--output", "out")
    run = cli(*arguments)
    assert run.returncode == 0, run.stderr
    words = run.stdout.split()
    assert "questions.jsonl on tiny: 6 rows" in run.stdout
    assert words[words.index("exact_match") + 1 :][:2] == ["0.0000", "0.0000"]
    assert "6 of 6 answers ended at --max-tokens" in run.stdout
    assert "results: out" in run.stdout
    found = json.loads(cli(*arguments, "--json").stdout)
    assert found["complete"] is True
    assert found["metrics"]["exact_match"] == {"value": 0.0, "stderr": 0.0}
    assert (tmp_path / "out/samples.jsonl").read_text().count("\n") == 6


def test_an_adapter_is_evaluated(cli: Any, tiny: Path, task: Path, tmp_path: Path) -> None:
    adapter = adapters.save(hf.load(tiny), tmp_path / "adapter", seed=1)
    arguments = ("eval", str(task), str(tiny), "--max-tokens", "4", "--adapter", str(adapter))
    run = cli(*arguments)
    assert run.returncode == 0, run.stderr
    assert "questions.jsonl on tiny with an adapter: 6 rows" in run.stdout
    run = cli("eval", str(task), "http://127.0.0.1:9", "--adapter", str(adapter))
    assert run.returncode == 2
    assert "hint: name it: --model-name" in run.stderr


def test_only_given_options_replace_settings() -> None:
    assert EvalOptions().settings() == {}
    assert EvalOptions(temperature=0.0, stop=("x",), chat=True).settings() == {
        "temperature": 0.0,
        "stop": ("x",),
        "chat": True,
    }


def test_errors_have_hints(cli: Any, tiny: Path, task: Path) -> None:
    run = cli("eval", str(task), str(tiny), "--samples", "4")
    assert run.returncode == 2
    assert "hint: set a temperature" in run.stderr
    with task.open("a") as file:
        file.write("{}\n")
    run = cli("eval", str(task), str(tiny))
    assert run.returncode == 2
    assert "line 7: the fields describe no task: none" in run.stderr.replace("\n", " ")
    run = cli("eval", str(task.with_name("missing.jsonl")), "http://127.0.0.1:9")
    assert (run.returncode, "no such file" in run.stderr) == (2, True)


def test_ctrl_c_keeps_what_was_computed(
    environment: dict[str, str], tiny: Path, tmp_path: Path
) -> None:
    path, output = tmp_path / "long.jsonl", tmp_path / "out"
    rows = [{"prompt": f"{n}", "answer": "x"} for n in range(4000)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["eval", str(path), str(tiny), "--max-tokens", "20", "--output", str(output)]
    process = subprocess.Popen(
        [sys.executable, "-m", "ingot", *options],
        env=environment,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    samples = output / "samples.jsonl"
    begin = time.monotonic()
    while not (samples.exists() and samples.stat().st_size) and time.monotonic() - begin < 60:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert (out, "the same command continues" in err) == ("", True)
    results = json.loads((output / "results.json").read_text())
    lines = [json.loads(line) for line in samples.read_text().splitlines()]
    assert results["complete"] is False
    assert 0 < results["num_samples"] == len(lines) < 4000
    assert all("score" in line for line in lines)
