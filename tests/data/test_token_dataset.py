from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.core.errors import ConfigError, DataError, IngotError
from ingot.data import token_dataset as module
from ingot.data.shard import TokenStream
from ingot.data.source import Source
from ingot.data.source_scan import SourceScan
from ingot.data.token_dataset import NAME, Index, TokenDataset, tokenize
from ingot.interop.tokenizer import Tokenizer

TEXTS = [f"document {i}: {'word ' * (i % 7)}ends\n" for i in range(60)]


def source(directory: Path, texts: list[str], name: str = "texts.jsonl") -> Source:
    path = directory / name
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return Source(path)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> TokenDataset:
    directory = tmp_path_factory.mktemp("build_inputs")
    return tokenize(
        source(directory, TEXTS), directory / "tokens", vocab_size=300, validation_fraction=0.2
    )


def documents(corpus: TokenDataset, tokens: TokenStream) -> list[str]:
    """The texts again."""
    if not len(tokens):
        return []
    ids, ends = tokens.read(0, len(tokens))
    starts = [0, *ends[:-1].tolist()]
    tokenizer = Tokenizer.load(corpus.directory)
    pieces = [ids[a:b].tolist() for a, b in zip(starts, ends.tolist(), strict=True)]
    assert all(piece[-1] == corpus.eos_id for piece in pieces)
    return [tokenizer.decode(piece) for piece in pieces]


def test_all_documents_are_in_one_part_in_their_order(made: TokenDataset) -> None:
    train, validation = documents(made, made.train), documents(made, made.validation)
    assert train == [text for text in TEXTS if text in train]
    assert validation == [text for text in TEXTS if text in validation]
    assert len(train) + len(validation) == len(TEXTS) == made.index.build_inputs.documents
    assert 4 <= len(validation) <= 20
    assert made.vocab_size == 300


@given(texts=st.lists(st.text(min_size=1, max_size=40), min_size=1, max_size=8))
@settings(max_examples=40)
def test_text_to_tokens_and_back(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str]
) -> None:
    directory = tmp_path_factory.mktemp("round")
    texts = [text.replace("<|endoftext|>", "") or "a" for text in texts]
    found = tokenize(
        source(directory, texts), directory / "tokens", vocab_size=257, validation_fraction=0
    )
    assert documents(found, found.train) == texts
    assert len(found.validation) == 0


def test_many_shards_are_one_stream(
    tmp_path: Path, made: TokenDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SHARD_TOKENS", 50)
    monkeypatch.setattr(module, "BATCH_BYTES", 200)
    found = tokenize(
        source(tmp_path, TEXTS), tmp_path / "tokens", vocab_size=300, validation_fraction=0.2
    )
    assert len(found.train.shards) > 5
    assert documents(found, found.train) == documents(made, made.train)
    whole, pieces = (c.train.read(0, len(c.train)) for c in (made, found))
    assert all((a == b).all() for a, b in zip(whole, pieces, strict=True))


def test_an_existing_dataset_of_the_same_inputs_is_reused(
    tmp_path: Path, made: TokenDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = tokenize(
        source(tmp_path, TEXTS), tmp_path / "tokens", vocab_size=300, validation_fraction=0.2
    )
    assert again.hash == made.hash
    monkeypatch.setattr(module, "_write", None)  # nothing is written
    same = source(tmp_path, TEXTS, "other.jsonl")
    assert tokenize(same, made.directory, vocab_size=300, validation_fraction=0.2).hash == made.hash


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"vocab_size": 301}, "vocab_size"),
        ({"validation_fraction": 0.1}, "validation_fraction"),
        ({"texts": [*TEXTS, "one more"]}, "source_sha256, documents, bytes"),
        ({"texts": [*TEXTS[:-1], TEXTS[-1].replace("ends", "endy")]}, "source_sha256"),
        ({"texts": TEXTS[::-1]}, "source_sha256"),
    ],
    ids=["vocab", "validation", "more", "changed", "order"],
)
def test_anything_else_is_not(
    tmp_path: Path, made: TokenDataset, change: dict[str, Any], named: str
) -> None:
    arguments = {"texts": TEXTS, "vocab_size": 300, "validation_fraction": 0.2, **change}
    texts = source(tmp_path, arguments.pop("texts"))
    with pytest.raises(DataError, match=f"{named} differ"):
        tokenize(texts, made.directory, **arguments)


