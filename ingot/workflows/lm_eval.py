"""A model for lm-eval (EleutherAI's evaluation harness), computed by `ingot.LLM`.

    pip install 'ingot[lm-eval]'
    python -m ingot.workflows.lm_eval run --model ingot --model_args model=smollm2 --tasks ...

takes the arguments of the `lm-eval` command, with a further `--model ingot`. Requests of a task are
batched by the engine, and results do not depend on the batches; `--batch_size` has no effect.

`loglikelihood` scores the tokens of a continuation, `loglikelihood_rolling` those of a text after
the model's BOS token (EOS if it has none), in windows if it is longer than the context. A context
that is too long loses its first tokens, as with lm-eval's other models.
"""

# pyright: basic
from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ingot.core import device as devices
from ingot.core import log
from ingot.core.errors import ConfigError, IngotError
from ingot.evaluation.model import split_choice, windows
from ingot.serving.engine.sampling_params import SamplingParams
from ingot.workflows.llm import LLM

if TYPE_CHECKING:
    LM = object
else:
    try:
        from lm_eval.api.model import LM
    except ImportError:  # the rest of the package works without lm-eval
        LM = object

MAX_GEN_TOKS = 256
_log = log.logger(__name__)
_IGNORED = ("do_sample", "until", "max_gen_toks", "temperature")
_PASSED = ("top_p", "top_k", "min_p", "seed", "repetition_penalty")


