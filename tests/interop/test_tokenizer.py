from __future__ import annotations

import json
import random
import shutil
import sysconfig
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from ingot.interop import tokenizer as module
from ingot.interop.chat import ChatError
from ingot.interop.tokenizer import Tokenizer, TokenizerError

LIBRARY = Path(sysconfig.get_path("stdlib"))


@pytest.fixture(scope="session")
def tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.load(smollm2)


def streamed(tokenizer: Tokenizer, ids: list[int]) -> str:
    stream = tokenizer.decode_stream()
    return "".join([*map(stream.feed, ids), stream.finish()])


def test_real_text_round_trips_whole_and_streamed(tokenizer: Tokenizer) -> None:
    for name in ("argparse.py", "typing.py", "test/test_unicodedata.py", "this.py"):
        text = (LIBRARY / name).read_text() if (LIBRARY / name).exists() else name
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert streamed(tokenizer, ids) == text


def test_padding_and_truncation_of_the_file_are_ignored(smollm2: Path, tmp_path: Path) -> None:
    """As in transformers: a prompt is neither cut nor padded unless asked."""
    inner = tokenizers.Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    inner.enable_padding(length=16)
    inner.enable_truncation(4)
    inner.save(str(tmp_path / "tokenizer.json"))
    for text in ("Hello", "Hello " * 20):
        ids = Tokenizer.load(smollm2).encode(text)
        assert Tokenizer.load(tmp_path).encode(text) == ids
    assert len(ids) > 16


@given(st.text())
def test_any_text_round_trips(tokenizer: Tokenizer, text: str) -> None:
    """But for bytes that never occurred where SmolLM2's vocabulary was made, 21 of the 256."""
    alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    clean = text.encode("utf-8", "replace").decode()
    letters = {letter for part, _ in alphabet.pre_tokenize_str(clean) for letter in part}
    ids = tokenizer.encode(text)
    if all(tokenizer.inner.token_to_id(letter) is not None for letter in letters):
        assert tokenizer.decode(ids, skip_special_tokens=False) == clean
    assert streamed(tokenizer, ids) == tokenizer.decode(ids)


@given(st.lists(st.integers(0, 49151), max_size=30))
def test_streamed_text_equals_decoded_text(tokenizer: Tokenizer, ids: list[int]) -> None:
    assert streamed(tokenizer, ids) == tokenizer.decode(ids)


def test_stream_yields_whole_characters(tokenizer: Tokenizer) -> None:
    text = "日本語 😀👨‍👩‍👧 né"
    ids = tokenizer.encode(text)
    stream = tokenizer.decode_stream()
    pieces = [stream.feed(token) for token in ids]
    assert len(ids) > len(text)  # characters are cut into tokens, or this shows nothing
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == text
    assert stream.finish() == ""


