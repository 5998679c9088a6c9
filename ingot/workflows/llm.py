"""Generate text with a model in one object.

    llm = ingot.LLM("smollm2")
    llm.generate("Once upon a time").text
    llm.generate(["Hello", "Bonjour"], SamplingParams(temperature=0.8, seed=1), max_tokens=64)
    llm.chat([{"role": "user", "content": "What is the capital of France?"}]).text
    for chunk in llm.stream("Once upon a time"):
        print(chunk.text, end="")
    ingot.LLM("smollm2", adapters={"pirate": "runs/pirate"}).generate("Ahoy", adapter="pirate")
    llm.score("The capital of France is Paris.").perplexity

`LLM` is a layer over the server's engine: prompts of one call are batched, prefixes that were
computed before are found in its KV cache, and results do not depend on either. One prompt (a string
or a list of token ids) gives one result; a list of prompts gives a list in the same order.
"""

# pyright: basic
from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal, overload

import msgspec
import torch

from ingot.core import device as devices
from ingot.core.errors import ConfigError, IngotError
from ingot.interop import hf, hub
from ingot.interop.chat import Message
from ingot.interop.peft import Adapter
from ingot.interop.tokenizer import Tokenizer
from ingot.nn import Decoder
from ingot.nn.layout import KVCacheDtype
from ingot.serving.engine.adapters import AdapterPool
from ingot.serving.engine.detokenizer import StreamingDetokenizer
from ingot.serving.engine.engine import Engine, config_for_memory
from ingot.serving.engine.output import Logprob, Output
from ingot.serving.engine.request import FinishReason, Request
from ingot.serving.engine.sampling_params import SamplingParams
from ingot.serving.engine.speculate import SpeculateKind, create_proposer, int4_copy

Prompt = str | Sequence[int]
"""Text, or the ids of its tokens."""

GREEDY = SamplingParams(temperature=0.0)
MAX_TOKENS = 256
_QUEUE_FACTOR = 2  # requests in the engine at a time, as a multiple of those that run together


@dataclass(frozen=True, kw_only=True)
class Completion:
    """The result of `LLM.generate` for one prompt."""

    prompt: str | None
    """Text of the prompt; None if token ids were given."""
    text: str
    finish_reason: Literal["stop", "length"]
    """`stop`: the model ended the text, or a stop string was found. `length`: `max_tokens` or the
    model's context is used up."""
    prompt_token_ids: tuple[int, ...] = field(repr=False)
    token_ids: tuple[int, ...] = field(repr=False)
    """Generated tokens, with the stop token that ended them."""
    logprobs: tuple[Logprob, ...] | None = field(default=None, repr=False)
    """Of the generated tokens, if `SamplingParams.logprobs` asks for them."""
    prompt_logprobs: tuple[Logprob, ...] | None = field(default=None, repr=False)
    """Of the prompt's tokens from the second on, if `SamplingParams.prompt_logprobs` asks."""
    num_cached_tokens: int = field(default=0, repr=False)
    """Tokens of the prompt that were found in the KV cache."""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, kw_only=True)
class CompletionChunk:
    """A part of a completion, from `LLM.stream`: all that one step of the engine added."""

    index: int
    """Number of the prompt in the list of prompts."""
    text: str
    """New text. It is held back while it may be the beginning of a stop string or of a character
    of several tokens, so some chunks have none."""
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprob, ...] | None = None
    prompt_logprobs: tuple[Logprob, ...] | None = None
    num_cached_tokens: int | None = None
    finish_reason: Literal["stop", "length"] | None = None
    """Set in the last chunk of a prompt."""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, kw_only=True)
class SequenceScore:
    """Log-probabilities of a text under the model.

    >>> round(SequenceScore(token_ids=(5, 6, 7), logprobs=(-0.5, -1.5)).perplexity, 3)
    2.718
    """

    token_ids: tuple[int, ...] = field(repr=False)
    logprobs: tuple[float, ...] = field(repr=False)
    """Of each token from the second on, given those before it."""

    @property
    def logprob(self) -> float:
        """Log-probability of the text after its first token."""
        return math.fsum(self.logprobs)

    @property
    def perplexity(self) -> float:
        """Exponential of the mean negative log-probability."""
        return math.exp(-self.logprob / len(self.logprobs))