class IngotLM(LM):
    """lm-eval's interface to a model.

    Args:
        model: A model directory, or `ORG/NAME` on the Hugging Face hub.
        device: "auto", "cpu", "cuda:1", ...; "auto" if it is not available, since lm-eval asks for
            a GPU by default.
        max_gen_toks: The most tokens to generate, if a task does not set it.
        batch_size: Ignored: the engine batches.
        max_batch_size: Ignored as well.
    """

    def __init__(
        self,
        model: str,
        device: str | None = None,
        max_gen_toks: int = MAX_GEN_TOKS,
        batch_size: Any = None,
        max_batch_size: Any = None,
    ) -> None:
        super().__init__()
        self.llm = LLM(model, device=_resolve(device))
        self._name, self._max_gen_toks = str(model), int(max_gen_toks)

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer, for lm-eval's cache of requests."""
        return self._name.replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Return the model's chat template; empty if `chat_template` is False or it has none."""
        found = self.llm.tokenizer.chat_template
        return found.source if chat_template and found else ""

    def apply_chat_template(
        self, chat_history: Sequence[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Format messages as text."""
        return self.llm.tokenizer.render_chat(
            chat_history, add_generation_prompt=add_generation_prompt
        )

    @property
    def prefix_token_id(self) -> int:
        """The token before a text: BOS, or else EOS."""
        tokenizer = self.llm.tokenizer
        bos = tokenizer.inner.token_to_id(tokenizer.special_tokens.get("bos_token", ""))
        if bos is None and not tokenizer.eos_token_ids:
            raise IngotError(
                "the tokenizer has neither a BOS nor an EOS token to begin a text with",
                hint="set bos_token in tokenizer_config.json",
            )
        return min(tokenizer.eos_token_ids) if bos is None else bos

    # Requests

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Return the log-probability of each continuation, and whether it is the greedy one."""
        sequences = [self._encode_pair(*request.args) for request in requests]
        scores = self._score(sequences, top=1)
        return [(math.fsum(logprobs), greedy) for logprobs, greedy in scores]

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Return the log-probability of each text."""
        sequences: list[tuple[list[int], int]] = []
        counts: list[int] = []
        for request in requests:
            ids = [self.prefix_token_id, *self._encode(request.args[0])]
            parts = list(windows(len(ids), self._size)) if len(ids) > 1 else []
            sequences += [(ids[start:stop], first - start) for start, stop, first in parts]
            counts.append(len(parts))
        scores = self._score(sequences)
        texts = [itertools.islice(scores, count) for count in counts]
        return [math.fsum(one for logprobs, _ in parts for one in logprobs) for parts in texts]

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Return the text that is generated for each context, up to a stop string."""
        texts = [""] * len(requests)
        groups: dict[tuple[tuple[str, ...], int], list[int]] = {}
        params: dict[int, SamplingParams] = {}
        for number, request in enumerate(requests):
            stop, max_tokens, params[number] = self._sampling(request.args[1])
            groups.setdefault((stop, max_tokens), []).append(number)
        for (stop, max_tokens), numbers in groups.items():
            room = max(1, self._size + 1 - max_tokens)  # for the prompt
            prompts = [self._encode(requests[n].args[0], bos=True)[-room:] for n in numbers]
            chosen = [params[n] for n in numbers]
            found = self.llm.generate(prompts, chosen, max_tokens=max_tokens, stop=stop)
            for number, completion in zip(numbers, found, strict=True):
                texts[number] = completion.text
        return texts

    # Tokens

    def _encode(self, text: str, bos: bool = False) -> list[int]:
        """Return token ids; `bos` adds the tokens that begin every text, unless it has them."""
        tokenizer = self.llm.tokenizer
        begin = tokenizer.special_tokens.get("bos_token")
        return tokenizer.encode(
            text, add_special_tokens=bos and not (begin and text.startswith(begin))
        )

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], int]:
        """Return the token ids of both, and the number of those of the context."""
        if not context:
            ids = [self.prefix_token_id, *self._encode(continuation)]
            return self._shorten(ids, 1)
        context, continuation = split_choice(context, "", continuation)
        whole = self._encode(context + continuation, bos=True)
        return self._shorten(whole, len(self._encode(context, bos=True)))

    def _shorten(self, ids: list[int], first: int) -> tuple[list[int], int]:
        """Drop the first tokens of a context that is too long."""
        dropped = max(0, len(ids) - self._size)
        return ids[dropped:], max(1, first - dropped)

    @property
    def _size(self) -> int:
        return min(self.llm.max_seq_len, self.llm.engine.config.capacity) - 1

    def _score(
        self, sequences: Sequence[tuple[list[int], int]], top: int = 0
    ) -> Iterator[tuple[list[float], bool]]:
        """Return the log-probabilities of each sequence from its first scored token on; with `top`,
        also whether each of these tokens is the most likely one."""
        params = SamplingParams(temperature=0.0, prompt_logprobs=top)
        found = [list[tuple[float, bool]]() for _ in sequences]
        prompts = (ids for ids, _ in sequences)
        for chunk in self.llm.stream(prompts, params, max_tokens=1, ignore_eos=True):
            found[chunk.index] += [
                (one.logprob, one.token in [token for token, _ in one.top])
                for one in chunk.prompt_logprobs or ()
            ]
        for (_, first), scored in zip(sequences, found, strict=True):
            scored = scored[first - 1 :]
            yield [logprob for logprob, _ in scored], all(greedy for _, greedy in scored)

    def _sampling(self, settings: dict[str, Any]) -> tuple[tuple[str, ...], int, SamplingParams]:
        """Return stop strings, the most tokens and the sampling parameters of a request."""
        if unknown := [name for name in settings if name not in (*_IGNORED, *_PASSED)]:
            raise ConfigError(
                f"generation_kwargs: '{unknown[0]}' is not supported",
                hint=f"use {', '.join(sorted((*_IGNORED, *_PASSED)))}",
            )
        until = settings.get("until") or ()
        stop = tuple(one for one in ([until] if isinstance(until, str) else until) if one)
        # Without do_sample, transformers ignores the temperature.
        sample = settings.get("do_sample", settings.get("temperature", 0) > 0)
        temperature = float(settings.get("temperature", 1.0)) if sample else 0.0
        passed = {name: settings[name] for name in _PASSED if name in settings}
        params = SamplingParams(temperature=temperature, **passed)
        return stop, int(settings.get("max_gen_toks", self._max_gen_toks)), params


def _resolve(device: str | None) -> torch.device:
    try:
        return devices.resolve(device or "auto")
    except IngotError as error:
        _log.warning("%s; using another device", error.message)
        return devices.resolve("auto")


def main() -> None:
    """Run the `lm-eval` command with the model `ingot`."""
    try:
        from lm_eval.__main__ import cli_evaluate  # type: ignore
        from lm_eval.api.registry import register_model  # type: ignore
    except ImportError as error:
        raise IngotError(
            f"lm-eval needs the package {error.name}", hint="pip install 'ingot[lm-eval]'"
        ) from error
    import lm_eval.models  # type: ignore  # noqa: F401

    register_model("ingot")(IngotLM)
    cli_evaluate()


if __name__ == "__main__":
    main()
