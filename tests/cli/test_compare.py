from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "copy"))


def plant(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] += 1.0
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def test_equal_directories_are_said_to_be(cli: Any, tiny: Path, copy: Path) -> None:
    run = cli("compare", str(tiny), "--with", str(copy), "--tokens", "50", COLUMNS="120")
    assert run.returncode == 0, run.stderr
    assert "bitwise equal: all results of 25 ops and 50 positions" in run.stdout
    assert "layer" not in run.stdout
    assert "outlier" not in run.stdout


def test_an_error_is_located_and_plotted(cli: Any, tiny: Path, copy: Path, tmp_path: Path) -> None:
    plant(copy)
    folder = tmp_path / "new" / "out"
    options = ("--tokens", "50", "--output", str(folder))
    run = cli("compare", str(tiny), "--with", str(copy), *options, COLUMNS="120")
    assert run.returncode == 0, run.stderr
    assert "other bits from the same inputs: blocks.1.mlp.down; 1 of 25 ops do" in run.stdout
    assert "outlier: blocks.1.mlp.down" in run.stdout
    assert "channel 3" in run.stdout
    assert sorted(path.name for path in folder.iterdir()) == [
        "compare.json",
        "compare.png",
        "compare.svg",
    ]
    written = json.loads((folder / "compare.json").read_text())
    assert written["outliers"][0]["name"] == "blocks.1.mlp.down"


def test_transformers_is_printed_as_json(cli: Any, tiny: Path) -> None:
    run = cli("compare", str(tiny), "--with", "transformers", "--tokens", "20", "--json")
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["distribution"]["positions"] == len(found["logprobs"]) == 20
    assert len(found["ops"]) == 25
    assert found["lm_head"]["kl_mean"] >= 0


def test_text_is_read_from_a_file(cli: Any, tiny: Path, copy: Path, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("Hello")
    arguments = ("compare", str(tiny), "--with", str(copy), "--json")
    run = cli(*arguments, "--text", str(file))
    assert json.loads(run.stdout)["distribution"]["positions"] == 4
    run = cli(*arguments, "--text", str(tmp_path / "missing.txt"))
    assert run.returncode == 2
    assert "cannot read" in run.stderr


def test_command_runs_in_its_own_process(ready: Any, tiny: Path, copy: Path) -> None:
    run = ready("compare", str(tiny), "--with", str(copy), "--tokens", "9")
    assert run.returncode == 0, run.stderr
    assert "bitwise equal" in run.stdout


def test_what_is_missing_is_an_error(cli: Any, tiny: Path) -> None:
    assert cli("compare", str(tiny)).returncode == 2
    assert cli("compare", str(tiny), "--with", "nowhere").returncode == 2
