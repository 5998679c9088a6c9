from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import transformers

from ingot.interop import gguf, gguf_vocabulary
from ingot.interop.gguf_file import GgufError
from ingot.interop.tokenizer import Tokenizer
from tests.interop import conftest
from tests.interop.conftest import Small

COUNT = len(conftest.TOKENS)


def imported(small: Small, tmp_path: Path, **change: Any) -> Tokenizer:
    renamed = {f"tokenizer.ggml.{name}": value for name, value in change.items()}
    gguf.convert(small(change=renamed), tmp_path / "out")
    return Tokenizer.load(tmp_path / "out")


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("gpt-2", "Don 't ĠDON ' T Ġ12345 Ġa Ċ Ċ b ĠĠ Ġ!?"),
        ("smollm", "Don 't ĠDON ' T Ġ 1 2 3 4 5 Ġa Ċ Ċ b ĠĠ Ġ!?"),
        ("llama-bpe", "Don 't ĠDON 'T Ġ 123 45 Ġa ĊĊ b ĠĠ Ġ!?"),
        ("qwen2", "Don 't ĠDON 'T Ġ 1 2 3 4 5 Ġa ĊĊ b ĠĠ Ġ!?"),
        ("tekken", "Don 't ĠDON 'T Ġ 1 2 3 4 5 Ġa ĊĊ b ĠĠ Ġ!?"),
    ],
)
def test_pre_tokenizers_split_text(small: Small, tmp_path: Path, rule: str, words: str) -> None:
    tokenizer = imported(small, tmp_path, pre=rule)
    cut = tokenizer.inner.pre_tokenizer.pre_tokenize_str("Don't DON'T 12345 a\n\nb   !?")
    assert " ".join(word for word, _ in cut) == words


def test_every_pre_tokenizer_round_trips_text(small: Small, tmp_path: Path) -> None:
    text = "hello  hello\r\n\t日本 é 'll 1234 <|end|>"
    for rule in gguf_vocabulary.PRE_TOKENIZERS:
        gguf.convert(small(change={"tokenizer.ggml.pre": rule}), tmp_path / rule)
        tokenizer = Tokenizer.load(tmp_path / rule)
        assert (
            tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False).removeprefix(
                "<|begin|>"
            )
            == text
        )


def test_merges_and_special_tokens_apply(small: Small, tmp_path: Path) -> None:
    tokenizer = imported(small, tmp_path)
    tokens = [conftest.TOKENS[i] for i in tokenizer.encode("hello hello<|end|>he")]
    assert tokens == ["hello", "Ġhello", "<|end|>", "he"]
    assert tokenizer.decode(tokenizer.encode("a<|end|>b")) == "ab"
    assert tokenizer.eos_token_ids == {1}


def test_user_defined_tokens_are_matched_and_decoded(small: Small, tmp_path: Path) -> None:
    kinds = [3, 3, 4] + [1] * (COUNT - 3)
    tokenizer = imported(small, tmp_path, token_type=kinds)
    ids = tokenizer.encode("a<|turn|>b<|end|>")
    assert ids[1] == 2
    assert tokenizer.decode(ids) == "a<|turn|>b"


@pytest.mark.parametrize(
    ("rule", "begin", "end", "expected"),
    [
        ("smollm", None, None, ["h"]),
        ("smollm", True, None, ["<|begin|>", "h"]),
        ("smollm", True, True, ["<|begin|>", "h", "<|end|>"]),
        ("llama-bpe", None, None, ["<|begin|>", "h"]),
        ("llama-bpe", False, None, ["h"]),
    ],
)
def test_bos_and_eos_are_added_if_requested(
    small: Small, tmp_path: Path, rule: str, begin: Any, end: Any, expected: list[str]
) -> None:
    tokenizer = imported(small, tmp_path, pre=rule, add_bos_token=begin, add_eos_token=end)
    assert [conftest.TOKENS[i] for i in tokenizer.encode("h")] == expected
    assert [conftest.TOKENS[i] for i in tokenizer.encode("h", add_special_tokens=False)] == ["h"]
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs("h").input_ids == tokenizer.encode("h")


