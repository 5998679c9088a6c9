"""Incremental detokenization: from tokens to text that may be sent, up to a stop string.

A stop string may be split over several tokens, and text that was sent cannot be taken back. So the
end of the text is held back while it could be the beginning of a stop string, and no longer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import cache

from ingot.interop.tokenizer import Tokenizer


class StreamingDetokenizer:
    """Converts the tokens of one completion to text.

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

    def __init__(
        self, tokenizer: Tokenizer, stops: tuple[str, ...] = (), visible: Collection[str] = ()
    ) -> None:
        self.stop_string: str | None = None
        """The stop string that was found; no text follows it."""
        self._stream = tokenizer.decode_stream(visible)
        self._feed = self._stream.feed
        self._stops = stops
        self._held = ""

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self.stop_string is not None

    def feed(self, tokens: Iterable[int]) -> str:
        """Append tokens; return the text that can be sent now."""
        if self.stop_string is not None:
            return ""
        feed = self._feed
        text = "".join([feed(token) for token in tokens])
        return self._check(text) if self._stops else text

    def finish(self) -> str:
        """Return the text that was held back, after the last token."""
        if self.stopped:
            return ""
        text = self._stream.finish()
        text = self._check(text) if self._stops else text
        held, self._held = self._held, ""
        return text if self.stopped else text + held

    def _check(self, new: str) -> str:
        """Return the text up to a stop string, or up to what may be the beginning of one."""
        text = self._held + new
        # The stop string that is complete first: the result must not depend on how many tokens are
        # fed at once.
        matches = [(p + len(stop), p, stop) for stop in self._stops if (p := text.find(stop)) >= 0]
        if matches:
            _, end, self.stop_string = min(matches)
            self._held = ""
            return text[:end]
        keep = min([find_partial_stop(text, stop) for stop in self._stops])
        self._held = text[keep:]
        return text[:keep]


def find_partial_stop(text: str, stop: str) -> int:
    """Return where the text ends with a beginning of the stop string; its length if it does not.

    >>> find_partial_stop("a sto", "stop"), find_partial_stop("a stow", "stop")
    (2, 6)
    """
    place = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while place >= 0:
        if stop.startswith(text[place:]):
            return place
        place = text.find(stop[0], place + 1)
    return len(text)


class TokenTexts:
    """Texts of single tokens, for reports of log-probabilities.

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
        """Return the text of a token, and its bytes, which may be part of a character."""
        found = self._known.get(token)
        if found is None:
            found = self._known[token] = self._decode(token)
        return found

    def _decode(self, token: int) -> tuple[str, bytes]:
        symbol = self._tokenizer.inner.id_to_token(token) or ""
        text = self._tokenizer.decode([token], skip_special_tokens=False)
        if symbol.startswith(_SPACE) and not text.startswith(" "):
            text = " " + text  # tokenizers drop it at the beginning of a text
        if _BROKEN not in text:
            return text, text.encode()
        if symbol.startswith("<0x") and len(symbol) == 6:
            return text, bytes.fromhex(symbol[3:5])
        byte_of = _byte_symbols()
        return text, bytes([byte_of[c] for c in symbol if c in byte_of])


_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_BROKEN = "\N{REPLACEMENT CHARACTER}"


@cache
def _byte_symbols() -> dict[str, int]:
    """Return the byte of each character in byte-level BPE vocabularies, such as GPT-2's.

    >>> _byte_symbols()["Ġ"], _byte_symbols()["a"]
    (32, 97)
    """
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(b): b for b in plain} | {chr(256 + n): b for n, b in enumerate(others)}
