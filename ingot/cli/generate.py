"""`ingot generate`: generate text from a prompt."""

from __future__ import annotations

import json as json_format
import sys
import time
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from ingot.cli import escape_markup
from ingot.core.errors import ConfigError
from ingot.core.log import stderr
from ingot.serving.engine.sampling_params import SamplingParams
from ingot.serving.engine.speculate import SpeculateKind

# Not inside a function: modules imported with a verb are skipped by the garbage collector, which
# otherwise delays the exit of the process by a second.
from ingot.workflows.llm import LLM, CompletionChunk


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Options of the command line that become `SamplingParams`."""

    temperature: float = 0.0
    """0 selects the most likely token (greedy decoding)."""
    top_k: int | None = None
    """Sample from this many of the most likely tokens; None for all."""
    top_p: float = 1.0
    """Sample from the most likely tokens whose cumulative probability reaches this."""
    min_p: float = 0.0
    """Minimum probability of a token, relative to the most likely one."""
    seed: int = 0

    def params(self) -> SamplingParams:
        """Return the sampling parameters; raise an error for a value out of range."""
        return SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
        )


@dataclass
class GenerationResult:
    """The generated text and its timing.

    >>> print(GenerationResult(tokens=11, ttft=0.5, seconds=1.5, finish_reason="length"))
    11 tokens, the first after 0.500 s, then 10.0 tokens/s; stopped at --max-tokens
    """

    text: str = ""
    tokens: int = 0
    ttft: float = 0.0
    """Seconds to the first token."""
    seconds: float = 0.0
    finish_reason: Literal["stop", "length", "interrupt"] = "stop"
    context_full: bool = False

    def __str__(self) -> str:
        reason = {"stop": "", "length": "; stopped at --max-tokens", "interrupt": "; interrupted"}
        end = "; the model's context is full" if self.context_full else reason[self.finish_reason]
        if not self.tokens:
            return f"no tokens{end}"
        count = "1 token" if self.tokens == 1 else f"{self.tokens} tokens"
        rate = (self.tokens - 1) / (self.seconds - self.ttft) if self.tokens > 1 else 0.0
        speed = f", then {rate:.1f} tokens/s" if rate else ""
        return f"{count}, the first after {self.ttft:.3f} s{speed}{end}"


def generate(
    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")],
    prompt: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PROMPT")],
    sampling: Annotated[SamplingOptions, tyro.conf.OmitArgPrefixes] = SamplingOptions(),  # noqa: B008
    max_tokens: int = 256,
    device: str = "auto",
    adapter: Path | None = None,
    kv_cache_dtype: Literal["auto", "int8"] = "auto",
    speculate: SpeculateKind | None = None,
    json: tyro.conf.FlagCreatePairsOff[bool] = False,
) -> None:
    """Generate text from a prompt.

    Ctrl-C stops early. The text goes to stdout, its timing to stderr.

    Examples: `ingot generate smollm2 "Once upon a time"`,
    `ingot generate smollm2 "def fibonacci(n):" --temperature 0.8 --seed 7`,
    `ingot generate smollm2 "Hello" --json`.

    Args:
        model: A model directory, or ORG/NAME on the Hugging Face hub.
        prompt: The text to continue.
        sampling: How tokens are sampled.
        max_tokens: The most tokens to generate.
        device: Where to compute: auto, cpu, cuda, cuda:1.
        adapter: PEFT directory of a LoRA adapter of the model.
        kv_cache_dtype: Dtype of cached keys and values; int8 takes half the memory.
        speculate: Speculative decoding: ngram (for quotes, edits and code), or int4 (a 4-bit copy
            of the model drafts). The text is the same.
        json: Print JSON at the end instead of the text as it is generated.
    """
    check_max_tokens(max_tokens)
    params = sampling.params()
    llm = load(model, device, adapter, kv_cache_dtype, speculate)
    streamer = TextStreamer(llm, params, max_tokens)
    ids = llm.tokenizer.encode(prompt)
    if json:
        result = streamer.run(ids, quiet=True)
        print(json_format.dumps(as_json(result, ids), indent=2))  # noqa: T201
    else:
        result = streamer.run(ids, prompt)
        print_stats(result)
    if result.finish_reason == "interrupt":
        raise KeyboardInterrupt


def check_max_tokens(max_tokens: int) -> None:
    """Raise an error, before anything is loaded, if no token may be generated."""
    if max_tokens < 1:
        raise ConfigError(f"--max-tokens: expected at least 1, got {max_tokens}", hint="raise it")


def load(
    model: Path | str,
    device: str = "auto",
    adapter: Path | None = None,
    kv_cache_dtype: Literal["auto", "int8"] = "auto",
    speculate: SpeculateKind | None = None,
) -> LLM:
    """Load a model, perhaps with an adapter, and compile its kernels; show a status line
    meanwhile."""
    adapters = {} if adapter is None else {"adapter": adapter}
    with stderr().status(f"loading {escape_markup(str(model))}") as status:
        return LLM(
            model,
            device=device,
            kv_cache_dtype=kv_cache_dtype,
            speculate=speculate,
            adapters=adapters,
            on_status=status.update,
        )


@dataclass(frozen=True)
class TextStreamer:
    """Prints a model's text to stdout as it is generated."""

    llm: LLM
    params: SamplingParams
    max_tokens: int

    def run(self, ids: list[int], prompt: str = "", quiet: bool = False) -> GenerationResult:
        """Generate from token ids until the end or Ctrl-C; print `prompt` first."""
        result, start = GenerationResult(), time.perf_counter()
        try:
            for number, chunk in enumerate(self._chunks(ids)):
                result.seconds = time.perf_counter() - start
                if number == 0:
                    result.ttft = result.seconds
                    _print("" if quiet else prompt)
                result.tokens += len(chunk.token_ids) - (chunk.finish_reason == "stop")
                result.text += chunk.text
                result.finish_reason = chunk.finish_reason or result.finish_reason
                _print("" if quiet else chunk.text)
            result.context_full = len(ids) + result.tokens == self.llm.max_seq_len
        except KeyboardInterrupt:
            result.finish_reason = "interrupt"
        return result

    def _chunks(self, ids: list[int]) -> Iterator[CompletionChunk]:
        adapter = next(iter(self.llm.adapters), "")
        chunks = self.llm.stream([ids], self.params, max_tokens=self.max_tokens, adapter=adapter)
        chunks = (chunk for chunk in chunks if chunk.token_ids)  # not those of a long prompt
        with stderr().status("computing the prompt"):
            first = next(chunks)
        yield first
        yield from chunks


def print_stats(result: GenerationResult) -> None:
    """End the line of the text and print its timing to stderr."""
    print(flush=True)  # noqa: T201
    stderr().print(f"[dim]{result}[/]", highlight=False, soft_wrap=True)


def as_json(result: GenerationResult, prompt: list[int]) -> dict[str, Any]:
    """Return what `--json` prints."""
    return {
        "text": result.text,
        "finish_reason": result.finish_reason,
        "prompt_tokens": len(prompt),
        "tokens": result.tokens,
        "ttft_seconds": round(result.ttft, 4),
        "seconds": round(result.seconds, 4),
    }


def _print(text: str) -> None:
    """Print without buffering, and without control characters if stdout is a terminal."""
    if sys.stdout.isatty():
        text = "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else "?" for c in text)
    encoding = sys.stdout.encoding  # a character that it lacks is printed as "?"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()