def test_eos_may_be_several_tokens(small: Small, tmp_path: Path) -> None:
    tokenizer = imported(small, tmp_path, eot_token_id=2, eom_token_id=1)
    assert tokenizer.eos_token_ids == {1, 2}
    written = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert written["eos_token_id"] == [1, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "wordpiece"}, "vocabulary type 'wordpiece'"),
        ({"pre": "martian"}, "pre-tokenizer 'martian'"),
        ({"tokens": conftest.TOKENS[:-1]}, "rows in its embedding"),
        ({"tokens": ["a"] * COUNT}, "duplicate tokens"),
        ({"tokens": ["", *conftest.TOKENS[1:]]}, "strings of 1 to"),
        ({"tokens": list(range(COUNT))}, "strings of 1 to"),
        ({"merges": None}, "merges' is missing"),
        ({"merges": ["hello"]}, "is not two tokens"),
        ({"merges": ["x yz"]}, "its vocabulary is not consistent"),
        ({"token_type": [1, 2]}, "rows in its embedding"),
        ({"eos_token_id": COUNT}, "outside its vocabulary"),
        ({"add_bos_token": 1}, "not of type bool"),
        ({"model": "llama"}, "scores' is missing"),
        ({"model": "llama", "scores": [0.5]}, "one number for each token"),
        ({"model": "llama", "scores": [math.nan] * COUNT}, "one number for each token"),
    ],
    ids=str,
)
def test_invalid_vocabularies_raise(
    small: Small, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(GgufError, match=message):
        imported(small, tmp_path, **change)


@pytest.fixture(scope="module")
def sentencepiece_model() -> Any:
    """A SentencePiece model as Llama 2's was made, of some of Python's own text."""
    text = Path(json.__file__).read_text() + Path(json.decoder.__file__).read_text()
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text.splitlines()),
        model_writer=written,
        model_type="bpe",
        vocab_size=500,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        num_threads=1,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())


def test_sentencepiece_vocabularies_encode_as_sentencepiece(
    small: Small, tmp_path: Path, sentencepiece_model: Any
) -> None:
    count = sentencepiece_model.vocab_size()
    kinds = [
        2
        if sentencepiece_model.is_unknown(i)
        else 3
        if sentencepiece_model.is_control(i)
        else 6
        if sentencepiece_model.is_byte(i)
        else 1
        for i in range(count)
    ]
    change = {
        "model": "llama",
        "pre": None,
        "merges": None,
        "tokens": [sentencepiece_model.id_to_piece(i) for i in range(count)],
        "scores": [sentencepiece_model.get_score(i) for i in range(count)],
        "token_type": kinds,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    renamed = {f"tokenizer.ggml.{name}": value for name, value in change.items()}
    gguf.convert(small(change=renamed, vocab_size=count), tmp_path / "out")
    tokenizer = Tokenizer.load(tmp_path / "out")
    lines = [line for line in Path(json.encoder.__file__).read_text().splitlines() if line]
    for text in [*lines, "日本語 → é 😀", "  two  spaces  ", "x" * 100, "def f(): return 1234"]:
        ids = tokenizer.encode(text)
        assert ids == [1, *sentencepiece_model.encode(text)], text
        assert tokenizer.decode(ids) == text
        stream = tokenizer.decode_stream()
        assert "".join(map(stream.feed, ids)) + stream.finish() == text


def test_smollm2_encodes_as_transformers_does(smollm2: Path) -> None:
    ours = Tokenizer.load(smollm2)
    theirs = transformers.AutoTokenizer.from_pretrained(smollm2)
    texts = [Path(json.decoder.__file__).read_text(), "", " ", "1234 <|im_end|>é日本語😀\r\n\t"]
    for text in texts:
        assert ours.encode(text) == theirs(text).input_ids
        assert (
            ours.decode(ours.encode(text), skip_special_tokens=False)
            == text
            == theirs.decode(theirs(text).input_ids)
        )
    # As its publisher's tokenizer cuts it: digits alone, contractions apart.
    tokens = theirs.convert_ids_to_tokens(ours.encode("It's 2024, isn't it?"))
    assert tokens == ["It", "'s", "Ġ", "2", "0", "2", "4", ",", "Ġisn", "'t", "Ġit", "?"]
