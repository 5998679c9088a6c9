"""Recipes: those of the repository, and those that make no sense."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ingot.core import config
from ingot.core.errors import ConfigError, UnknownName
from ingot.nn import DecoderConfig, preset
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
