from __future__ import annotations

import json
from pathlib import Path

import pytest

from ingot.cli.info import info, report
from ingot.core.errors import IngotError
from ingot.interop import classifier
from ingot.nn import CNN, CNNConfig


def test_description_of_a_real_model(smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    info(str(smollm2))
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[:6] == [
        "architecture   llama: 30 layers of 576, MLP 1536; 9 heads of 64, 3 KV heads",
        "vocabulary     49,152, tied",
        "context        8,192 tokens",
        "parameters     134.5 million",
        "weights        269.0 MB: 272 bfloat16",
        "memory         23.0 MB of KV cache per 1,000 tokens",
    ]
    # The cached directory may have been verified since it was imported.
    assert lines[6].startswith("lineage        import: ")
    assert "SmolLM2-135M-Instruct.Q4_1.gguf, b179c9523d0e6a0f" in lines[6]


def test_description_of_an_encoder(minilm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    info(str(minilm))
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [
        "architecture   bert: 6 layers of 384, MLP 1536; 12 heads of 32",
        "vocabulary     30,522",
        "context        512 tokens",
        "parameters     22.7 million",
        "weights        90.9 MB: 103 float32, 1 int64",
        "memory         no KV cache",
    ]


def test_description_of_a_classifier(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = CNNConfig(widths=(4, 6), num_classes=10)
    classifier.save(CNN.from_config(config, seed=0), tmp_path, (1, 8, 8))
    info(str(tmp_path))
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [
        "architecture   cnn: in_channels 1, widths (4, 6), num_classes 10, dropout 0.0",
        "input          input: FP32 [1, 8, 8]",
        "output         logits: FP32 [10]",
        "parameters     870",
        "weights        3.5 kB: 22 float32",
    ]
    assert report(tmp_path)["outputs"] == ({"name": "logits", "datatype": "FP32", "shape": (10,)},)


def test_json_of_a_model_without_lineage(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    info(str(tiny), json=True)
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads(json.dumps(report(tiny)))
    assert found["architecture"] == "llama"
    assert found["bytes"] == 4 * found["parameters"]
    assert found["dtypes"] == {"float32": 20}
    config = found["config"]
    kept = 2 * config["layers"] * config["kv_heads"] * config["head_dim"] * 4
    assert found["kv_bytes_per_1k_tokens"] == 1000 * kept
    assert found["lineage"] == []


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("config.json", "{", "not JSON"),
        ("config.json", "[]", "not a JSON object"),
        ("config.json", '{"model_type": "clip"}', "unknown model_type"),
        ("model.safetensors", "no tensors at all", "not safetensors"),
        ("ingot.json", "[" * 100_000, "ingot.json"),
    ],
)
def test_damaged_file_is_named(tiny: Path, name: str, content: str, error: str) -> None:
    (tiny / name).write_text(content)
    with pytest.raises(IngotError, match=error):
        info(str(tiny))


def test_directory_without_model_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(IngotError, match=r"has no config\.json"):
        info(str(tmp_path))


def test_text_from_files_is_escaped(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = {"steps": [{"step": "import", "source": "[bold]x\x1b[2J"}]}
    (tiny / "ingot.json").write_text(json.dumps(steps))
    info(str(tiny))
    assert "import: [bold]x?[2J" in capsys.readouterr().out
