from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.core.errors import ConfigError, DataError
from ingot.data.source import Source
from ingot.data.source_scan import SourceScan

TEXTS = [f"document {i}\nends\n" for i in range(300)]


def source(directory: Path, texts: list[str]) -> Source:
    path = directory / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return Source(path)


def parts(directory: Path, texts: list[str], fraction: float) -> tuple[list[str], list[str]]:
    found = list(SourceScan.of(source(directory, texts), fraction).read())
    train = [document.text for document in found if document.split == "train"]
    return train, [document.text for document in found if document.split == "validation"]


@given(
    texts=st.lists(st.text(min_size=1, max_size=9), min_size=2, max_size=12),
    fraction=st.sampled_from([0.0, 0.001, 0.1, 0.5]),
)
def test_every_document_is_on_one_side(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], fraction: float
) -> None:
    train, validation = parts(tmp_path_factory.mktemp("survey"), texts, fraction)
    assert sorted(train + validation) == sorted(texts)
    assert not set(train) & set(validation)
    assert bool(validation) == (fraction > 0)
    assert train or len(set(texts)) == 1


def test_of_two_documents_one_is_for_validation(tmp_path: Path) -> None:
    for pair in pairwise(TEXTS[:20]):
        for fraction in (0.001, 0.5):
            train, validation = parts(tmp_path, list(pair), fraction)
            assert (len(train), len(validation)) == (1, 1)


def test_about_the_fraction_is_for_validation(tmp_path: Path) -> None:
    _, validation = parts(tmp_path, TEXTS, 0.1)
    assert 15 <= len(validation) <= 50


def test_documents_do_not_change_sides_when_others_come(tmp_path: Path) -> None:
    _, before = parts(tmp_path, TEXTS, 0.1)
    _, after = parts(tmp_path, [*(f"new {i}" for i in range(99)), *TEXTS[::-1]], 0.1)
    assert set(after) & set(TEXTS) == set(before)


def test_a_larger_fraction_includes_the_smaller_one(tmp_path: Path) -> None:
    assert set(parts(tmp_path, TEXTS, 0.1)[1]) < set(parts(tmp_path, TEXTS, 0.2)[1])


@pytest.mark.parametrize(
    ("text", "train"), [("one\ntwo\nthree\n", "one\ntwo\n"), ("word", "wo"), ("a", "a")]
)
def test_of_one_document_the_end_is_for_validation(tmp_path: Path, text: str, train: str) -> None:
    rest = [text[len(train) :]] if text != train else []
    assert parts(tmp_path, [text], 0.3) == ([train], rest)


def test_a_share_of_the_documents_is_of_both_parts(tmp_path: Path) -> None:
    documents = list(SourceScan.of(source(tmp_path, TEXTS), 0.3).read())
    assert all(document.is_sampled(1.0) for document in documents)
    assert not any(document.is_sampled(0.0) for document in documents)
    for part in ("train", "validation"):
        chosen = [document.is_sampled(0.5) for document in documents if document.split == part]
        assert 0.3 < sum(chosen) / len(chosen) < 0.7


def test_counts_and_hash(tmp_path: Path) -> None:
    found = SourceScan.of(source(tmp_path, ["ä", "bc"]), 0.0)
    assert (found.documents, found.bytes) == (2, 4)
    assert [document.bytes for document in found.read()] == [2, 2]
    hashes = {SourceScan.of(source(tmp_path, t), 0.0).sha256 for t in (["ab", "c"], ["a", "bc"])}
    assert len(hashes | {found.sha256}) == 3


def test_a_source_that_changes_meanwhile(tmp_path: Path) -> None:
    found = SourceScan.of(source(tmp_path, TEXTS), 0.1)
    source(tmp_path, [*TEXTS[:-1], "another"])
    with pytest.raises(DataError, match="has changed while it was read"):
        list(found.read())


def test_skipped_files_are_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source(tmp_path, TEXTS)
    (tmp_path / "image").write_bytes(b"\xff\0")
    list(SourceScan.of(Source(tmp_path), 0.1).read())
    assert caplog.text.count("skipped 1 files") == 1


def test_no_text_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="contains no text"):
        SourceScan.of(source(tmp_path, [""]), 0.1)


@pytest.mark.parametrize("fraction", [-0.1, 0.6, float("nan")])
def test_an_invalid_fraction_is_rejected(tmp_path: Path, fraction: float) -> None:
    with pytest.raises(ConfigError, match=r"give 0 to 0\.5"):
        SourceScan.of(source(tmp_path, TEXTS), fraction)
