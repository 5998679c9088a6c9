"""A GGUF file's vocabulary as the files of a Hugging Face tokenizer.

GGUF keeps tokens, merges and scores, and only the *name* of how text is cut into words before
the merges apply (`tokenizer.ggml.pre`); llama.cpp has the rules in its source. The rules below
are those of the models' own tokenizer.json, to which llama.cpp's are written to be equal.

Two kinds of vocabulary are converted. `gpt2` is byte-level BPE with its merges. `llama` is
SentencePiece's BPE, which has scores and no merges: the pair that makes the token of the highest
score is joined first, so the merges are all pairs that make a token, in the order of its score.
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
from ingot.interop.gguf_file import GgufError, GgufFile, damaged

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
MAX_TOKEN = 4096
# Pairs that could make a SentencePiece token grow with its length; Llama's longest has 16.
MAX_PIECE = 256
# Tokens that end a turn, besides the one that ends the text.
ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")

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
    """Return the tokenizer's files by name: text, or what is to be written as JSON."""
    tokens, kinds = _tokens(file, vocab_size)
    model = file.require("tokenizer.ggml.model", str)
    build = {"gpt2": _byte_level, "llama": _sentence_piece}.get(model)
    if build is None:
        raise GgufError(
            f"{file.path.name} has a vocabulary of the kind '{model[:64]}', which is not supported",
            hint="import a model with one of these: gpt2 (byte-level BPE), llama (SentencePiece)",
        )
    try:
        tokenizer = build(file, tokens, kinds)
        _add_special_tokens(tokenizer, tokens, kinds)
        _add_ends(file, tokenizer, tokens, model == "llama")
        content = tokenizer.to_str(pretty=True)
    except (IngotError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # `tokenizers` raises plain Exception, or panics in Rust
        raise damaged(file.path, f"its vocabulary is not consistent: {error}") from error
    return {
        "tokenizer.json": content + "\n",
        "tokenizer_config.json": _tokenizer_config(file, tokens),
        "generation_config.json": special_ids(file, vocab_size),
    }


def special_ids(file: GgufFile, vocab_size: int) -> dict[str, Any]:
    """Return the ids that config.json and generation_config.json name."""
    ids: dict[str, Any] = {}
    for name, key in (("bos_token_id", "bos_token_id"), ("pad_token_id", "padding_token_id")):
        if (found := _special(file, key, vocab_size)) is not None:
            ids[name] = found
    found = [_special(file, key, vocab_size) for key in ENDS]
    ends = list(dict.fromkeys(end for end in found if end is not None))
    if ends:
        ids["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    return ids


def _special(file: GgufFile, key: str, vocab_size: int) -> int | None:
    value = file.get(f"tokenizer.ggml.{key}", int)
    if value is not None and not 0 <= value < vocab_size:
        raise damaged(file.path, f"its {key} is {value}, outside its vocabulary")
    return value


def _tokens(file: GgufFile, vocab_size: int) -> tuple[list[str], list[int]]:
    tokens: list[str] = file.require("tokenizer.ggml.tokens", list)
    kinds: list[int] = file.get("tokenizer.ggml.token_type", list, [NORMAL] * len(tokens))
    if len(tokens) != vocab_size or len(kinds) != vocab_size:
        raise damaged(
            file.path, f"it has {len(tokens)} tokens and {vocab_size} rows in its embedding"
        )
    if not all(type(token) is str and 0 < len(token) <= MAX_TOKEN for token in tokens):
        raise damaged(file.path, f"its tokens are not all strings of 1 to {MAX_TOKEN} characters")
    if len(set(tokens)) != len(tokens):
        raise damaged(file.path, "a token is there twice")
    return tokens, kinds


def _byte_level(file: GgufFile, tokens: list[str], kinds: list[int]) -> Tokenizer:
    name = file.get("tokenizer.ggml.pre", str, "default")
    if name not in PRE_TOKENIZERS:
        raise GgufError(
            f"{file.path.name} cuts text into words by the rule '{name[:64]}', which is not known",
            hint=f"import a model with one of these: {', '.join(PRE_TOKENIZERS)}",
        )
    merges: list[Any] = file.require("tokenizer.ggml.merges", list)
    # A token holds no space, so the first space after the first character is between the two.
    pairs = [_pair(file, merge) for merge in merges]
    tokenizer = Tokenizer(
        models.BPE(
            vocab=_numbered(tokens), merges=pairs, ignore_merges=name in ("llama-bpe", "tekken")
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
        raise damaged(file.path, f"its merge {str(merge)[:64]!r} is not two tokens")
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


def _sentence_piece(file: GgufFile, tokens: list[str], kinds: list[int]) -> Tokenizer:
    scores: list[Any] = file.require("tokenizer.ggml.scores", list)
    if len(scores) != len(tokens) or not all(
        isinstance(score, float) and math.isfinite(score) for score in scores
    ):
        raise damaged(file.path, "its scores are not one number for each token")
    unknown = _special(file, "unknown_token_id", len(tokens))
    tokenizer = Tokenizer(
        models.BPE(
            vocab=_numbered(tokens),
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
    """Return every pair of tokens that makes a token, those of the highest score first.

    >>> merges_by_score(["a", "b", "ab", "aba"], [1, 1, 1, 1], [0.0, 0.0, -1.0, -2.0])
    [('a', 'b'), ('ab', 'a')]
    """
    ids = {
        token: number
        for number, token in enumerate(tokens)
        if kinds[number] in (NORMAL, USER_DEFINED, UNUSED) and len(token) <= MAX_PIECE
    }
    found: list[tuple[float, int, int, tuple[str, str]]] = []
    for token, number in ids.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                found.append((-scores[number], ids[left], ids[right], (left, right)))
    return [pair for *_, pair in sorted(found)]


def _numbered(tokens: list[str]) -> dict[str, int]:
    return {token: number for number, token in enumerate(tokens)}


def _add_special_tokens(tokenizer: Tokenizer, tokens: list[str], kinds: list[int]) -> None:
    """Mark the tokens that are found in the text before anything else is done to it."""
    for kind, special in ((CONTROL, True), (USER_DEFINED, False)):
        marked = [
            AddedToken(token, special=special, normalized=False)
            for token, found in zip(tokens, kinds, strict=True)
            if found == kind
        ]
        tokenizer.add_tokens(marked)  # pyright: ignore[reportUnknownMemberType]


def _add_ends(file: GgufFile, tokenizer: Tokenizer, tokens: list[str], piece: bool) -> None:
    """Have the tokenizer add what begins and ends a text, if the file says that it should."""
    llama3 = file.metadata.get("tokenizer.ggml.pre") == "llama-bpe"
    begin = file.get("tokenizer.ggml.add_bos_token", bool, piece or llama3)
    end = file.get("tokenizer.ggml.add_eos_token", bool, False)
    ids = {
        "bos": _special(file, "bos_token_id", len(tokens)) if begin else None,
        "eos": _special(file, "eos_token_id", len(tokens)) if end else None,
    }
    steps: list[Any] = [] if piece else [processors.ByteLevel(trim_offsets=False)]
    names = {name: tokens[number] for name, number in ids.items() if number is not None}
    if names:
        # A list, not a string, which would be cut at a space within a token.
        parts = [names.get("bos"), "$A", names.get("eos")]
        template = [part for part in parts if part]
        special = [(tokens[number], number) for number in ids.values() if number is not None]
        steps.append(processors.TemplateProcessing(single=template, special_tokens=special))
    if steps:
        tokenizer.post_processor = processors.Sequence(steps)


def _tokenizer_config(file: GgufFile, tokens: list[str]) -> dict[str, Any]:
    config: dict[str, Any] = {
        # The class that takes tokenizer.json as it is, and does not make one of its own.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    for theirs, ours in names.items():
        number = _special(file, f"{ours}_token_id", len(tokens))
        if number is not None:
            config[f"{theirs}_token"] = tokens[number]
    template = file.get("tokenizer.chat_template", str)
    if template is not None:
        config["chat_template"] = template
    architecture = file.metadata.get("general.architecture")
    context = file.get(f"{architecture}.context_length", int)
    if context is not None:
        config["model_max_length"] = context
    json.dumps(config)  # what cannot be written is found before anything is
    return config
