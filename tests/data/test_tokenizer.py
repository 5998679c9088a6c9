from __future__ import annotations

import json
import random
import re
import time
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from ingot.core.errors import ConfigError, DataError
from ingot.data.tokenizer import EOS, DocumentTokenizer, _split_long_words, copy_files, digest
from ingot.interop.tokenizer import Tokenizer

TEXT = ["the cat sat on the mat\n", "    def sit(self) -> None:\n        return None\n"] * 20


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vocabulary")
    DocumentTokenizer.train(iter(TEXT), 300).save(path)
    return path


@given(text=st.text(max_size=30))
def test_any_text_can_be_written_and_ends(directory: Path, text: str) -> None:
    (ids,) = DocumentTokenizer.load(directory).encode([text])
    assert ids[-1] == 0
    assert Tokenizer.load(directory).decode(ids) == text.replace(EOS, "")


def test_a_document_is_tokenized_like_a_prompt_followed_by_eos(directory: Path) -> None:
    ours, served = DocumentTokenizer.load(directory), Tokenizer.load(directory)
    assert served.eos_token_ids == {ours.eos_id} == {0}
    assert served.vocab_size == ours.vocab_size
    for text in TEXT[:2]:
        assert ours.encode([text]) == [[*served.encode(text), 0]]


def test_the_same_text_trains_the_same_vocabulary(directory: Path, tmp_path: Path) -> None:
    DocumentTokenizer.train(iter(TEXT), 300).save(tmp_path)
    assert digest(tmp_path) == digest(directory)


@given(text=st.text(st.sampled_from("ab \n"), max_size=900))
def test_long_words_are_split_for_training(text: str) -> None:
    parts = list(_split_long_words(text))
    assert "".join(parts) == text
    assert all(max(map(len, re.findall(r"\S+|\s+", piece)), default=0) < 512 for piece in parts)


def test_a_word_of_a_megabyte_takes_no_minutes() -> None:
    letters = random.Random(0).choices("abcdefghij", k=1 << 20)
    start = time.process_time()
    DocumentTokenizer.train(iter(["".join(letters)]), 500)
    assert time.process_time() - start < 30  # uncut, with 1,000 tokens, it took 188


def model(directory: Path, eos: object = "</s>") -> Path:
    """A tokenizer that begins each text, and would cut it and fill it up."""
    inner = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"<s>": 0, "</s>": 1, "<unk>": 2, "cat": 9}, unk_token="<unk>")
    )
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.add_special_tokens(["<s>", "</s>"])
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    inner.enable_truncation(2)
    inner.enable_padding(length=50)
    inner.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    return directory


def test_bos_is_kept_without_truncation_or_padding(tmp_path: Path) -> None:
    found = DocumentTokenizer.load(model(tmp_path))
    assert found.vocab_size == 10
    assert found.encode(["cat dog cat", "cat </s>"]) == [[0, 9, 2, 9, 1], [0, 9, 1]]


def test_an_end_as_older_versions_write_it(tmp_path: Path) -> None:
    assert DocumentTokenizer.load(model(tmp_path, {"content": "</s>"})).eos_id == 1


@pytest.mark.parametrize("eos", [None, "unknown", 5])
def test_a_model_without_an_end(tmp_path: Path, eos: object) -> None:
    found = DocumentTokenizer.load(model(tmp_path, eos))
    assert found.eos_id is None
    assert found.encode(["cat"]) == [[0, 9]]


def test_the_files_go_with_it(directory: Path, tmp_path: Path) -> None:
    copy_files(directory, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"tokenizer.json", "tokenizer_config.json"}
    assert digest(tmp_path) == digest(directory)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", b""),
        ("tokenizer.json", b"{}"),
        ("tokenizer.json", b"\xff"),
        ("tokenizer_config.json", b"{"),
        ("tokenizer_config.json", b"[]"),
        ("tokenizer_config.json", b"[" * 100_000),
    ],
)
def test_broken_files_are_named(directory: Path, tmp_path: Path, name: str, content: bytes) -> None:
    copy_files(directory, tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=name) as caught:
        DocumentTokenizer.load(tmp_path)
    assert "--vocab-size" in caught.value.hint


def test_no_tokenizer_is_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file"):
        DocumentTokenizer.load(tmp_path)


@pytest.mark.parametrize("size", [0, 256, 1 << 30])
def test_an_invalid_vocab_size_is_rejected(size: int) -> None:
    with pytest.raises(ConfigError, match="give 257 to"):
        DocumentTokenizer.train(iter(TEXT), size)
