from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.cli.conftest import Run


def test_gguf_file_is_imported_then_its_directory(
    cli: Run, tmp_path: Path, smollm2_gguf: Path
) -> None:
    result = cli("import", str(smollm2_gguf), "smol")
    assert result.returncode == 0, result.stderr
    lines = [line.strip() for line in result.stdout.splitlines()]
    source = "SmolLM2-135M-Instruct.Q4_1.gguf, 98.4 MB, sha256 b179c9523d0e6a0f"
    assert f"source         {source}" in lines
    assert "architecture   llama" in lines
    assert "parameters     134.5 million" in lines
    types = "210 Q4_1, 61 F32, 1 Q8_0; 211 stay quantized, others to bfloat16"
    assert f"tensors        {types}" in lines
    assert "next: ingot chat smol" in lines
    assert result.stderr == ""  # a progress bar needs a terminal

    again = cli("import", "smol", "copy", "--json")
    assert again.returncode == 0, again.stderr
    found = json.loads(again.stdout)
    assert found["architecture"] == "llama"
    assert found["parameters"] == 134_515_008
    assert found["chat"] is True
    assert found["import"]["quantization"] == {
        **{"float16": 421, "int32": 210, "int64": 210, "bfloat16": 61, "int8": 1}
    }
    steps = json.loads((tmp_path / "copy" / "ingot.json").read_text())["steps"]
    assert [step["source"] for step in steps] == [smollm2_gguf.name, "smol"]
    weights = "model.safetensors"
    assert (tmp_path / "smol" / weights).read_bytes() == (tmp_path / "copy" / weights).read_bytes()


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("none", "error: none: no such file or directory"),
        ("text", "error: text is not a valid GGUF file"),
        ("empty", "error: config.json not found in empty"),
    ],
)
def test_failed_import_has_a_hint(cli: Run, tmp_path: Path, source: str, error: str) -> None:
    (tmp_path / "text").write_text("not a model")
    (tmp_path / "empty").mkdir()
    result = cli("import", source, "out")
    assert result.returncode == 2
    assert error in result.stderr.replace("\n", " ")
    assert "hint: " in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()


def test_existing_directory_is_not_overwritten(
    cli: Run, tmp_path: Path, smollm2_gguf: Path
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    result = cli("import", str(smollm2_gguf), "out")
    assert result.returncode == 2
    assert "error: out: exists already" in result.stderr
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_names_from_files_are_escaped(cli: Run, tmp_path: Path) -> None:
    source = tmp_path / "[bold]odd"
    source.mkdir()
    (source / "config.json").write_text('{"model_type": "\\u001b[2Jllama"}')
    save_file({"a": torch.ones(2)}, source / "model.safetensors")
    result = cli("import", source.name, "out")
    assert result.returncode == 0, result.stderr
    assert "source         [bold]odd" in result.stdout
    assert "architecture   ?[2Jllama" in result.stdout
    assert "next: ingot generate out" in result.stdout
    wrong = cli("import", "\x1b[2Jnone", "out")
    assert "error: ?[2Jnone: no such file or directory" in wrong.stderr


def test_encoder_is_imported_with_its_pooling(cli: Run, tmp_path: Path, minilm: Path) -> None:
    result = cli("import", str(minilm), "minilm")
    assert result.returncode == 0, result.stderr
    assert "architecture   bert" in result.stdout
    assert "next: ingot serve minilm" in result.stdout
    assert (tmp_path / "minilm/1_Pooling/config.json").is_file()
