from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from ingot.core import lineage
from ingot.core.errors import IngotError
from ingot.interop import directory
from ingot.interop.directory import DirectoryError

TENSORS = {"a": torch.arange(6).reshape(2, 3).bfloat16(), "b": torch.ones(5)}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama"}')
    (path / "tokenizer.json").write_text("{}")
    save_file(TENSORS, path / "model.safetensors")
    return path


def shard(source: Path, **weight_map: Any) -> None:
    (source / "model.safetensors").unlink()
    save_file({"a": TENSORS["a"]}, source / "one.safetensors")
    save_file({"b": TENSORS["b"]}, source / "two.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"} | weight_map}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))


def test_files_are_copied_and_hashed(source: Path, tmp_path: Path) -> None:
    directory.copy_model(source, tmp_path / "out")
    (step,) = lineage.read(tmp_path / "out").steps
    assert (step["step"], step["source"]) == ("import", "source")
    assert step["quantization"] == {"bfloat16": 1, "float32": 1}
    for path in source.iterdir():
        content = path.read_bytes()
        assert (tmp_path / "out" / path.name).read_bytes() == content
        assert step["files"][path.name] == hashlib.sha256(content).hexdigest()
    assert directory.count_parameters(tmp_path / "out") == 11


def test_pooling_of_sentence_transformers_is_copied(source: Path, tmp_path: Path) -> None:
    (source / "1_Pooling").mkdir()
    (source / "1_Pooling/config.json").write_text("{}")
    (source / "1_Pooling/code.py").write_text("x")
    directory.copy_model(source, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out/1_Pooling").iterdir()] == ["config.json"]
    (step,) = lineage.read(tmp_path / "out").steps
    assert step["files"]["1_Pooling/config.json"] == hashlib.sha256(b"{}").hexdigest()
    before = directory.hash_model(source)
    (source / "1_Pooling/config.json").write_text("{ }")
    assert directory.hash_model(source) != before


def test_code_pickles_and_unknown_files_are_not_copied(source: Path, tmp_path: Path) -> None:
    for name in ("pytorch_model.bin", "modeling.py", "other.safetensors", "notes.txt", ".hidden"):
        (source / name).write_text("x")
    directory.copy_model(source, tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"config.json", "tokenizer.json", "model.safetensors", "ingot.json"}


def test_shards_are_copied_with_their_index(source: Path, tmp_path: Path) -> None:
    shard(source)
    directory.copy_model(source, tmp_path / "out")
    assert torch.equal(load_file(tmp_path / "out" / "two.safetensors")["b"], TENSORS["b"])
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()
    assert directory.count_parameters(tmp_path / "out") == 11


def test_symbolic_links_of_a_hub_cache_are_followed(source: Path, tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes((source / "model.safetensors").read_bytes())
    (source / "model.safetensors").unlink()
    (source / "model.safetensors").symlink_to(tmp_path / "blob")
    directory.copy_model(source, tmp_path / "out")
    assert not (tmp_path / "out" / "model.safetensors").is_symlink()
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["a"], TENSORS["a"])


def test_lineage_is_continued(source: Path, tmp_path: Path) -> None:
    directory.copy_model(source, tmp_path / "one")
    directory.copy_model(tmp_path / "one", tmp_path / "two")
    steps = lineage.read(tmp_path / "two").steps
    assert [step["source"] for step in steps] == ["source", "one"]
    assert "ingot.json" not in steps[1]["files"]


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"b": "three.safetensors"}, "cannot read .*three.safetensors"),
        ({"b": "../two.safetensors"}, "invalid shard name"),
        ({"b": "/two.safetensors"}, "invalid shard name"),
        ({"b": "two.bin"}, "invalid shard name"),
        ({"b": 5}, "invalid shard name"),
        ({"b": "one.safetensors"}, "tensors that are missing"),
        ({"c": "one.safetensors"}, "tensors that are missing"),
    ],
    ids=str,
)
def test_inconsistent_index_raises(
    source: Path, tmp_path: Path, weight_map: dict[str, Any], message: str
) -> None:
    shard(source, **weight_map)
    with pytest.raises(IngotError, match=message):
        directory.copy_model(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_missing_files_raise(source: Path, tmp_path: Path) -> None:
    with pytest.raises(DirectoryError, match=r"config\.json not found"):
        directory.copy_model(tmp_path / "none", tmp_path / "out")
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    with pytest.raises(IngotError, match="weights as pickles"):
        directory.copy_model(source, tmp_path / "out")
    (source / "pytorch_model.bin").unlink()
    with pytest.raises(IngotError, match=r"no model\.safetensors in \S+source\n"):
        directory.model_files(source)
    (source / "config.json").unlink()
    with pytest.raises(DirectoryError, match=r"config\.json not found"):
        directory.copy_model(source, tmp_path / "out")


@pytest.mark.parametrize("content", [b"{", b"[]", b"{}", b'{"model_type": 5}', b"[" * 100_000])
def test_malformed_config_raises(source: Path, tmp_path: Path, content: bytes) -> None:
    (source / "config.json").write_bytes(content)
    with pytest.raises(IngotError, match=r"config.json"):
        directory.copy_model(source, tmp_path / "out")


def test_malformed_headers_raise(source: Path, tmp_path: Path) -> None:
    path = source / "model.safetensors"
    good = path.read_bytes()
    spans = b'{"a":{"dtype":"F32","shape":[%d],"data_offsets":[0,%d]}}'
    wrong = (spans % (3, 8), spans % (2, 80))
    lies = [
        b"",
        good[:-1],
        good + b"x",
        struct.pack("<Q", 2**60) + good[8:],
        struct.pack("<Q", 60) + (spans % (2**60, 2**62))[:60],
        *(struct.pack("<Q", len(lie)) + lie + bytes(8) for lie in wrong),
    ]
    for lie in lies:
        path.write_bytes(lie)
        with pytest.raises(IngotError, match="is not safetensors"):
            directory.copy_model(source, tmp_path / "out")
        assert not (tmp_path / "out").exists()


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 200), st.binary(min_size=1, max_size=8)), max_size=3))
def test_damaged_weights_load_or_raise(
    source: Path, tmp_path: Path, changes: list[tuple[int, bytes]]
) -> None:
    content = bytearray((tmp_path / "good").read_bytes() if (tmp_path / "good").exists() else b"")
    if not content:
        content = bytearray((source / "model.safetensors").read_bytes())
        (tmp_path / "good").write_bytes(content)
    for at, new in changes:
        content[at : at + len(new)] = new
    (source / "model.safetensors").write_bytes(content)
    try:
        assert directory.count_parameters(source) >= 0
    except IngotError:
        assert changes


def test_the_hash_changes_with_what_the_model_computes(source: Path) -> None:
    before = directory.hash_model(source)
    lineage.append(source, "verify")
    (source / "README.md").write_text("A model.")
    assert directory.hash_model(source) == before
    (source / "chat_template.jinja").write_text("{{ messages }}")
    template = directory.hash_model(source)
    save_file({**TENSORS, "b": -TENSORS["b"]}, source / "model.safetensors")
    assert len({before, template, directory.hash_model(source)}) == 3
