"""Structured output: which tokens a grammar allows next, by llguidance.

    future = GrammarCompiler(tokenizer, vocab_size).compile(Grammar(kind="regex", text="yes|no"))
    matcher = future.result()
    matcher.mask()          # (V), true for allowed tokens
    matcher.accept((5,))    # token 5 was sampled

A grammar comes from a client and may be adversarial. `Grammar` limits its length, and the cost of
compiling it and of each step is limited by llguidance's fuel; beyond that, only its request fails.
64 KiB can take half a second to compile, so compilation runs in a thread, and compiled grammars are
cached.
"""

# pyright: basic
from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from ingot.core.errors import IngotError
from ingot.serving.engine.sampling_params import Grammar

if TYPE_CHECKING:
    from ingot.interop.tokenizer import Tokenizer

MAX_CACHED_GRAMMARS = 64
# About 14,000 of fuel and 20,000 items are a millisecond of a step.
_LIMITS = {
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 10_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}


class GrammarError(IngotError):
    """Invalid or too expensive grammar."""


class GrammarCompiler:
    """Compiles grammars for a model's tokens."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: int) -> None:
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        self._compiled: OrderedDict[Grammar, Any] = OrderedDict()
        self._tokens: Any = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")

    def compile(self, grammar: Grammar, generated: Sequence[int] = ()) -> Future[GrammarMatcher]:
        """Return a future of a matcher after the tokens `generated` so far."""
        return self._thread.submit(self._compile, grammar, generated)

    def _compile(self, grammar: Grammar, generated: Sequence[int]) -> GrammarMatcher:
        found = self._compiled.pop(grammar, None)
        if found is None:
            found = self._build(grammar)
        self._compiled[grammar] = found
        if len(self._compiled) > MAX_CACHED_GRAMMARS:
            self._compiled.popitem(last=False)
        matcher = GrammarMatcher(found.deep_copy(), self._vocabulary)
        for token in generated:  # one at a time: each has the fuel of a step
            matcher.accept((token,))
        return matcher

    def _build(self, grammar: Grammar) -> Any:
        llguidance = _llguidance()
        if self._tokens is None:  # a second or two
            size = max(self._vocabulary, self._tokenizer.vocab_size)
            ends = sorted(self._tokenizer.eos_token_ids) or None
            text = self._tokenizer.inner.to_str()
            self._tokens = llguidance.LLTokenizer(text, n_vocab=size, eos_token=ends)
        make = getattr(llguidance.LLMatcher, f"grammar_from_{grammar.kind}")
        limits = llguidance.LLParserLimits(**_LIMITS)
        try:
            source = make(grammar.text)
        except ValueError as error:
            raise _error(grammar, str(error)) from error
        made = llguidance.LLMatcher(self._tokens, source, log_level=0, limits=limits)
        if made.is_error():
            raise _error(grammar, made.get_error())
        return made


class GrammarMatcher:
    """State of a text in its grammar."""

    def __init__(self, inner: Any, vocabulary: int) -> None:
        self._inner, self._vocabulary = inner, vocabulary
        self.error: str | None = None
        """Error message; all tokens are allowed then, and the request should be finished."""
        self.done = False
        """No token can follow."""

    def mask(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Return the allowed tokens, (V); all of them after an error."""
        packed = self._ask(self._inner.compute_bitmask) if self.error is None else None
        allowed_V = np.unpackbits(np.frombuffer(packed or b"", np.uint8), bitorder="little")
        allowed_V = allowed_V[: self._vocabulary].view(np.bool_)
        if self.error is None and allowed_V.any():
            return allowed_V
        self.error = self.error or "no token of the vocabulary matches the grammar"
        return np.ones(self._vocabulary, np.bool_)

    def accept(self, tokens: Sequence[int]) -> None:
        """Advance by these tokens."""
        if self.error is None:
            self._ask(self._inner.consume_tokens, list(tokens))

    def _ask(self, method: Callable[..., Any], *arguments: Any) -> Any:
        try:
            answer = method(*arguments)
            self.done = self._inner.is_stopped()
            if self._inner.is_error():
                self.error = _short(self._inner.get_error())
            return answer
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in Rust is not an Exception
            self.error = _short(f"llguidance failed: {error}")
            return None


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise GrammarError(
            "structured output needs llguidance", hint='pip install "ingot[serve]"'
        ) from error
    return llguidance


def _error(grammar: Grammar, why: str) -> GrammarError:
    return GrammarError(f"invalid {grammar.kind} grammar: {_short(why)}", hint="use a simpler one")


def _short(text: str) -> str:
    return text.partition("<non-verbose/>")[0].strip()[:300]
