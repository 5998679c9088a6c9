"""Convert the vocabulary of a GGUF file to the files of a Hugging Face tokenizer.

GGUF stores tokens, merges and scores, but only the *name* of the pre-tokenizer
(`tokenizer.ggml.pre`); its rules are in the source of llama.cpp. The rules below are those of the
models' own tokenizer.json, which llama.cpp reimplements.

Two types of vocabulary are supported: `gpt2` is byte-level BPE with merges; `llama` is
SentencePiece BPE, which has scores instead of merges: the pair whose token has the highest score is
merged first, so the merges are all pairs that form a token, ordered by its score.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from ingot.core.errors import IngotError
from ingot.interop.gguf_file import GgufError, GgufFile, damaged_error

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
MAX_TOKEN = 4096
# The number of candidate pairs grows with the length of a token; Llama's longest has 16.
MAX_SENTENCEPIECE_CHARS = 256
# The tokens that end a text, a turn or a message.
EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")

_CASELESS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LLAMA3 = rf"{_CASELESS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CASELESS}|{_WORDS}|\p{{N}}|{_REST}"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def documents(file: GgufFile, vocab_size: int) -> dict[str, Any]:
    """Return the content of the tokenizer files by name: text, or a JSON-serializable object."""
    tokens, kinds = _tokens(file, vocab_size)
    model = file.require("tokenizer.ggml.model", str)
    build = {"gpt2": _byte_level, "llama": _sentencepiece}.get(model)
    if build is None:
        raise GgufError(
            f"{file.path.name}: unsupported vocabulary type '{model[:64]}'",
            hint="import a model with one of these: gpt2 (byte-level BPE), llama (SentencePiece)",
        )
    try:
        tokenizer = build(file, tokens, kinds)
        _add_special_tokens(tokenizer, tokens, kinds)
        _add_bos_and_eos(file, tokenizer, tokens, model == "llama")
        content = tokenizer.to_str(pretty=True)
    except (IngotError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # `tokenizers` raises plain Exception, or panics in Rust
        raise damaged_error(file.path, f"its vocabulary is not consistent: {error}") from error
    return {
        "tokenizer.json": content + "\n",
        "tokenizer_config.json": _tokenizer_config(file, tokens),
        "generation_config.json": special_ids(file, vocab_size),
    }


def special_ids(file: GgufFile, vocab_size: int) -> dict[str, Any]:
    """Return the special token ids for config.json and generation_config.json."""
    ids: dict[str, Any] = {}
    for name, key in (("bos_token_id", "bos_token_id"), ("pad_token_id", "padding_token_id")):
        if (token := _special_id(file, key, vocab_size)) is not None:
            ids[name] = token
    tokens = [_special_id(file, key, vocab_size) for key in EOS_KEYS]
    eos = list(dict.fromkeys(token for token in tokens if token is not None))
    if eos:
        ids["eos_token_id"] = eos[0] if len(eos) == 1 else eos
    return ids


def _special_id(file: GgufFile, key: str, vocab_size: int) -> int | None:
    value = file.get(f"tokenizer.ggml.{key}", int)
    if value is not None and not 0 <= value < vocab_size:
        raise damaged_error(file.path, f"its {key} is {value}, outside its vocabulary")
    return value


def _tokens(file: GgufFile, vocab_size: int) -> tuple[list[str], list[int]]:
    tokens: list[str] = file.require("tokenizer.ggml.tokens", list)
    kinds: list[int] = file.get("tokenizer.ggml.token_type", list, [NORMAL] * len(tokens))
    if len(tokens) != vocab_size or len(kinds) != vocab_size:
        raise damaged_error(
            file.path, f"it has {len(tokens)} tokens and {vocab_size} rows in its embedding"
        )
    if not all(type(token) is str and 0 < len(token) <= MAX_TOKEN for token in tokens):
        raise damaged_error(
            file.path, f"its tokens are not all strings of 1 to {MAX_TOKEN} characters"
        )
    if len(set(tokens)) != len(tokens):
        raise damaged_error(file.path, "it has duplicate tokens")
    return tokens, kinds


def _byte_level(file: GgufFile, tokens: list[str], kinds: list[int]) -> Tokenizer:
    name = file.get("tokenizer.ggml.pre", str, "default")
    if name not in PRE_TOKENIZERS:
        raise GgufError(
            f"{file.path.name}: unsupported pre-tokenizer '{name[:64]}'",
            hint=f"import a model with one of these: {', '.join(PRE_TOKENIZERS)}",
        )
    merges: list[Any] = file.require("tokenizer.ggml.merges", list)
    # Tokens contain no space, so the first space separates the two.
    pairs = [_pair(file, merge) for merge in merges]
    tokenizer = Tokenizer(
        models.BPE(
            vocab=_token_ids(tokens), merges=pairs, ignore_merges=name in ("llama-bpe", "tekken")
        )
    )
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[name]()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pair(file: GgufFile, merge: Any) -> tuple[str, str]:
    left, space, right = merge.partition(" ") if isinstance(merge, str) else ("", "", "")
    if not (left and space and right):
        raise damaged_error(file.path, f"its merge {str(merge)[:64]!r} is not two tokens")
    return left, right


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "default": _gpt2,
    "gpt-2": _gpt2,
    "smollm": _smollm,
    "llama-bpe": lambda: _split(_LLAMA3),
    "qwen2": lambda: _split(_QWEN2),
    "tekken": lambda: _split(_TEKKEN),
}


def _sentencepiece(file: GgufFile, tokens: list[str], kinds: list[int]) -> Tokenizer:
    scores: list[Any] = file.require("tokenizer.ggml.scores", list)
    if len(scores) != len(tokens) or not all(
        isinstance(score, float) and math.isfinite(score) for score in scores
    ):
        raise damaged_error(file.path, "its scores are not one number for each token")
    unknown = _special_id(file, "unknown_token_id", len(tokens))
    tokenizer = Tokenizer(
        models.BPE(
            vocab=_token_ids(tokens),
            merges=merges_by_score(tokens, kinds, scores),
            unk_token=None if unknown is None else tokens[unknown],
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    prefix = file.get("tokenizer.ggml.add_space_prefix", bool, True)
    replace = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), replace]) if prefix else replace
    )
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if prefix else parts)
    return tokenizer


def merges_by_score(
    tokens: list[str], kinds: list[int], scores: list[float]
) -> list[tuple[str, str]]:
    """Return every pair of tokens that forms a token, highest score first.

    >>> merges_by_score(["a", "b", "ab", "aba"], [1, 1, 1, 1], [0.0, 0.0, -1.0, -2.0])
    [('a', 'b'), ('ab', 'a')]
    """
    ids = {
        token: number
        for number, token in enumerate(tokens)
        if kinds[number] in (NORMAL, USER_DEFINED, UNUSED) and len(token) <= MAX_SENTENCEPIECE_CHARS
    }
    pairs: list[tuple[float, int, int, tuple[str, str]]] = []
    for token, number in ids.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                pairs.append((-scores[number], ids[left], ids[right], (left, right)))
    return [pair for *_, pair in sorted(pairs)]


def _token_ids(tokens: list[str]) -> dict[str, int]:
    return {token: number for number, token in enumerate(tokens)}


def _add_special_tokens(tokenizer: Tokenizer, tokens: list[str], kinds: list[int]) -> None:
    """Add the tokens that are matched in the text before normalization and pre-tokenization."""
    for kind, special in ((CONTROL, True), (USER_DEFINED, False)):
        marked = [
            AddedToken(token, special=special, normalized=False)
            for token, token_kind in zip(tokens, kinds, strict=True)
            if token_kind == kind
        ]
        tokenizer.add_tokens(marked)  # pyright: ignore[reportUnknownMemberType]


def _add_bos_and_eos(
    file: GgufFile, tokenizer: Tokenizer, tokens: list[str], sentence_piece: bool
) -> None:
    """Make the tokenizer add BOS and EOS tokens, if the file asks for it."""
    llama3 = file.metadata.get("tokenizer.ggml.pre") == "llama-bpe"
    begin = file.get("tokenizer.ggml.add_bos_token", bool, sentence_piece or llama3)
    end = file.get("tokenizer.ggml.add_eos_token", bool, False)
    ids = {
        "bos": _special_id(file, "bos_token_id", len(tokens)) if begin else None,
        "eos": _special_id(file, "eos_token_id", len(tokens)) if end else None,
    }
    steps: list[Any] = [] if sentence_piece else [processors.ByteLevel(trim_offsets=False)]
    names = {name: tokens[number] for name, number in ids.items() if number is not None}
    if names:
        # A list: a string would be split at a space within a token.
        parts = [names.get("bos"), "$A", names.get("eos")]
        template = [part for part in parts if part]
        special = [(tokens[number], number) for number in ids.values() if number is not None]
        steps.append(processors.TemplateProcessing(single=template, special_tokens=special))
    if steps:
        tokenizer.post_processor = processors.Sequence(steps)


def _tokenizer_config(file: GgufFile, tokens: list[str]) -> dict[str, Any]:
    config: dict[str, Any] = {
        # This class uses tokenizer.json as it is, instead of building its own tokenizer.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    for theirs, ours in names.items():
        number = _special_id(file, f"{ours}_token_id", len(tokens))
        if number is not None:
            config[f"{theirs}_token"] = tokens[number]
    template = file.get("tokenizer.chat_template", str)
    if template is not None:
        config["chat_template"] = template
    architecture = file.metadata.get("general.architecture")
    context = file.get(f"{architecture}.context_length", int)
    if context is not None:
        config["model_max_length"] = context
    json.dumps(config)  # raises before anything is written
    return config
