"""`ingot train`: from a recipe to a model that generates; killed, stopped, and resumed."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import signal
import subprocess
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch

import ingot as package
from ingot.cli.train import train
from ingot.core import config
from ingot.core.errors import IngotError
from ingot.interop import hf
from ingot.nn import GRUConfig
from ingot.observe.metrics import NAME, read
from ingot.training.evaluate import LOGPROBS
from ingot.training.guard import Diverged
from ingot.training.precision import Precision
from ingot.training.recipe import Recipe
from ingot.training.trainer import Trainer
from tests.cli.conftest import COMMAND, Run
from tests.serving.conftest import Served, serving
from tests.training import runs

RECIPES = Path(__file__).parents[2] / "recipes"


def written(recipe: Recipe, tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    config.save(recipe, path)
    return path


def without_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing the curves would take most of the time of a short run."""
    monkeypatch.setattr("ingot.observe.report.write", lambda *_: None)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recipe, dict[str, Any]]:
    """A recipe and what training it printed, in `run` next to `recipe.toml`."""
    folder = tmp_path_factory.mktemp("trained")
    written(runs.text(folder, precision=Precision.BF16, ema_decay=0.9), folder)
    with redirect_stdout(io.StringIO()) as printed:
        train(folder / "recipe.toml", run=folder / "run", json=True)
    recipe = config.load(Recipe, folder / "recipe.toml")
    return recipe, json.loads(printed.getvalue())


def test_xor(ready: Run, cli: Run, tmp_path: Path) -> None:
    found = ready("train", str(RECIPES / "xor.toml"), "--json", XDG_DATA_HOME=str(tmp_path))
    assert found.returncode == 0, found.stderr
    result = json.loads(found.stdout)
    assert result["validation_loss"] < 0.01
    assert Path(result["run"]).is_relative_to(tmp_path / "ingot/runs")
    again = cli(
        "train", str(RECIPES / "xor.toml"), "steps=310", "--resume", XDG_DATA_HOME=str(tmp_path)
    )
    assert again.returncode == 0, again.stderr
    assert result["run"] in again.stdout
    assert "resuming from step 300" in again.stderr


def test_a_decoder_becomes_a_model_directory(
    trained: tuple[Recipe, dict[str, Any]], tmp_path: Path
) -> None:
    recipe, result = trained
    model = package.LLM(result["model"])
    trainer = Trainer(recipe, shutil.copytree(result["run"], tmp_path / "run"))
    assert trainer.resume()
    with trainer.ema_weights():
        wanted = dict(trainer.model.named_parameters())
        for name, parameter in model.decoder.named_parameters():
            assert torch.equal(parameter, wanted[name]), name
    assert model.generate("one model", max_tokens=3).text
    lineage = json.loads((Path(result["model"]) / "ingot.json").read_text())
    assert lineage["steps"][-1]["step"] == "train"


def test_what_was_trained_is_what_is_loaded(trained: tuple[Recipe, dict[str, Any]]) -> None:
    """The log-probabilities that training wrote, from the directory that it wrote, bit for bit."""
    from safetensors.torch import load_file

    from ingot.nn.loss import token_logprobs

    run = Path(trained[1]["run"])
    saved = load_file(run / LOGPROBS)
    decoder = hf.load(run / "model")
    with torch.inference_mode():
        for index in range(2):
            tokens, targets = saved[f"{index}.tokens"], saved[f"{index}.targets"]
            found = token_logprobs(decoder, tokens, targets, saved[f"{index}.lengths"].tolist())
            assert torch.equal(found, saved[f"{index}.logprobs"])


def served_logprobs(server: Served, tokens: list[int]) -> list[float]:
    """Return the server's log-probability of each token after the first."""
    body = {"prompt": tokens, "echo": True, "logprobs": 0, "max_tokens": 0}
    status, found, _ = server.call("/v1/completions", body)
    assert status == 200, found
    return found["choices"][0]["logprobs"]["token_logprobs"][1:]


