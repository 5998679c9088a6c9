"""Conversations from rows to a served model: packed as alone, resumed, trained as served."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file

import ingot
from ingot.core import config
from ingot.core.errors import ConfigError, DataError, IngotError
from ingot.core.targets import IGNORE_INDEX
from ingot.interop.tokenizer import Tokenizer
from ingot.nn import Decoder
from ingot.nn.loss import token_losses
from ingot.training.evaluate import LOGPROBS
from ingot.training.objective import SFTConfig
from ingot.training.precision import Precision
from ingot.training.recipe import Recipe, build_model
from ingot.workflows.chat_data import load_datasets, row_encoder
from ingot.workflows.train import TrainingRun
from tests.serving.conftest import Served, serving
from tests.training import runs
from tests.workflows import chats


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_conversations_have_the_losses_that_they_have_alone(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    recipe = chats.recipe(tmp_path)
    model = build_model(recipe).to(dtype)
    assert isinstance(model, Decoder)
    train = load_datasets(recipe).train
    batch = train.batch(range(len(train)))
    assert batch.target_rows is not None
    assert len(batch.lengths) > 2 * len(train)  # packed, indeed
    rows = (batch.tokens, batch.targets, batch.lengths)
    with torch.inference_mode():
        packed = token_losses(model, *rows, target_rows=batch.target_rows)
        parts = (part.split(batch.lengths) for part in (batch.tokens, batch.targets, packed))
        for tokens, targets, losses in zip(*parts, strict=True):
            assert torch.equal(token_losses(model, tokens, targets, [len(tokens)]), losses)
            assert losses[targets != IGNORE_INDEX].all()


def test_a_stopped_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    recipe = chats.recipe(tmp_path)
    run = TrainingRun(recipe, run_dir=tmp_path / "run")

    def stop(metrics: dict[str, Any]) -> None:
        if metrics["step"] == 3:
            run.stop()

    assert not run.train(stop).finished
    result = ingot.train(recipe, run_dir=tmp_path / "run", resume=True)
    whole = ingot.train(recipe, run_dir=tmp_path / "whole")
    assert result.metrics == whole.metrics
    assert runs.curve(tmp_path / "run") == runs.curve(tmp_path / "whole")
    assert config.load(Recipe, tmp_path / "run/recipe.toml").objective == SFTConfig()


def test_the_exported_model_chats_and_is_trained_further(tmp_path: Path) -> None:
    recipe = chats.recipe(tmp_path)
    result = ingot.train(recipe, run_dir=tmp_path / "run")
    assert result.model_dir is not None
    eos_token_ids = [*Tokenizer.load(result.model_dir).eos_token_ids, 5]
    generation_config = {"eos_token_id": eos_token_ids}
    (result.model_dir / "generation_config.json").write_text(json.dumps(generation_config))
    question = [{"role": "user", "content": "one model"}]
    (answer,) = cast(list[Any], ingot.LLM(result.model_dir).chat([question], max_tokens=3))
    assert answer.token_ids
    again = replace(
        recipe,
        model=None,
        init_from=result.model_dir,
        data=replace(recipe.data, tokenizer=None),
        steps=2,
    )
    further = ingot.train(again, run_dir=tmp_path / "further")
    assert further.model_dir is not None
    assert Tokenizer.load(further.model_dir).eos_token_ids == set(eos_token_ids)
    assert Tokenizer.load(further.model_dir).chat_template is not None
    steps = json.loads((further.model_dir / "ingot.json").read_text())["steps"]
    assert [step["step"] for step in steps[-2:]] == ["train", "train"]


def test_changed_conversations_are_not_resumed_with(tmp_path: Path) -> None:
    recipe = chats.recipe(tmp_path)
    run = TrainingRun(recipe, run_dir=tmp_path / "run")
    run.train(lambda metrics: run.stop())
    chats.write_rows(tmp_path / "chats.jsonl", 59)
    with pytest.raises(ConfigError, match="trained on other data"):
        ingot.train(recipe, run_dir=tmp_path / "run", resume=True)


def test_recipes_that_do_not_fit_are_rejected(tmp_path: Path) -> None:
    recipe = chats.recipe(tmp_path)
    with pytest.raises(ConfigError, match="needs a tokenizer with a chat template"):
        replace(recipe, data=replace(recipe.data, tokenizer=None))
    with pytest.raises(ConfigError, match=r"data\.seq_len: must be at most"):
        replace(recipe, data=replace(recipe.data, seq_len=257))
    with pytest.raises(DataError, match=r"chats\.jsonl: line \d+\)"):
        load_datasets(replace(recipe, data=replace(recipe.data, seq_len=40)))


def test_a_template_is_needed_for_messages_and_not_for_text(tmp_path: Path) -> None:
    recipe = chats.recipe(tmp_path)
    settings = tmp_path / "tokenizer/tokenizer_config.json"
    found = json.loads(settings.read_text())
    settings.write_text(json.dumps({k: v for k, v in found.items() if k != "chat_template"}))
    with pytest.raises(DataError, match="line 1: the model has no chat template"):
        load_datasets(recipe)
    rows = [{"text": "one model"}, {"prompt": "from training", "completion": " to serving"}] * 3
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert len(load_datasets(recipe).train.sequences) == 3


def served_logprobs(server: Served, tokens: list[int]) -> list[float]:
    """Return the server's log-probability of each token after the first."""
    body = {"prompt": tokens, "echo": True, "logprobs": 0, "max_tokens": 0}
    status, found, _ = server.call("/v1/completions", body)
    assert status == 200, found
    return found["choices"][0]["logprobs"]["token_logprobs"][1:]


def test_the_validation_loss_is_that_of_a_server(tmp_path: Path) -> None:
    """The log-probabilities of the assistant's tokens, from a server, bit for bit."""
    result = ingot.train(chats.recipe(tmp_path, precision=Precision.BF16), run_dir=tmp_path / "run")
    assert result.model_dir is not None
    saved = load_file(tmp_path / "run" / LOGPROBS)
    compared = total = 0.0
    with serving(result.model_dir, tmp_path) as server:
        for index in range(len(saved) // 4):
            parts = (saved[f"{index}.{name}"] for name in ("tokens", "targets", "logprobs"))
            lengths = saved[f"{index}.lengths"].tolist()
            for tokens, targets, logprobs in zip(*(p.split(lengths) for p in parts), strict=True):
                trained = targets[:-1] != IGNORE_INDEX
                served = torch.tensor(served_logprobs(server, tokens.tolist()), dtype=torch.float64)
                assert torch.equal(served[trained], logprobs[:-1][trained].double())
                assert tokens[1:][trained].equal(targets[:-1][trained])
                compared += int(trained.sum())
                total -= float(served[trained].sum())
    assert compared > 20
    assert total / compared == pytest.approx(result.metrics["validation_loss"], rel=1e-12)


def test_rows_are_encoded_as_a_server_encodes_them(tmp_path: Path) -> None:
    recipe = chats.recipe(tmp_path)
    tokenizer = Tokenizer.load(tmp_path / "tokenizer")
    messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "model"}]
    row = ingot.data.ChatRow(name="row", digest=b"", messages=messages)
    ((tokens, trained),) = row_encoder(tokenizer)(row)
    start = trained.index(True)
    assert tokens[:start] == tokenizer.encode_chat(messages[:1])
    shutil.rmtree(tmp_path / "tokenizer")
    with pytest.raises(IngotError, match="directory not found"):
        load_datasets(recipe)