def test_incomplete_character_is_returned_by_finish(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a😀")[:-1]
    stream = tokenizer.decode_stream()
    assert "".join(map(stream.feed, ids)) == "a"
    assert stream.finish() == "\ufffd"
    assert tokenizer.decode_stream().finish() == ""


def test_endless_invalid_tokens_are_returned_at_constant_cost(tokenizer: Tokenizer) -> None:
    broken = tokenizer.inner.token_to_id("Ģ")  # the byte 0x80, which begins no character
    assert broken is not None
    stream = tokenizer.decode_stream()

    def feed(count: int) -> float:
        start = time.perf_counter()
        given = "".join(stream.feed(broken) for _ in range(count))
        assert len(given) >= count - module.MAX_PENDING_TOKENS
        return time.perf_counter() - start

    first = feed(500)
    feed(20_000)
    assert feed(500) < 20 * first


def test_a_space_after_a_skipped_token_is_kept() -> None:
    """Metaspace drops the space at the beginning of a text, and only there."""
    vocabulary = {"▁a": 0, "▁b": 1, "<s>": 2}
    inner = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="▁a"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    inner.add_special_tokens(["<s>"])
    made = Tokenizer(inner=inner)
    ids = [2, 0, 2, 1, 2, 2, 1]
    assert streamed(made, ids) == made.decode(ids) == "a b b"


def test_lone_surrogates_are_replaced(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a?b"


def test_properties_of_smollm2(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 49152
    assert tokenizer.eos_token_ids == {2}
    assert tokenizer.special_tokens["eos_token"] == "<|im_end|>"


def copied(smollm2: Path, tmp_path: Path, **changes: Any) -> Path:
    """The tokenizer's files with changed JSON; None takes a file away."""
    for name in ("tokenizer", "tokenizer_config", "generation_config", "config"):
        change = changes.get(name, {})
        if isinstance(change, bytes):
            (tmp_path / f"{name}.json").write_bytes(change)
        elif change:
            content = json.loads((smollm2 / f"{name}.json").read_text()) | change
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        elif change is not None:
            shutil.copy(smollm2 / f"{name}.json", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "ends"),
    [
        ({"generation_config": {"eos_token_id": [0, 2]}}, {0, 2}),
        ({"generation_config": None, "config": {"eos_token_id": 5}}, {5}),
        ({"generation_config": None, "config": {"eos_token_id": [5, 6]}}, {5, 6}),
        ({"generation_config": None, "config": None}, {2}),
        ({"generation_config": {"eos_token_id": None}, "config": {"eos_token_id": 7}}, {7}),
    ],
)
def test_eos_token_ids_are_read(
    smollm2: Path, tmp_path: Path, changes: dict[str, Any], ends: set[int]
) -> None:
    assert Tokenizer.load(copied(smollm2, tmp_path, **changes)).eos_token_ids == ends


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer": None}, "tokenizer.json not found"),
        ({"tokenizer": b"{"}, "cannot read .*tokenizer.json"),
        ({"tokenizer": b"\xff\xfe"}, "cannot read .*tokenizer.json"),
        ({"tokenizer": {"model": {"type": "BPE", "vocab": {}, "merges": [["a", "b"]]}}}, "cannot"),
        ({"tokenizer_config": b"[1]"}, "not an object"),
        ({"tokenizer_config": b"[" * 100_000}, "cannot read .*tokenizer_config.json"),
        ({"generation_config": {"eos_token_id": "2"}}, "eos_token_id is"),
        ({"generation_config": {"eos_token_id": [2, -1]}}, "eos_token_id is"),
        ({"generation_config": {"eos_token_id": True}}, "eos_token_id is"),
    ],
    ids=str,
)
def test_malformed_files_raise_with_a_hint(
    smollm2: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(TokenizerError, match=message) as raised:
        Tokenizer.load(copied(smollm2, tmp_path, **changes))
    assert raised.value.hint


def test_missing_directory_raises(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="directory not found"):
        Tokenizer.load(tmp_path / "nowhere")


def test_oversized_file_raises(
    smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_TOKENIZER_BYTES", 1000)
    with pytest.raises(TokenizerError, match="larger than 1,000 bytes"):
        Tokenizer.load(copied(smollm2, tmp_path))


def test_damaged_tokenizers_load_or_raise(smollm2: Path, tmp_path: Path) -> None:
    """The head of the file holds everything but the vocabulary."""
    small = json.loads((smollm2 / "tokenizer.json").read_text())
    small["model"]["vocab"] = dict(list(small["model"]["vocab"].items())[:300])
    small["model"]["merges"] = []
    good = json.dumps(small).encode()
    random_ = random.Random(5)
    for _ in range(200):
        content = bytearray(good)
        for _ in range(random_.randrange(1, 4)):
            content[random_.randrange(len(content))] = random_.randrange(256)
        (tmp_path / "tokenizer.json").write_bytes(content)
        with suppress(TokenizerError):
            Tokenizer.load(tmp_path).encode("hello 123")


def test_chat_template_is_read_from_either_file(smollm2: Path, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    settings = {"chat_template": [{"name": "default", "template": "{{ eos_token }}!"}]}
    directory = copied(smollm2, tmp_path, tokenizer_config=settings)
    assert Tokenizer.load(directory).render_chat(messages) == "<|im_end|>!"
    (directory / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert Tokenizer.load(directory).render_chat(messages) == "Hi"


def test_chat_without_a_template_raises(smollm2: Path, tmp_path: Path) -> None:
    directory = copied(smollm2, tmp_path, tokenizer_config={"chat_template": None})
    with pytest.raises(ChatError, match="no chat template"):
        Tokenizer.load(directory).encode_chat([])


def test_special_tokens_may_be_written_as_objects(smollm2: Path, tmp_path: Path) -> None:
    change = {"bos_token": {"content": "<s>", "special": True}, "unk_token": 5}
    special = Tokenizer.load(copied(smollm2, tmp_path, tokenizer_config=change)).special_tokens
    assert special["bos_token"] == "<s>"
    assert "unk_token" not in special