def load(
    model: Path | str,
    *,
    device: str | torch.device = "auto",
    dtype: torch.dtype | None = None,
    on_status: Callable[[str], object] = lambda status: None,
) -> tuple[Decoder, Tokenizer]:
    """Load a model directory, or `ORG/NAME` from the Hugging Face hub, and compile its kernels.

    Without `dtype`, weights keep that of their files. `on_status` is called with a line of text
    before each part that may take long.
    """
    place = devices.resolve(device)
    directory = hub.model_path(model)
    with ThreadPoolExecutor(1) as pool:
        kernels = pool.submit(load_kernels, place)  # while the weights are read
        decoder, tokenizer = hf.load(directory, dtype, place), Tokenizer.load(directory)
        on_status("compiling the CPU kernels, once per machine")
        kernels.result()
    return decoder, tokenizer


def load_kernels(place: torch.device) -> None:
    """Compile and load the CPU kernels, if the device uses them."""
    if place.type == "cpu":
        from ingot.kernels.cpu import build

        with suppress(IngotError):  # PyTorch's kernels are used then, and the first call warns
            build.load()


class LLM:
    """A model that generates text. Calls are made from one thread.

    An interrupted step (Ctrl-C) discards the KV cache; the next call starts with an empty one.

    Args:
        model: A model directory, or `ORG/NAME` on the Hugging Face hub.
        device: "auto", "cpu", "cuda", "cuda:1", ...: see `ingot.core.device.resolve`.
        dtype: Of the weights; by default that of their files.
        kv_cache_bytes: Memory for keys and values; by default 4 GiB, or a quarter of the machine's
            memory if that is less.
        kv_cache_dtype: Dtype of cached keys and values: "auto", that of the model, or "int8" (CPU
            only), with a scale for each token and head, for nearly twice as many tokens in the same
            memory. Log-probabilities are those of a forward that rounds keys and values like this.
        speculate: "ngram" drafts tokens that followed the same tokens before, which makes quoting,
            editing and code faster; "int4" drafts tokens with a 4-bit copy of the model, which
            makes a few requests at a time faster. The output is the same.
        adapters: PEFT directories of LoRA adapters, by name.
        max_loras: Maximum number of loaded adapters; by default that of `adapters`.
        max_lora_rank: Maximum rank of an adapter; by default the largest of `adapters`, at least
            16.
        on_status: Called with a line of text before each part of loading that may take long.
    """

    def __init__(
        self,
        model: Path | str,
        *,
        device: str | torch.device = "auto",
        dtype: torch.dtype | None = None,
        kv_cache_bytes: int | None = None,
        kv_cache_dtype: KVCacheDtype = "auto",
        speculate: SpeculateKind | None = None,
        adapters: Mapping[str, Path | str] | None = None,
        max_loras: int | None = None,
        max_lora_rank: int | None = None,
        on_status: Callable[[str], object] = lambda status: None,
    ) -> None:
        self.decoder, self.tokenizer = load(model, device=device, dtype=dtype, on_status=on_status)
        self.decoder.set_kv_cache_dtype(kv_cache_dtype)
        self._adapters = AdapterPool.of(
            self.decoder, adapters or {}, max_loras=max_loras, max_lora_rank=max_lora_rank
        )
        self._kv_cache_bytes = kv_cache_bytes
        self._speculate: SpeculateKind | None = speculate
        self._draft_model: Decoder | None = None
        if speculate == "int4":
            on_status("quantizing a copy to 4 bits, for speculative decoding")
            self._draft_model = int4_copy(self.decoder)
        self._ids = itertools.count()
        self._outputs: dict[int, list[Output]] = {}  # by request, not yet fetched by its stream

    @property
    def max_seq_len(self) -> int:
        """Tokens that fit into the model's context: prompt and completion together."""
        return self.decoder.config.max_seq_len

    @cached_property
    def engine(self) -> Engine:
        """The engine; created by the first call that computes."""
        config = config_for_memory(self.decoder, self._kv_cache_bytes)
        runner, proposer = create_proposer(
            self._speculate, self.decoder, config, draft_model=self._draft_model
        )
        return Engine(
            self.decoder,
            scheduler_config=config,
            tokenizer=self.tokenizer,
            proposer=proposer,
            adapters=self._adapters,
            runner=runner,
        )

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the loaded adapters."""
        return tuple(one.name for one in self._adapters.loaded)

    def load_adapter(
        self, name: str, adapter: Adapter | Path | str, *, replace: bool = False
    ) -> None:
        """Load an adapter, or that of a PEFT directory; there must be a free slot: `max_loras`."""
        self.engine.load_adapter(name, adapter, replace=replace)

    def unload_adapter(self, name: str) -> None:
        """Remove an adapter; streams that use it continue."""
        self.engine.unload_adapter(name)

    @overload
    def generate(
        self,
        prompts: str | list[int],
        sampling_params: SamplingParams | None = None,
        *,
        max_tokens: int = ...,
        stop: str | Sequence[str] = ...,
        ignore_eos: bool = ...,
        adapter: str = ...,
    ) -> Completion: ...
    @overload
    def generate(
        self,
        prompts: list[str] | list[list[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        max_tokens: int = ...,
        stop: str | Sequence[str] = ...,
        ignore_eos: bool = ...,
        adapter: str = ...,
    ) -> list[Completion]: ...
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        max_tokens: int = MAX_TOKENS,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        adapter: str = "",
    ) -> Completion | list[Completion]:
        """Return the completion of a prompt, or a list of those of several.

        Args:
            prompts: A text or its token ids, or a list of these.
            sampling_params: How tokens are sampled, for all prompts or one for each; greedy by
                default.
            max_tokens: The most tokens of a completion.
            stop: Strings that end a completion; they are not part of it.
            ignore_eos: Continue after the model's end-of-sequence tokens.
            adapter: Name of the adapter to use; by default none.
        """
        texts, batch = as_batch(prompts)
        parts: list[list[CompletionChunk]] = [[] for _ in batch]
        token_ids = [self._encode(prompt) for prompt in batch]
        for chunk in self._stream(
            token_ids, sampling_params, max_tokens, stop, ignore_eos, adapter
        ):
            parts[chunk.index].append(chunk)
        completions = [
            _join(prompt, ids, chunks)
            for prompt, ids, chunks in zip(batch, token_ids, parts, strict=True)
        ]
        return completions if texts else completions[0]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt] | Iterator[Prompt],
        sampling_params: SamplingParams
        | Sequence[SamplingParams]
        | Iterator[SamplingParams]
        | None = None,
        *,
        max_tokens: int = MAX_TOKENS,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        adapter: str = "",
    ) -> Iterator[CompletionChunk]:
        """Return an iterator over the chunks of completions as they are computed.

        Arguments are those of `generate`. Chunks of several prompts are interleaved, and so are
        the steps of several streams: all are batched. A stream that is closed ends its requests.

        Iterators of prompts and of parameters are read as the engine gets to them: for more prompts
        than memory should hold.
        """
        if isinstance(prompts, Iterator):
            lazy = map(self._encode, prompts)
            return self._stream(lazy, sampling_params, max_tokens, stop, ignore_eos, adapter)
        _, batch = as_batch(prompts)
        token_ids = [self._encode(prompt) for prompt in batch]
        return self._stream(token_ids, sampling_params, max_tokens, stop, ignore_eos, adapter)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        max_tokens: int = MAX_TOKENS,
        stop: str | Sequence[str] = (),
        adapter: str = "",
    ) -> Completion | list[Completion]:
        """Return the answer to a conversation, or a list of those to several.

        A conversation is a list of messages: `{"role": "user", "content": "Hello"}`.
        """
        several = bool(messages) and not isinstance(messages[0], dict)
        conversations = messages if several else [messages]
        prompts = [self.apply_chat_template(one) for one in conversations]  # type: ignore
        answers = self.generate(
            prompts, sampling_params, max_tokens=max_tokens, stop=stop, adapter=adapter
        )
        return answers if several else answers[0]

    def apply_chat_template(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids of a conversation, for `generate` and `stream`."""
        return self.tokenizer.encode_chat(messages)

    @overload
    def score(self, prompts: str | list[int], *, adapter: str = "") -> SequenceScore: ...
    @overload
    def score(
        self, prompts: list[str] | list[list[int]], *, adapter: str = ""
    ) -> list[SequenceScore]: ...
    def score(
        self, prompts: Prompt | Sequence[Prompt], *, adapter: str = ""
    ) -> SequenceScore | list[SequenceScore]:
        """Return the log-probabilities of the tokens of a text, or of each of several.

        They are bitwise equal to those of training: `-ops.linear_cross_entropy`.
        """
        several, batch = as_batch(prompts)
        token_ids = [self._encode(prompt) for prompt in batch]
        if short := [index for index, ids in enumerate(token_ids) if len(ids) < 2]:
            raise ConfigError(
                f"prompt {short[0]}: at least 2 tokens have to be scored, "
                f"got {len(token_ids[short[0]])}",
                hint="give a longer text",
            )
        params = SamplingParams(temperature=0.0, prompt_logprobs=0)
        logprobs: list[list[float]] = [[] for _ in batch]
        for chunk in self._stream(token_ids, params, 1, (), True, adapter):
            logprobs[chunk.index] += [one.logprob for one in chunk.prompt_logprobs or ()]
        scores = [
            SequenceScore(token_ids=ids, logprobs=tuple(of_prompt))
            for ids, of_prompt in zip(token_ids, logprobs, strict=True)
        ]
        return scores if several else scores[0]

    def _encode(self, prompt: Prompt) -> tuple[int, ...]:
        ids = tuple(self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)
        if not 0 < len(ids) < self.max_seq_len:
            raise IngotError(
                f"prompt: expected 1 to {self.max_seq_len - 1:,} tokens, got {len(ids):,}",
                hint="shorten the prompt" if ids else "give some text",
            )
        return ids

    def _stream(
        self,
        prompts: list[tuple[int, ...]] | Iterator[tuple[int, ...]],
        sampling_params: SamplingParams
        | Sequence[SamplingParams]
        | Iterator[SamplingParams]
        | None,
        max_tokens: int,
        stop: str | Sequence[str],
        ignore_eos: bool,
        adapter: str,
    ) -> Iterator[CompletionChunk]:
        if adapter:
            self._adapters.find(adapter)
        several = not isinstance(sampling_params, SamplingParams | None)
        params = _for_each(sampling_params, prompts)
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        if max_tokens < 1:
            raise ConfigError(f"max_tokens: expected at least 1, got {max_tokens}", hint="raise it")
        eos = frozenset() if ignore_eos else self.tokenizer.eos_token_ids
        streams = (
            _RequestStream(
                index,
                Request(
                    id=next(self._ids),
                    prompt=prompt,
                    max_tokens=max_tokens,
                    adapter=adapter,
                    sampling_params=_with_stop_tokens(one, eos),
                ),
                StreamingDetokenizer(self.tokenizer, stops),
            )
            for index, (prompt, one) in enumerate(zip(prompts, params, strict=several))
        )
        # A list is checked before anything is computed.
        return self._run(iter(list(streams)) if isinstance(prompts, list) else streams)

    def _run(self, streams: Iterator[_RequestStream]) -> Iterator[CompletionChunk]:
        """Feed requests to the engine, at most a few times as many as run together."""
        engine = self.engine
        active: dict[int, _RequestStream] = {}
        max_active = _QUEUE_FACTOR * engine.config.max_num_seqs
        try:
            while True:
                for stream in itertools.islice(streams, max_active - len(active)):
                    self._outputs[stream.request.id] = []
                    active[stream.request.id] = stream
                    engine.add_request(stream.request)
                if not active:
                    return
                if not any(self._outputs[id] for id in active):
                    self._step(engine)
                for id, stream in list(active.items()):
                    outputs, self._outputs[id] = self._outputs[id], []
                    for output in outputs:
                        chunk = stream.feed(output)
                        if chunk.finish_reason is not None:
                            self._outputs.pop(id)
                            del active[id]
                            engine.abort(id, FinishReason.STOP)  # only if a stop string ended it
                            yield chunk
                            break
                        yield chunk
        finally:
            for id in active:
                self._outputs.pop(id, None)
                engine.abort(id)

    def _step(self, engine: Engine) -> None:
        """Run one step of the engine and file its outputs."""
        if engine is not self.engine:
            raise IngotError(
                "stream: its requests were lost when a step of another stream was interrupted",
                hint="start the stream again",
            )
        try:
            outputs = engine.step()
        except BaseException:  # Ctrl-C, for one: the engine may have stopped halfway
            del self.engine
            raise
        for output in outputs:
            if output.id in self._outputs:  # otherwise its stream was closed
                self._outputs[output.id].append(output)


