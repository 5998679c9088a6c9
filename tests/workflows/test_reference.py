"""DPO from rows to a trained model: the reference of the engine is bitwise that of training."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ingot
from ingot.compression import RoundToNearest
from ingot.core.errors import ConfigError
from ingot.nn import LoraConfig
from ingot.nn.formats import Int4, Int8
from ingot.observe import metrics
from ingot.training.objective import DPOConfig
from ingot.training.precision import Precision
from ingot.training.preference import target_logprobs
from ingot.training.recipe import PreferenceData, Recipe
from ingot.workflows import reference
from ingot.workflows.train import TrainingRun
from tests.training import runs
from tests.workflows import chats

LOG_2 = float(np.float32(math.log(2)))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "cache_dir", lambda: tmp_path / "references")


def recipe(tmp_path: Path, **options: Any) -> Recipe:
    """Pairs of long prompts, with a short chosen and a long rejected answer."""
    rows = []
    for i in range(24):
        words = [runs.WORDS[(i * k + k) % len(runs.WORDS)] for k in range(24)]
        prompt, texts = " ".join(words[:20]), (words[20], " ".join(words[4 + i % 4 : 14]))
        chosen, rejected = ([{"role": "assistant", "content": text}] for text in texts)
        messages = [{"role": "user", "content": prompt}]
        rows.append({"prompt": messages, "chosen": chosen, "rejected": rejected})
    source = tmp_path / "pairs.jsonl"
    source.write_text("\n".join(map(json.dumps, rows)))
    base = chats.recipe(tmp_path, dropout=0.0, ema_decay=0.0)
    assert base.data.kind == "chat"
    data = PreferenceData(
        source=str(source), tokenizer=base.data.tokenizer, seq_len=250, validation_fraction=0.2
    )
    known: dict[str, Any] = {"data": data, "objective": None, "steps": 6, "eval_every": 6}
    known |= {"optimizer": replace(base.optimizer, lr=1e-2), "global_batch_size": 6}
    return replace(base, **{**known, **options})


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_first_loss_is_log_2_and_margins_are_0(
    tmp_path: Path, precision: Precision, accumulate: int
) -> None:
    given = recipe(tmp_path, precision=precision, grad_accum_steps=accumulate)
    result = TrainingRun(given, run_dir=tmp_path / "run").train()
    lines = metrics.read(tmp_path / "run")
    first, last = lines[0], lines[-1]
    assert first["loss"] == LOG_2
    assert first["rewards/margins"] == first["rewards/chosen"] == first["rewards/rejected"] == 0
    assert lines[5]["loss"] < LOG_2  # it learns
    assert lines[5]["rewards/margins"] > 0
    assert last["validation_rewards/accuracies"] == result.metrics["validation_rewards/accuracies"]
    assert last["validation_logps/chosen"] < 0
    assert result.model_dir is not None
    assert "rewards/accuracies" in (tmp_path / "run" / "report.html").read_text()


def test_the_engine_scores_as_training_does_and_reuses_prompts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    run = TrainingRun(recipe(tmp_path, precision=Precision.BF16), run_dir=tmp_path / "run")
    cached = [r.args[1] for r in caplog.records if "cached" in r.message and r.args]  # pyright: ignore
    assert all(int(str(count).replace(",", "")) > 0 for count in cached)
    assert len(cached) == 2
    for split in (run.trainer.datasets.train, run.trainer.datasets.validation):
        batch = split.batch(range(len(split)))
        with torch.no_grad():
            trained = target_logprobs(run.trainer.model, batch)
        assert torch.equal(trained, batch.reference)


def test_an_adapter_of_a_model_with_quantized_weights_is_trained(tmp_path: Path) -> None:
    """Embedding and LM head are quantized, too; int8 and int4 have references of their own."""
    base = recipe(tmp_path, steps=2)
    ingot.train(base, run_dir=tmp_path / "base")
    lora = LoraConfig(rank=4)
    references = []
    for format in (Int8(group=32), Int4()):
        path = tmp_path / type(format).__name__
        options: dict[str, Any] = {"method": RoundToNearest(), "embeddings": True}
        ingot.compress(tmp_path / "base/model", path, format, **options)
        given = replace(base, model=None, init_from=path, adapter=lora, steps=6)
        run = TrainingRun(given, run_dir=tmp_path / f"run-{path.name}")
        split = run.trainer.datasets.train
        batch = split.batch(range(len(split)))
        with torch.no_grad():
            assert torch.equal(target_logprobs(run.trainer.model, batch), batch.reference)
        references.append(batch.reference)
        run.train()
        lines = metrics.read(run.trainer.directory)
        assert lines[0]["loss"] == LOG_2
        assert lines[5]["loss"] < LOG_2
    assert not torch.equal(*references)


def test_the_reference_is_kept_for_the_same_model_and_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored: list[int] = []
    score = reference.score_pairs

    def count(decoder: Any, pairs: Any, advance: Any) -> Any:
        scored.append(len(pairs))
        return score(decoder, pairs, advance)

    monkeypatch.setattr(reference, "score_pairs", count)
    given = recipe(tmp_path)
    first = TrainingRun(given, run_dir=tmp_path / "1").trainer.datasets.train.reference
    again = TrainingRun(given, run_dir=tmp_path / "2").trainer.datasets.train.reference
    assert len(scored) == 2  # both splits, once
    assert np.array_equal(first, again)
    for path in (tmp_path / "references").iterdir():
        path.write_bytes(path.read_bytes()[:-8])  # damaged
    third = TrainingRun(given, run_dir=tmp_path / "3").trainer.datasets.train.reference
    assert np.array_equal(first, third)
    other = TrainingRun(replace(given, seed=5), run_dir=tmp_path / "4")
    assert not np.array_equal(first, other.trainer.datasets.train.reference)
    assert len(scored) == 6


def test_a_stopped_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    given = recipe(tmp_path)
    whole = TrainingRun(given, run_dir=tmp_path / "whole")
    whole.train()
    run = TrainingRun(given, run_dir=tmp_path / "run")
    run.train(lambda metrics: run.stop() if metrics["step"] == 3 else None)
    resumed = TrainingRun(given, run_dir=tmp_path / "run", resume=True)
    resumed.train()
    for one, other in zip(
        whole.trainer.model.parameters(), resumed.trainer.model.parameters(), strict=True
    ):
        assert torch.equal(one, other)


def test_the_objective_and_the_data_belong_together(tmp_path: Path) -> None:
    given = recipe(tmp_path)
    assert given.objective == DPOConfig()
    with pytest.raises(ConfigError, match="'dpo' cannot be trained on 'chat' data"):
        chats.recipe(tmp_path, objective=DPOConfig())
    with pytest.raises(ConfigError, match="seq_len: must be at most 255"):
        replace(given, data=replace(given.data, seq_len=256))
