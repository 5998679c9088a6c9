"""Incremental detokenization: from tokens to text that may be sent, up to a stop string.

A stop string may be split over several tokens, and text that was sent cannot be taken back. So the
end of the text is held back while it could be the beginning of a stop string, and no longer.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from ingot.interop.tokenizer import Tokenizer


class StreamingDetokenizer:
    """The text of one answer.

    >>> import tokenizers
    >>> words = tokenizers.models.WordLevel({"stop": 0, "st": 1, "op": 2, "a": 3}, unk_token="a")
    >>> inner = tokenizers.Tokenizer(words)
    >>> inner.decoder = tokenizers.decoders.Fuse()
    >>> text = StreamingDetokenizer(Tokenizer(inner=inner), ("stop",))
    >>> text.feed([3]), text.feed([1]), text.feed([3, 1]), text.feed([2, 3])
    ('a', '', 'sta', '')
    >>> text.stopped, text.finish()
    (True, '')
    """

    def __init__(self, tokenizer: Tokenizer, stops: tuple[str, ...] = ()) -> None:
        self.stopped = False
        """Whether a stop string was met; nothing comes after it."""
        self._stream = tokenizer.decode_stream()
        self._feed = self._stream.feed
        self._stops = stops
        self._held = ""

    def feed(self, tokens: Iterable[int]) -> str:
        """Take the next tokens; return the text that is certain now."""
        if self.stopped:
            return ""
        feed = self._feed
        text = "".join([feed(token) for token in tokens])
        return self._check(text) if self._stops else text

    def finish(self) -> str:
        """Return what was held back, as no more comes."""
        if self.stopped:
            return ""
        text = self._stream.finish()
        text = self._check(text) if self._stops else text
        held, self._held = self._held, ""
        return text if self.stopped else text + held

    def _check(self, piece: str) -> str:
        text = self._held + piece
        # The one that is complete first, so that it does not matter how many tokens come at once.
        met = [(p + len(stop), p) for stop in self._stops if (p := text.find(stop)) >= 0]
        if met:
            self.stopped, self._held = True, ""
            return text[: min(met)[1]]
        keep = min([_begins(text, stop) for stop in self._stops])
        self._held = text[keep:]
        return text[:keep]


def _begins(text: str, stop: str) -> int:
    """Where the end of the text may be the beginning of the stop string.

    >>> _begins("a sto", "stop"), _begins("a stow", "stop")
    (2, 6)
    """
    place = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while place >= 0:
        if stop.startswith(text[place:]):
            return place
        place = text.find(stop[0], place + 1)
    return len(text)


class TokenTexts:
    """Single tokens as text, for those who ask for log-probabilities.

    >>> import tokenizers
    >>> words = tokenizers.models.WordLevel({"a": 0, "é": 1}, unk_token="a")
    >>> token_texts = TokenTexts(Tokenizer(inner=tokenizers.Tokenizer(words)))
    >>> token_texts.find(1), token_texts.find(7)
    (('é', b'\\xc3\\xa9'), ('', b''))
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, bytes]] = {}

    def find(self, token: int) -> tuple[str, bytes]:
        """The text of a token, and its bytes: it may be a part of a character."""
        found = self._known.get(token)
        if found is None:
            found = self._known[token] = self._make(token)
        return found

    def _make(self, token: int) -> tuple[str, bytes]:
        piece = self._tokenizer.inner.id_to_token(token) or ""
        text = self._tokenizer.decode([token], skip_special_tokens=False)
        if piece.startswith(_SPACE) and not text.startswith(" "):
            text = " " + text  # which is dropped at the beginning of a text
        if _BROKEN not in text:
            return text, text.encode()
        if piece.startswith("<0x") and len(piece) == 6:
            return text, bytes.fromhex(piece[3:5])
        letters = _letters()
        return text, bytes([letters[c] for c in piece if c in letters])


_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_BROKEN = "\N{REPLACEMENT CHARACTER}"


@cache
def _letters() -> dict[str, int]:
    """The bytes that letters stand for in vocabularies like GPT-2's.

    >>> _letters()["Ġ"], _letters()["a"]
    (32, 97)
    """
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(b): b for b in plain} | {chr(256 + n): b for n, b in enumerate(others)}