def test_what_was_trained_is_what_is_served(
    trained: tuple[Recipe, dict[str, Any]], ready: Run, tmp_path: Path
) -> None:
    """The log-probabilities that training wrote, from a server, bit for bit; and it is verified."""
    from safetensors.torch import load_file

    run = Path(trained[1]["run"])
    saved = load_file(run / LOGPROBS)
    compared = 0
    with serving(run / "model", tmp_path) as server:
        for index in range(len(saved) // 4):
            parts = (saved[f"{index}.{name}"] for name in ("tokens", "targets", "logprobs"))
            lengths = saved[f"{index}.lengths"].tolist()
            for tokens, targets, logprobs in zip(*(p.split(lengths) for p in parts), strict=True):
                # The last target may be after the window; the end of a document has none.
                next_token = [t for t in targets[-1:].tolist() if t >= 0]
                prompt = tokens.tolist() + next_token
                assert prompt[1:] == targets[targets >= 0].tolist()
                wanted = logprobs[targets >= 0].double().tolist()
                if wanted:
                    # JSON has the shortest digits that are the double, and a float32 is one.
                    assert served_logprobs(server, prompt) == wanted
                    compared += len(wanted)
    assert compared > 100
    found = ready("verify", str(run / "model"), "--schedules", "3", "--json")
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["bitwise_equal"] is True


def test_export_of_a_run_that_is_training(tmp_path: Path, capsys: Any) -> None:
    """From its newest whole checkpoint, in the middle; the run is left as it is."""
    recipe = runs.text(tmp_path, precision=Precision.BF16)
    written(recipe, tmp_path)
    trainer = Trainer(recipe, tmp_path / "run")
    with pytest.raises(IngotError, match="not the directory of a run"):
        train(tmp_path / "recipe.toml", run=tmp_path / "run", export=tmp_path / "early")

    def stop(line: dict[str, Any]) -> None:
        if line["step"] == 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trainer.run(stop)
    trainer.checkpoints.wait()
    torn = tmp_path / "run/checkpoints/step-00000009"
    torn.mkdir()
    before = sorted(path for path in (tmp_path / "run").rglob("*"))
    train(tmp_path / "recipe.toml", run=tmp_path / "run", export=tmp_path / "out", json=True)
    assert sorted(path for path in (tmp_path / "run").rglob("*")) == before
    assert json.loads(capsys.readouterr().out)["steps"] == 8
    torn.rmdir()
    again = Trainer(recipe, tmp_path / "run")
    assert again.resume()
    assert again.step == 8
    model = package.LLM(tmp_path / "out")
    with again.ema_weights():
        wanted = dict(again.model.named_parameters())
        for name, parameter in model.decoder.named_parameters():
            assert torch.equal(parameter, wanted[name]), name
    lineage = json.loads((tmp_path / "out/ingot.json").read_text())
    assert lineage["steps"][-1]["steps"] == 8
    with pytest.raises(IngotError, match="exists already"):
        train(tmp_path / "recipe.toml", run=tmp_path / "run", export=tmp_path / "out")


def test_a_recurrent_model_is_not_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_report(monkeypatch)
    model = GRUConfig(vocab_size=300, dim=8)
    path = written(runs.text(tmp_path, steps=2, model=model, dropout=0.0), tmp_path)
    train(path, run=tmp_path / "run")
    with pytest.raises(IngotError, match="a GRU cannot be exported"):
        train(path, run=tmp_path / "run", export=tmp_path / "out")


def test_what_a_person_finds(tmp_path: Path, environment: dict[str, str]) -> None:
    """Curves, a report and TensorBoard's files: of a run that was stopped, then of all of it."""
    written(runs.text(tmp_path, steps=4000), tmp_path)
    process = begun(tmp_path, environment)
    until(process, tmp_path, 5)
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert process.returncode == 130
    there = {path.name for path in (tmp_path / "killed").iterdir()}
    assert {"curves.png", "curves.svg", "report.html", "tensorboard"} <= there
    assert "stopped" in (tmp_path / "killed/report.html").read_text()
    done = len(read(tmp_path / "killed"))
    steps = f"steps={done + 3}"
    train(tmp_path / "recipe.toml", (steps,), run=tmp_path / "killed", resume=True)
    page = (tmp_path / "killed/report.html").read_text()
    assert "<p>finished" in page
    assert "killed/model" in page


def test_a_run_that_diverged_has_a_report(tmp_path: Path) -> None:
    path = written(runs.xor(), tmp_path)
    with pytest.raises(Diverged):
        train(path, ("optimizer.lr=1e3", "clip.max_norm=1e9", "steps=300"), run=tmp_path / "run")
    assert "step " in (tmp_path / "run/report.html").read_text()


def test_a_report_that_fails_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object) -> None:
        raise ValueError("no such font")

    monkeypatch.setattr("ingot.observe.report.write", fails)
    train(written(runs.xor(steps=2), tmp_path), run=tmp_path / "run")
    assert "validation loss" in capsys.readouterr().out
    assert "no report: no such font" in caplog.text