@dataclass(frozen=True)
class _RequestStream:
    """A request, and the text of its tokens so far."""

    index: int
    request: Request
    detokenizer: StreamingDetokenizer

    def feed(self, output: Output) -> CompletionChunk:
        """Return the chunk for an output of the engine; raise its error if it has failed."""
        tokens, reason = output.tokens, output.finish_reason
        if reason not in (None, FinishReason.STOP, FinishReason.LENGTH):
            raise IngotError(
                f"prompt {self.index}: {output.error or reason.value}",
                hint="check the sampling parameters, or give the KV cache more memory",
            )
        stopped = reason is FinishReason.STOP and tokens[-1:] and self._is_stop(tokens[-1])
        text = self.detokenizer.feed(tokens[:-1] if stopped else tokens)
        if self.detokenizer.stopped:
            reason = FinishReason.STOP
        elif reason is not None:
            text += self.detokenizer.finish()
        return CompletionChunk(
            index=self.index,
            text=text,
            token_ids=tokens,
            logprobs=output.logprobs,
            prompt_logprobs=output.prompt_logprobs,
            num_cached_tokens=output.num_cached_tokens,
            finish_reason=None if reason is None else reason.value,
        )

    def _is_stop(self, token: int) -> bool:
        return token in self.request.sampling_params.stop_token_ids


