"""Directories of classifiers: bits survive, and nothing in a directory is trusted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ingot.core.errors import IngotError
from ingot.interop import classifier, hf
from ingot.interop.signature import CLASSIFIERS, is_classifier
from ingot.nn import CNN, CNNConfig, Dense, DenseConfig, ResNet, ResNetConfig
from ingot.nn.weights import SafetensorsDir, write
from tests import models

SHAPE = (3, 6, 5)
MODELS: dict[str, Any] = {
    "dense": Dense.from_config(
        DenseConfig(in_features=90, hidden_dims=(8, 4), out_features=7, dropout=0.1), seed=0
    ),
    "cnn": CNN.from_config(CNNConfig(in_channels=3, widths=(4, 6), num_classes=7), seed=0),
    "resnet": ResNet.from_config(
        ResNetConfig(in_channels=3, widths=(4, 6), blocks_per_stage=1, num_classes=7), seed=0
    ),
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    classifier.save(MODELS["cnn"], tmp_path, SHAPE)
    return tmp_path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", MODELS)
def test_a_saved_model_has_the_same_logits(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model, x = MODELS[kind], torch.randn(4, *SHAPE)
    model.train()
    model(x)  # batch norms see a batch
    same = type(model)(model.config).to(dtype)
    same.load_state_dict(model.state_dict())
    classifier.save(same.eval(), tmp_path, SHAPE)
    loaded, signature = classifier.load(tmp_path)
    assert not loaded.training
    assert next(loaded.parameters()).dtype is dtype
    assert torch.equal(loaded(x), same(x))
    assert (signature.inputs[0].shape, signature.outputs[0].shape) == (SHAPE, (7,))
    described = classifier.describe(tmp_path)
    assert (described.model_type, described.config) == (kind, model.config)
    assert described.signature == signature
    assert described.bytes == described.parameters * dtype.itemsize
    assert is_classifier(tmp_path)
    assert set(MODELS) == set(CLASSIFIERS)
    assert not hf.is_encoder(tmp_path)


def change(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    raw = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in raw.items() if value is not ...}))


def tensor(**changes: Any) -> list[dict[str, Any]]:
    return [{"name": "input", "datatype": "FP32", "shape": SHAPE} | changes]


@pytest.mark.parametrize("datatype", ["UINT8", "BF16", "FP16", "INT64", "BOOL"])
def test_inputs_may_have_another_datatype(directory: Path, datatype: str) -> None:
    change(directory, inputs=tensor(datatype=datatype))
    assert classifier.load(directory)[1].inputs[0].datatype == datatype


def test_images_may_have_any_size_and_no_channel(directory: Path) -> None:
    change(directory, inputs=tensor(shape=(3, 90, 1)))
    assert classifier.load(directory)[1].inputs[0].shape == (3, 90, 1)
    change(directory, inputs=tensor(shape=(6, 5)))
    with pytest.raises(IngotError, match="cannot compute"):
        classifier.load(directory)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"model_type": "mlp"}, "unknown model_type"),
        ({"model_type": 3}, "unknown model_type"),
        ({"width": 3}, "did you mean 'widths'"),
        ({"widths": ...}, "widths"),
        ({"widths": "4"}, "widths"),
        ({"widths": [4, "6"]}, "widths"),
        ({"widths": [4, 0]}, "widths"),
        ({"widths": [4, 8]}, "is .* where the model has"),
        ({"widths": [4]}, "not in the model"),
        ({"widths": [4, 6, 8]}, "are not in"),
        ({"num_classes": 2**40}, "num_classes"),
        ({"model_type": "resnet", "blocks_per_stage": 2**10}, "2,048 blocks"),
        ({"inputs": ...}, "inputs"),
        ({"inputs": []}, "one input"),
        ({"inputs": tensor(datatype="FP64")}, "unknown datatype"),
        ({"inputs": tensor(datatype="BYTES")}, "cannot compute"),
        ({"inputs": tensor(shape=[1, 6, 5])}, "cannot compute"),
        ({"inputs": tensor(shape=[3, 6, -5])}, "shape"),
        ({"inputs": tensor(more=1)}, "unknown field"),
        ({"outputs": tensor(shape=[8])}, "the model computes"),
        ({"outputs": tensor(shape=[7], datatype="FP16")}, "the model computes"),
    ],
)
def test_configs_that_do_not_fit_are_refused(
    directory: Path, changes: dict[str, Any], error: str
) -> None:
    change(directory, **changes)
    with pytest.raises(IngotError, match=error):
        classifier.load(directory)


def test_a_config_cannot_claim_more_memory_than_the_weights_have(directory: Path) -> None:
    """Two petabytes would not be allocated: the error comes before."""
    change(directory, widths=[2**16] * 64)
    with pytest.raises(IngotError, match="are not in"):
        classifier.load(directory)


def test_weights_that_do_not_fit_are_refused(directory: Path, tmp_path: Path) -> None:
    entries = SafetensorsDir(directory).entries
    tensors = {name: torch.zeros(entry.shape) for name, entry in entries.items()}
    (directory / "model.safetensors").unlink()
    write(directory, tensors | {"head.bias": torch.zeros(7, dtype=torch.int64)})
    with pytest.raises(IngotError, match=r"'head.bias' is torch\.int64"):
        classifier.load(directory)
    (directory / "model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(IngotError, match="not safetensors"):
        classifier.load(directory)
    (directory / "model.safetensors").rename(directory / "model.bin")
    with pytest.raises(IngotError, match="pickles"):
        classifier.load(directory)


def test_a_shape_that_the_model_cannot_compute_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(IngotError, match="cannot compute"):
        classifier.save(MODELS["dense"], tmp_path, (89,))
    assert not list(tmp_path.iterdir())


def test_language_models_are_other_directories(tmp_path: Path) -> None:
    assert not is_classifier(models.small(tmp_path / "small"))
    for content in ("{", "[]", "[" * 100_000, '{"model_type": []}', "\0"):
        (tmp_path / "config.json").write_text(content)
        assert not is_classifier(tmp_path)
    assert not is_classifier(tmp_path / "missing")


def test_classifiers_generate_no_text(directory: Path) -> None:
    with pytest.raises(IngotError, match="generates no text"):
        hf.load(directory)