def test_a_model_that_is_started_from(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_report(monkeypatch)
    from dataclasses import replace

    recipe = runs.text(tmp_path, model=None, init_from=tiny, steps=2, precision=Precision.BF16)
    data: Any = replace(recipe.data, tokenizer=tiny, vocab_size=None, cache_dir=tmp_path / "bytes")  # pyright: ignore
    written(replace(recipe, data=data), tmp_path)
    train(tmp_path / "recipe.toml", run=tmp_path / "run")
    before, after = hf.load(tiny), hf.load(tmp_path / "run/model")
    assert before.config == after.config
    assert not torch.equal(before.tok_embed.weight.bfloat16(), after.tok_embed.weight)


def test_a_run_is_not_written_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_report(monkeypatch)
    path = written(runs.xor(steps=2), tmp_path)
    train(path, run=tmp_path / "run")
    with pytest.raises(IngotError, match="--resume"):
        train(path, run=tmp_path / "run")
    with pytest.raises(IngotError, match="not the directory of a run"):
        train(path, run=tmp_path / "other", resume=True)


def test_resuming_without_a_run_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    with pytest.raises(IngotError, match="no run of 'xor'"):
        train(RECIPES / "xor.toml", resume=True)


def test_what_fails_before_it_begins_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    path = written(runs.text(tmp_path), tmp_path)
    with pytest.raises(IngotError, match="no such file or directory"):
        train(path, ("data.source=missing", f"data.cache_dir={tmp_path / 'none'}"))
    assert not any((tmp_path / "ingot/runs").iterdir())


def test_a_wrong_key_names_the_right_one(ingot: Run) -> None:
    found = ingot("train", str(RECIPES / "xor.toml"), "optimzer.lr=1")
    assert found.returncode == 2
    assert "did you mean 'optimizer'" in found.stderr


def begun(tmp_path: Path, environment: dict[str, str], *options: str) -> subprocess.Popen[str]:
    command = [COMMAND, "train", str(tmp_path / "recipe.toml"), "--run", str(tmp_path / "killed")]
    return subprocess.Popen(
        [*command, *options], env=environment, text=True, stderr=subprocess.PIPE
    )


def lines(tmp_path: Path) -> int:
    path = tmp_path / "killed" / NAME
    return path.read_text().count("\n") if path.exists() else 0


def until(process: subprocess.Popen[str], tmp_path: Path, count: int) -> None:
    """Wait until the run has written `count` lines, or has ended."""
    end = time.monotonic() + 300
    while process.poll() is None and lines(tmp_path) < count and time.monotonic() < end:
        time.sleep(0.002)


def finished(process: subprocess.Popen[str], tmp_path: Path, wanted: Trainer) -> None:
    error = process.communicate()[1]
    assert process.returncode == 0, error
    assert runs.curve(tmp_path / "killed") == runs.curve(wanted.directory)
    trainer = Trainer(wanted.recipe, tmp_path / "killed")
    assert trainer.resume()
    for name, tensor in runs.state(wanted).items():
        assert torch.equal(runs.state(trainer)[name], tensor), name


def whole(recipe: Recipe, tmp_path: Path) -> Trainer:
    trainer = Trainer(recipe, tmp_path / "whole")
    assert trainer.run() is not None
    return trainer


def test_sigkill_and_resume(tmp_path: Path, environment: dict[str, str]) -> None:
    recipe = runs.text(tmp_path, steps=20)
    written(recipe, tmp_path)
    wanted = whole(recipe, tmp_path)
    process = begun(tmp_path, environment)
    until(process, tmp_path, 9)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    finished(begun(tmp_path, environment, "--resume"), tmp_path, wanted)


@pytest.mark.slow
def test_sigkill_at_twenty_random_moments(tmp_path: Path, environment: dict[str, str]) -> None:
    """Also during checkpoints, which are written at every other step."""
    recipe = runs.text(tmp_path, steps=200, checkpoint_every=2, eval_every=50)
    written(recipe, tmp_path)
    wanted = whole(recipe, tmp_path)
    moments, process = random.Random(0), begun(tmp_path, environment)
    for _ in range(20):
        until(process, tmp_path, lines(tmp_path) + moments.randint(1, 12))
        time.sleep(moments.uniform(0, 0.05))
        process.kill()
        process.communicate()
        process = begun(tmp_path, environment, "--resume")
    finished(process, tmp_path, wanted)


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_signal_stops_the_run_after_its_step(
    tmp_path: Path, environment: dict[str, str], number: signal.Signals
) -> None:
    recipe = runs.text(tmp_path, steps=400, checkpoint_every=1000, eval_every=0)
    written(recipe, tmp_path)
    process = begun(tmp_path, environment)
    until(process, tmp_path, 5)
    os.kill(process.pid, number)
    error = process.communicate()[1]
    assert process.returncode == 130, error
    assert "stopping after the current step" in error
    trainer = Trainer(recipe, tmp_path / "killed")
    assert trainer.resume()
    assert trainer.step == len(read(tmp_path / "killed"))