def as_batch(prompts: Prompt | Sequence[Prompt]) -> tuple[bool, list[Prompt]]:
    """Return whether several prompts were given, and a list of them.

    >>> as_batch("a"), as_batch([1, 2]), as_batch(["a"])
    ((False, ['a']), (False, [[1, 2]]), (True, ['a']))
    """
    several = not isinstance(prompts, str) and not (prompts and isinstance(prompts[0], int))
    return several, list(prompts) if several else [prompts]  # type: ignore


def _for_each(
    params: SamplingParams | Sequence[SamplingParams] | Iterator[SamplingParams] | None,
    prompts: list[tuple[int, ...]] | Iterator[tuple[int, ...]],
) -> Iterable[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return itertools.repeat(params or GREEDY)
    if isinstance(prompts, list) and isinstance(params, Sequence) and len(params) != len(prompts):
        raise ConfigError(
            f"sampling_params: expected one for each of {len(prompts)} prompts, got {len(params)}",
            hint="give as many as prompts, or one for all",
        )
    return params


def _with_stop_tokens(params: SamplingParams, eos: frozenset[int]) -> SamplingParams:
    stop_token_ids = tuple(sorted({*params.stop_token_ids, *eos}))
    return msgspec.structs.replace(params, stop_token_ids=stop_token_ids)


def _join(prompt: Prompt, ids: tuple[int, ...], chunks: list[CompletionChunk]) -> Completion:
    logprobs = [one for chunk in chunks for one in chunk.logprobs or ()]
    of_prompt = [one for chunk in chunks for one in chunk.prompt_logprobs or ()]
    reason = chunks[-1].finish_reason
    assert reason is not None
    return Completion(
        prompt=prompt if isinstance(prompt, str) else None,
        text="".join(chunk.text for chunk in chunks),
        finish_reason=reason,
        prompt_token_ids=ids,
        token_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
        logprobs=tuple(logprobs) if logprobs else None,
        prompt_logprobs=tuple(of_prompt) if of_prompt else None,
        num_cached_tokens=sum(chunk.num_cached_tokens or 0 for chunk in chunks),
    )
