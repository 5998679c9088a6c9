"""Recipes: those of the repository, and those that make no sense."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ingot.core import config
from ingot.core.errors import ConfigError, UnknownName
from ingot.nn import DecoderConfig, preset
from ingot.parallel.config import ParallelConfig
from ingot.training import optimizer
from ingot.training.precision import Precision
from ingot.training.recipe import Recipe, TextData, build_model, load_datasets
from tests.training import runs

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_is_one_and_reads_back(path: Path, tmp_path: Path) -> None:
    recipe = config.load(Recipe, path)
    assert recipe.name == path.stem
    config.save(recipe, tmp_path / "resolved.toml")
    assert config.load(Recipe, tmp_path / "resolved.toml") == recipe


def test_there_are_recipes() -> None:
    assert {"xor", "digits"} <= {path.stem for path in RECIPES}


def test_a_decoder_is_recognized_by_its_fields(tmp_path: Path) -> None:
    recipe = runs.text(tmp_path)
    config.save(recipe, tmp_path / "recipe.toml")
    found = config.load(Recipe, tmp_path / "recipe.toml", ["model.layers=3"])
    assert isinstance(found.model, DecoderConfig)
    assert found.model.layers == 3
    assert len(build_model(found).blocks) == 3  # pyright: ignore


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"steps": 0}, "steps"),
        ({"global_batch_size": 4, "grad_accum_steps": 3}, "multiple of grad_accum_steps"),
        ({"seed": -1}, "seed"),
        ({"dropout": 0.1}, "dropout: only applies to decoders"),
        ({"recompute": "full"}, "recompute: only applies to decoders"),
        ({"model": None}, "exactly one of model"),
        ({"init_from": Path("x")}, "exactly one of model"),
        ({"model": preset("tiny")}, "DecoderConfig cannot be trained"),
        ({"data": TextData(source="x")}, "DenseConfig cannot be trained"),
        (
            {"model": preset("tiny"), "data": TextData(source="x", seq_len=513)},
            "max_seq_len of 512",
        ),
        ({"ema_decay": 1.0}, "ema_decay"),
        ({"label_smoothing": float("nan")}, "label_smoothing"),
    ],
)
def test_invalid_options_are_rejected(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        runs.xor(**options)


def test_a_wrong_kind_names_the_right_ones() -> None:
    path = RECIPES[0]
    with pytest.raises(UnknownName, match=r"data\.kind"):
        config.load(Recipe, path, ['data={kind = "didgits"}'])


def test_text_is_tokenized_once(tmp_path: Path) -> None:
    data = runs.text(tmp_path).data
    first, again = load_datasets(data), load_datasets(data)
    assert first.fingerprint == again.fingerprint
    assert len(first.train) == len(again.train) > len(first.validation)


def test_the_cache_directory_depends_on_the_data() -> None:
    places = {
        TextData(source=source, vocab_size=vocab, validation_fraction=share).dataset_dir
        for source in ("a", "b")
        for vocab in (300, 400)
        for share in (0.1, 0.2)
    }
    assert len(places) == 8
    assert TextData(source="a", seq_len=7).dataset_dir == TextData(source="a").dataset_dir


@pytest.mark.parametrize(
    ("options", "ranks", "message"),
    [
        ({}, 0, "ranks: must be at least 1"),
        ({}, -4, "ranks: must be at least 1"),
        ({}, 2, "2 ranks: must divide the shards of the global batch, 1"),
        ({"grad_accum_steps": 4}, 8, "8 ranks: must divide the shards of the global batch, 4"),
        ({"optimizer": optimizer.MuonConfig()}, 2, "'muon' needs whole matrices"),
        ({"precision": Precision.FP16}, 2, "precision=fp16: runs on one rank only"),
    ],
)
def test_what_several_ranks_cannot_do_is_an_error(
    tmp_path: Path, options: dict[str, Any], ranks: int, message: str
) -> None:
    known = {"grad_accum_steps": 2} if "must divide" not in message else {}
    recipe = runs.text(tmp_path, **{**known, **options})
    recipe.check_ranks(1)
    with pytest.raises(ConfigError, match=message):
        recipe.check_ranks(ranks)


@pytest.mark.parametrize(
    ("schedule", "micro_batches", "message"),
    [
        ("1f1b", 1, "'1f1b' needs at least 2 micro-batches for each .* got 1"),
        ("interleaved_1f1b", 3, "needs a multiple of 2 micro-batches for each .* got 3"),
    ],
)
def test_a_pipeline_needs_micro_batches(
    tmp_path: Path, schedule: Any, micro_batches: int, message: str
) -> None:
    model = replace(runs.TINY, layers=4, tie_embeddings=False)
    parallel = ParallelConfig(pp=2, schedule=schedule)
    options: dict[str, Any] = {"model": model, "parallel": parallel}
    short = runs.text(
        tmp_path, grad_accum_steps=micro_batches, global_batch_size=micro_batches, **options
    )
    short.check_ranks(1)
    with pytest.raises(ConfigError, match=message):
        short.check_ranks(2)
    runs.text(tmp_path, grad_accum_steps=4, **options).check_ranks(4)
    tied = runs.text(tmp_path, grad_accum_steps=4, **{**options, "model": runs.TINY})
    with pytest.raises(ConfigError, match="cannot share a weight"):
        tied.check_ranks(4)


def test_shards_divide_the_micro_batches(tmp_path: Path) -> None:
    assert runs.text(tmp_path, global_batch_size=12, grad_accum_steps=12).batch_shards == 4
    with pytest.raises(ConfigError, match="batch_shards: must divide grad_accum_steps"):
        runs.text(tmp_path, grad_accum_steps=2, parallel=ParallelConfig(batch_shards=4))


def test_the_layout_may_change_on_resume_and_the_order_of_sums_may_not(tmp_path: Path) -> None:
    first = runs.text(tmp_path, grad_accum_steps=4)
    parallel = ParallelConfig(dp=2, pp=2, schedule="interleaved_1f1b", timeout_s=5.0)
    moved = replace(first, parallel=parallel)
    other = replace(first, parallel=ParallelConfig(batch_shards=2))
    assert first.with_resumable_fields(moved) == moved
    assert first.with_resumable_fields(other) != other
