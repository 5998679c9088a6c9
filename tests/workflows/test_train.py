"""`ingot.train` does in Python what `ingot train` does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ingot
from ingot.compression import RoundToNearest
from ingot.core import config, lineage
from ingot.core.errors import ConfigError, IngotError
from ingot.interop import classifier, hf, peft
from ingot.nn import BatchLayout, CNNConfig, LoraConfig, preset
from ingot.nn.formats import Int4, Int8, WeightFormat
from ingot.nn.qat import QatConfig
from ingot.nn.quantized import QuantizedLinear
from ingot.training.evaluate import LOGPROBS
from ingot.training.optimizer import AdamWConfig, LionConfig, OptimizerConfig
from ingot.training.precision import Precision
from ingot.training.recipe import Recipe
from ingot.workflows.train import TrainingRun, export, find_run
from tests.training import runs


def test_a_recipe_object_is_trained_and_exported(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = []
    recipe = runs.text(tmp_path, precision=Precision.BF16)
    result = ingot.train(recipe, run_dir=tmp_path / "run", on_metrics=lines.append)
    assert result.finished
    assert result.steps == recipe.steps == lines[-1]["step"]
    assert result.metrics["validation_loss"] > 0
    assert result.model_dir is not None
    assert result.model_dir == tmp_path / "run/model"
    assert (tmp_path / "run/report.html").is_file()
    assert ingot.LLM(result.model_dir).generate("one model", max_tokens=3).token_ids


def test_a_stopped_run_resumes(tmp_path: Path) -> None:
    recipe = runs.xor(steps=40)
    run = TrainingRun(recipe, run_dir=tmp_path / "run")

    def stop(metrics: dict[str, Any]) -> None:
        if metrics["step"] == 10:
            run.stop()

    stopped = run.train(stop)
    assert (stopped.finished, stopped.steps, stopped.model_dir) == (False, 10, None)
    assert "stopped" in (tmp_path / "run/report.html").read_text()
    result = ingot.train(recipe, run_dir=tmp_path / "run", resume=True)
    whole = ingot.train(recipe, run_dir=tmp_path / "whole")
    assert (result.finished, result.steps) == (True, 40)
    assert result.metrics == whole.metrics


def test_a_file_takes_overrides_and_a_recipe_object_does_not(tmp_path: Path) -> None:
    recipe = runs.xor(steps=2)
    config.save(recipe, tmp_path / "recipe.toml")
    result = ingot.train(tmp_path / "recipe.toml", ["steps=3"], run_dir=tmp_path / "run")
    assert result.steps == 3
    with pytest.raises(IngotError, match=r"dataclasses\.replace"):
        ingot.train(recipe, ["steps=3"], run_dir=tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_the_newest_run_of_a_name_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    recipe = replace(runs.xor(steps=2), name="named")
    with pytest.raises(IngotError, match="no run of 'named'"):
        find_run("named")
    first, second = (ingot.train(recipe).run_dir for _ in range(2))
    assert first != second == find_run("named")
    assert export(recipe, tmp_path / "out").run_dir == second


def test_a_classifier_is_exported_with_the_logits_of_its_run(tmp_path: Path) -> None:
    model = CNNConfig(widths=(4, 6), num_classes=10, dropout=0.1)
    recipe = runs.digits(model, ema_decay=0.5)
    run = TrainingRun(recipe, run_dir=tmp_path / "run")
    directory = tmp_path / "run/model"
    assert run.train().model_dir == directory
    assert lineage.read(directory).steps[-1]["data"] == "digits 0.2"
    found, signature = classifier.load(directory)
    assert signature.inputs[0].shape == (1, 8, 8)
    images = run.trainer.datasets.validation.x
    with run.trainer.ema_weights():
        assert torch.equal(run.trainer.model.eval()(images), found(images))
    exported = export(recipe, tmp_path / "out", run_dir=tmp_path / "run").model_dir
    assert exported is not None
    for name in ("config.json", "model.safetensors"):
        assert (exported / name).read_bytes() == (directory / name).read_bytes()


def adapter_recipe(
    tmp_path: Path, format: WeightFormat | None = None, embeddings: bool = False, **options: Any
) -> Recipe:
    """A LoRA adapter of a model that is trained first, with everything on that keeps state."""
    base = tmp_path / "base/model"
    if not base.exists():
        recipe = runs.text(tmp_path, steps=4, precision=Precision.BF16)
        ingot.train(recipe, run_dir=tmp_path / "base")
    if format:
        base, original = tmp_path / "quantized", base
        ingot.compress(original, base, format, method=RoundToNearest(), embeddings=embeddings)
    lora = LoraConfig(rank=4, dropout=0.1)
    known: dict[str, Any] = {"init_from": base, "model": None, "adapter": lora}
    return runs.text(tmp_path, **{**known, "precision": Precision.BF16, **options})


@pytest.mark.parametrize(
    ("precision", "format", "embeddings"),
    [
        (Precision.BF16, None, False),
        (Precision.FP32, None, False),
        (Precision.BF16, Int4(), False),
        (Precision.BF16, Int4(), True),
        (Precision.BF16, Int8(group=None), False),
    ],
    ids=str,
)
def test_an_adapter_is_trained_and_exported(
    tmp_path: Path, precision: Precision, format: WeightFormat | None, embeddings: bool
) -> None:
    recipe = adapter_recipe(tmp_path, format, embeddings, precision=precision)
    assert recipe.init_from is not None
    assert recipe.adapter is not None
    before = {file.name: file.read_bytes() for file in recipe.init_from.iterdir()}
    run = TrainingRun(recipe, run_dir=tmp_path / "run")
    state = run.trainer._tensors()
    names = {name.partition("|")[0] for name in state["weights"] if not name.startswith("|")}
    assert names
    assert all(".lora." in name for name in names)
    assert not state["buffers"]
    assert state["ema"].keys() == names
    result = run.train()
    assert result.model_dir is not None
    assert {file.name: file.read_bytes() for file in recipe.init_from.iterdir()} == before
    assert [step["step"] for step in lineage.read(result.model_dir).steps] == [
        *(["train", "compress", "train"] if format else ["train", "train"])
    ]
    saved = {f"step-{step:08}" for step in (4, 8, 12)}
    sizes = [f.stat().st_size for f in (tmp_path / "run/checkpoints").rglob("*.safetensors")]
    assert {path.name for path in (tmp_path / "run/checkpoints").iterdir()} == saved
    assert max(sizes) < (recipe.init_from / "model.safetensors").stat().st_size * 4

    decoder = hf.load(recipe.init_from, precision.dtype)
    adapter = peft.load(result.model_dir, decoder)
    assert adapter.config["base_model_name_or_path"] == str(recipe.init_from)
    assert any(b.any() for _, b in adapter.weights.values())
    decoder.add_lora_slots(max_loras=2, max_rank=8)
    decoder.set_adapter(1, peft.lora_weights(adapter, decoder), adapter.scale)
    written = load_file(tmp_path / "run" / LOGPROBS)
    with torch.inference_mode():
        for index in range(2):
            tokens, targets = written[f"{index}.tokens"], written[f"{index}.targets"]
            layout = BatchLayout.packed(written[f"{index}.lengths"].tolist())
            slots = torch.ones(len(tokens), dtype=torch.int32)
            hidden = decoder(tokens, replace(layout, adapters=slots))
            logprobs = decoder.logprobs(hidden, targets.clamp(min=0))
            trained = written[f"{index}.logprobs"]
            assert torch.equal(logprobs[targets >= 0], trained[targets >= 0])


@pytest.mark.parametrize("format", [None, Int8(group=32)], ids=str)
def test_an_adapter_resumes_bitwise_and_on_its_own_base_only(
    tmp_path: Path, format: WeightFormat | None
) -> None:
    recipe = adapter_recipe(tmp_path, format, embeddings=True)
    run = TrainingRun(recipe, run_dir=tmp_path / "run")

    def stop(metrics: dict[str, Any]) -> None:
        if metrics["step"] == 5:
            run.stop()

    assert not run.train(stop).finished
    exported = export(recipe, tmp_path / "exported", run_dir=tmp_path / "run").model_dir
    assert exported is not None
    assert (exported / peft.WEIGHTS).is_file()
    resumed = TrainingRun(recipe, run_dir=tmp_path / "run", resume=True)
    whole = TrainingRun(recipe, run_dir=tmp_path / "whole")
    assert resumed.train().finished
    assert whole.train().finished
    runs.assert_same(resumed.trainer, whole.trainer)

    assert recipe.init_from is not None
    path = recipe.init_from / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="init_from have changed"):
        TrainingRun(recipe, run_dir=tmp_path / "run", resume=True)


def test_an_adapter_needs_a_base(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="adapter: must be added to a trained model"):
        runs.text(tmp_path, adapter=LoraConfig())
    with pytest.raises(IngotError, match="LoRA target 'w1'"):
        TrainingRun(adapter_recipe(tmp_path, adapter=LoraConfig(targets=("w1",))))


@pytest.mark.parametrize(
    ("precision", "optimizer", "qat"),
    [
        (Precision.BF16, AdamWConfig(lr=0.01), QatConfig(symmetric=True)),
        (Precision.FP32, AdamWConfig(lr=0.01), QatConfig()),
        (Precision.BF16, LionConfig(lr=0.003), QatConfig(format="int8")),
    ],
    ids=str,
)
def test_what_qat_trains_is_served_bitwise(
    tmp_path: Path, precision: Precision, optimizer: OptimizerConfig, qat: QatConfig
) -> None:
    options: dict[str, Any] = {"optimizer": optimizer, "precision": precision, "qat": qat}
    recipe = runs.text(tmp_path, **options, grad_accum_steps=2)
    run = TrainingRun(recipe, run_dir=tmp_path / "run")
    losses: list[float] = []
    result = run.train(lambda metrics: losses.append(metrics.get("loss", losses[-1:])))
    assert losses[-2] < losses[0]
    assert result.model_dir is not None
    assert lineage.read(result.model_dir).steps[-1]["qat"] == str(qat.weight_format)
    decoder = hf.load(result.model_dir)
    layer = decoder.get_submodule("blocks.0.mlp.gate_up")
    assert isinstance(layer, QuantizedLinear)
    assert layer.format == qat.weight_format

    model = ingot.LLM(result.model_dir)
    written = load_file(tmp_path / "run" / LOGPROBS)
    for index in range(2):
        text = written[f"{index}.tokens"].tolist()
        first = int(written[f"{index}.lengths"][0])
        served = model.score(text[:first]).logprobs
        assert list(served) == written[f"{index}.logprobs"][: first - 1].tolist()

    exported = export(recipe, tmp_path / "exported", run_dir=tmp_path / "run").model_dir
    assert exported is not None
    name = "model.safetensors"
    assert (exported / name).read_bytes() == (result.model_dir / name).read_bytes()


def test_qat_resumes_bitwise(tmp_path: Path) -> None:
    base = runs.text(tmp_path, steps=4, precision=Precision.BF16)
    ingot.train(base, run_dir=tmp_path / "base")
    options: dict[str, Any] = {"model": None, "init_from": tmp_path / "base/model"}
    recipe = replace(base, **options, qat=QatConfig(), steps=8, grad_accum_steps=2)
    run = TrainingRun(recipe, run_dir=tmp_path / "run")
    assert not run.train(lambda metrics: run.stop() if metrics["step"] == 5 else None).finished
    resumed = TrainingRun(recipe, run_dir=tmp_path / "run", resume=True)
    whole = TrainingRun(recipe, run_dir=tmp_path / "whole")
    assert resumed.train().finished
    assert whole.train().finished
    runs.assert_same(resumed.trainer, whole.trainer)


def test_qat_refuses_models_that_cannot_be_exported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="qat: trains the weights that an adapter freezes"):
        adapter_recipe(tmp_path, qat=QatConfig())
    with pytest.raises(ConfigError, match="qat: only applies to decoders"):
        runs.xor(qat=QatConfig())
    experts = replace(preset("tiny-moe"), vocab_size=300)
    recipe = runs.text(tmp_path, model=experts, qat=QatConfig())
    with pytest.raises(ConfigError, match="mixtures of experts"):
        TrainingRun(recipe, run_dir=tmp_path / "run")