def test_another_tokenizer_is_another_corpus(tmp_path: Path, made: TokenDataset) -> None:
    found = tokenize(source(tmp_path, TEXTS), tmp_path / "b", tokenizer=made.directory)
    assert found.index.tokenizer_sha256 == made.index.tokenizer_sha256
    assert found.hash != made.hash
    assert (found.vocab_size, found.eos_id) == (300, 0)


def test_copies_of_one_document_cannot_be_split(tmp_path: Path, made: TokenDataset) -> None:
    with pytest.raises(DataError, match="no documents are left to train on") as caught:
        tokenize(source(tmp_path, ["same"] * 5), tmp_path / "tokens", tokenizer=made.directory)
    assert "--validation 0" in caught.value.hint
    assert not (tmp_path / "tokens").exists()


def test_the_vocabulary_is_trained_on_a_share_of_too_much_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    train = module.DocumentTokenizer.train

    def watched(documents: Iterator[str], size: int) -> Any:
        read.extend(documents)
        return train(iter(read), size)

    monkeypatch.setattr(module.DocumentTokenizer, "train", watched)
    monkeypatch.setattr(module, "MAX_TRAINING_BYTES", sum(map(len, TEXTS)) // 2)
    found = tokenize(
        source(tmp_path, TEXTS), tmp_path / "tokens", vocab_size=300, validation_fraction=0.2
    )
    assert 10 <= len(read) <= 40
    assert set(read) <= set(documents(found, found.train))


@given(data=st.data())
@settings(max_examples=150)
def test_a_wrong_byte_anywhere_is_found_out_or_harmless(
    made: TokenDataset, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    directory = tmp_path_factory.mktemp("broken") / "tokens"
    shutil.copytree(made.directory, directory)
    names = sorted(path.name for path in directory.iterdir())
    path = directory / data.draw(st.sampled_from(names))
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] = data.draw(st.integers(0, 255))
    cut = data.draw(st.sampled_from([len(content), place]))
    path.write_bytes(content[:cut])
    with contextlib.suppress(DataError):
        found = TokenDataset(directory)
        found.train.check()
        found.validation.check()
        assert found.hash == made.hash
        for part in ("train", "validation"):
            ours, theirs = getattr(found, part), getattr(made, part)
            assert (ours.read(0, len(ours))[0] == theirs.read(0, len(theirs))[0]).all()


def forged(directory: Path, **changes: Any) -> None:
    """An index with other facts, and the hash that belongs to them."""
    table = json.loads((directory / NAME).read_bytes())
    table = {**table, **changes}
    del table["hash"]
    with contextlib.suppress(msgspec.ValidationError):
        table["hash"] = msgspec.convert(table, Index).hash()
    (directory / NAME).write_text(json.dumps(table))


@pytest.mark.parametrize(
    "changes",
    [
        {"vocab_size": 0},
        {"vocab_size": -5},
        {"vocab_size": 1 << 40},
        {"vocab_size": 10},
        {"itemsize": 3},
        {"itemsize": 1 << 60},
        {"format": 2},
        {"format": None},
        {"train": 5},
        {"train": [{"documents": 1 << 62, "tokens": 1 << 62, "sha256": ""}]},
        {"train": [{"documents": 1, "tokens": -1, "sha256": ""}]},
        {"validation": [{"path": "/etc/passwd"}]},
        {"unknown": 1},
    ],
    ids=str,
)
def test_a_malicious_index_is_rejected(
    tmp_path: Path, made: TokenDataset, changes: dict[str, Any]
) -> None:
    directory = tmp_path / "tokens"
    shutil.copytree(made.directory, directory)
    forged(directory, **changes)
    with pytest.raises(DataError) as caught:
        TokenDataset(directory).train.check()
    assert "ingot tokenize" in caught.value.hint


def test_tokens_of_three_bytes_are_refused_though_their_number_is_right(
    tmp_path: Path, made: TokenDataset
) -> None:
    directory = tmp_path / "tokens"
    shutil.copytree(made.directory, directory)
    facts = msgspec.to_builtins(made.index.train[0])
    size = (directory / "train-00000.tokens").stat().st_size
    count = next(d for d in range(1, 9) if (size - 8 * d) % 3 == 0)
    forged(
        directory,
        itemsize=3,
        train=[{**facts, "documents": count, "tokens": (size - 8 * count) // 3}],
    )
    with pytest.raises(DataError, match="3 bytes per token"):
        TokenDataset(directory)


@pytest.mark.parametrize(
    "name", ["vocab_size", "eos_id", "tokenizer_sha256", "build_inputs", "validation"]
)
def test_a_fact_that_was_changed_is_found_out(
    tmp_path: Path, made: TokenDataset, name: str
) -> None:
    directory = tmp_path / "tokens"
    shutil.copytree(made.directory, directory)
    table = json.loads((directory / NAME).read_bytes())
    other = {"vocab_size": 301, "eos_id": 1, "tokenizer_sha256": "", "validation": []}
    table[name] = other.get(name, {**table["build_inputs"], "field": "body"})
    (directory / NAME).write_text(json.dumps(table))
    with pytest.raises(DataError, match="hash does not match"):
        TokenDataset(directory)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"[" * 100_000, b"\xff", b"null"])
def test_an_index_that_is_none(tmp_path: Path, made: TokenDataset, content: bytes) -> None:
    shutil.copytree(made.directory, tmp_path / "tokens")
    (tmp_path / "tokens" / NAME).write_bytes(content)
    with pytest.raises(DataError, match=NAME):
        TokenDataset(tmp_path / "tokens")


def test_missing_files_are_named(tmp_path: Path, made: TokenDataset) -> None:
    with pytest.raises(DataError, match=NAME) as caught:
        TokenDataset(tmp_path / "nowhere")
    assert "`ingot tokenize`" in caught.value.hint
    for name in ("train-00000.tokens", "validation-00000.tokens", "tokenizer.json"):
        directory = tmp_path / name
        shutil.copytree(made.directory, directory)
        (directory / name).unlink()
        with pytest.raises(DataError, match=name):
            TokenDataset(directory)


def test_a_source_without_text(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="contains no text"):
        tokenize(source(tmp_path, []), tmp_path / "tokens")
    assert not (tmp_path / "tokens").exists()


@pytest.mark.parametrize("trained", [True, False])
def test_a_source_that_changes_while_it_is_read(
    tmp_path: Path, made: TokenDataset, monkeypatch: pytest.MonkeyPatch, trained: bool
) -> None:
    texts = source(tmp_path, TEXTS)

    def then_changed(*arguments: Any) -> Any:
        found = SourceScan.of(*arguments)
        source(tmp_path, [*TEXTS[:-1], "another"])
        return found

    class Changing:
        of = then_changed

    monkeypatch.setattr(module, "SourceScan", Changing)
    with pytest.raises(DataError, match="has changed while it was read"):
        tokenize(texts, tmp_path / "tokens", tokenizer=None if trained else made.directory)
    assert [path.name for path in tmp_path.iterdir()] == ["texts.jsonl"]


def test_a_directory_with_something_else_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SourceScan", None)
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens/mine").touch()
    with pytest.raises(IngotError, match="exists already"):
        tokenize(source(tmp_path, TEXTS), tmp_path / "tokens")


@pytest.mark.parametrize("what", ["shard", "vocabulary"])
def test_a_full_disk_leaves_no_files(tmp_path: Path, made: TokenDataset, what: str) -> None:
    """No file may grow beyond what the tokenizer needs, or half of it."""
    source(tmp_path, TEXTS * 20)
    room = (made.directory / "tokenizer.json").stat().st_size
    given, limit = (repr(str(made.directory)), room) if what == "shard" else (None, room // 2)
    code = f"""
        import resource
        from pathlib import Path
        from ingot.core.errors import IngotError
        from ingot.data import Source, tokenize

        resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
        given = {given}
        try:
            tokenize(Source("texts.jsonl"), Path("tokens"), tokenizer=given and Path(given))
        except IngotError as error:
            print(error)
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "cannot write tokens: File too large" in run.stdout
    assert "hint: make room" in run.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["texts.jsonl"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"validation_fraction": -0.1},
        {"validation_fraction": 0.6},
        {"validation_fraction": float("nan")},
        {"vocab_size": 5},
        {"vocab_size": 300, "tokenizer": Path("model")},
    ],
    ids=str,
)
def test_invalid_options_are_rejected(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        tokenize(source(tmp_path, TEXTS), tmp_path / "tokens", **wrong)
