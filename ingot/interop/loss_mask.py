"""Loss masks: which tokens of a conversation are trained.

    encoder = SampleEncoder(Tokenizer.load(Path("smollm2")))
    encoder.encode_chat([{"role": "user", "content": "Hi"},
                         {"role": "assistant", "content": "Hello!"}])

The tokens that a model writes when it is served are trained, and no others: the words and tool
calls of the assistant, and the EOS token that ends a turn. For each turn there is a prompt, which a
server would be given, and a completion:

- A template with `{% generation %}` marks the completions itself.
- For other templates, the prompt of turn i is render(messages[:i], add_generation_prompt=True), and
  render(messages[:i + 1]) must begin with it. What follows, up to the EOS token, is the completion.
  If it does not begin with it, the messages are rejected with both texts.

If the prompt of a turn begins with the tokens of the turns before it, they share a sample. If not,
a new sample begins: templates that remove the reasoning of earlier turns (Qwen3) or that place the
system message in the last one (Mistral) get a sample for each turn. Every completion is trained
exactly once, after the prompt that a server would use.

Only token ids are concatenated. A tokenizer may merge the end of a prompt with the beginning of its
completion; a server's prompt ends between them, so they are then encoded separately.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ingot.core import log
from ingot.interop.chat import ChatError, Message
from ingot.interop.tokenizer import Tokenizer

_CONTEXT = 60  # characters of a text that an error shows on each side


class MaskedTokens(NamedTuple):
    """Tokens of a sample, and which of them are trained; the first never is."""

    tokens: list[int]
    trained: list[bool]


class SampleEncoder:
    """Encodes conversations and texts with their loss masks.

    `variables` are those of the chat template, such as `{"enable_thinking": False}`.
    """

    def __init__(self, tokenizer: Tokenizer, variables: Mapping[str, Any] | None = None) -> None:
        self.tokenizer = tokenizer
        self._variables = dict(variables or {})
        self._warned = False

    def encode_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        num_prompt: int = 0,
    ) -> list[MaskedTokens]:
        """Return the samples of a conversation; the first `num_prompt` messages are not trained."""
        template = self.tokenizer.chat_template
        if template is None or not template.has_generation:
            pairs = self._turns_by_prefix(messages, tools, num_prompt)
        else:
            pairs = self._marked_turns(messages, tools, num_prompt)
        samples: list[MaskedTokens] = []
        for prompt, completion in pairs:
            if not samples or prompt[: len(samples[-1].tokens)] != samples[-1].tokens:
                samples.append(MaskedTokens([], []))
            tokens, trained = samples[-1]
            trained += [False] * (len(prompt) - len(tokens)) + [True] * len(completion)
            tokens[:] = prompt + completion
        return [_without_first(sample) for sample in samples]

    def encode_text(self, prompt: str, completion: str) -> MaskedTokens:
        """Return a text of which the part after the prompt is trained, with an EOS token.

        The prompt is encoded as a server encodes it. It may be empty.
        """
        prompt_ids = self.tokenizer.encode(prompt)
        completion_ids = self._encode_completion(prompt, prompt_ids, completion, special=True)
        eos_id = self.tokenizer.inner.token_to_id(
            self.tokenizer.special_tokens.get("eos_token", "")
        )
        if eos_id is not None and completion_ids[-1:] != [eos_id]:
            completion_ids.append(eos_id)
        trained = [False] * len(prompt_ids) + [True] * len(completion_ids)
        return _without_first(MaskedTokens(prompt_ids + completion_ids, trained))

    def _turns_by_prefix(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        num_prompt: int,
    ) -> Iterator[tuple[list[int], list[int]]]:
        """Yield the prompt and the completion of each turn, up to its EOS token."""
        for i, message in enumerate(messages):
            if i < num_prompt or message.get("role") != "assistant":
                continue
            if i == 0:
                raise ChatError(
                    "the conversation begins with an assistant message, which has no prompt",
                    hint="begin it with a user message",
                )
            prompt = self._render(messages[:i], tools, True)
            whole = self._render(messages[: i + 1], tools, False)
            if not whole.startswith(prompt):
                raise _diverging(i, prompt, whole)
            prompt_ids = self.tokenizer.encode(prompt, add_special_tokens=False)
            ids = self._encode_completion(prompt, prompt_ids, whole[len(prompt) :])
            completion_ids = self._cut_after_eos(ids)
            if completion_ids is None:
                raise _without_eos(i, whole[len(prompt) :])
            yield prompt_ids, completion_ids

    def _marked_turns(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        num_prompt: int,
    ) -> Iterator[tuple[list[int], list[int]]]:
        """Yield the text before each `{% generation %}`, and the text that it marks."""
        template = self.tokenizer.chat_template
        assert template is not None
        variables = {**self.tokenizer.special_tokens, **self._variables}
        text, spans = template.render_with_spans(messages, tools=tools, **variables)
        start = len(self._render(messages[:num_prompt], tools, False)) if num_prompt else 0
        for begin, end in spans:
            if begin == end or begin < start:
                continue
            prompt_ids = self.tokenizer.encode(text[:begin], add_special_tokens=False)
            ids = self._encode_completion(text[:begin], prompt_ids, text[begin:end])
            completion_ids = self._cut_after_eos(ids)
            if completion_ids is None:
                self._warn_without_eos()
            yield prompt_ids, ids if completion_ids is None else completion_ids

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
    ) -> str:
        return self.tokenizer.render_chat(messages, tools, add_generation_prompt, **self._variables)

    def _encode_completion(
        self, prompt: str, prompt_ids: list[int], completion: str, special: bool = False
    ) -> list[int]:
        whole = self.tokenizer.encode(prompt + completion, add_special_tokens=special)
        if whole[: len(prompt_ids)] == prompt_ids:
            return whole[len(prompt_ids) :]
        ids = self.tokenizer.encode(completion, add_special_tokens=False)
        if self.tokenizer.decode(ids, skip_special_tokens=False) != completion:
            raise ChatError(
                "the tokenizer merges the end of the prompt with the completion: "
                f"{prompt[-_CONTEXT:]!r} and {completion[:_CONTEXT]!r}",
                hint="end the prompt where a token ends, for example before a space",
            )
        return ids

    def _cut_after_eos(self, ids: list[int]) -> list[int] | None:
        """Return the ids up to the first EOS token, where a server stops; None without one.

        Templates may write a newline or another EOS token after it, but no words.
        """
        is_eos = (token in self.tokenizer.eos_token_ids for token in ids)
        end = next((k + 1 for k, found in enumerate(is_eos) if found), None)
        if end is not None and self.tokenizer.decode(ids[end:]).strip():
            inside = self.tokenizer.decode(ids[:end], skip_special_tokens=False)
            raise ChatError(
                f"an EOS token ends a message before its last word: {inside[-_CONTEXT:]!r}",
                hint="remove the text of the token from the message",
            )
        return None if end is None else ids[:end]

    def _warn_without_eos(self) -> None:
        if not self._warned:
            self._warned = True
            log.logger(__name__).warning(
                "the template's {% generation %} excludes the EOS token: the model does not learn "
                "to end its turn"
            )


def _without_first(sample: MaskedTokens) -> MaskedTokens:
    """Return the sample with its first token not trained: nothing predicts it."""
    sample.trained[:1] = [False] * len(sample.trained[:1])
    return sample


def _diverging(number: int, prompt: str, whole: str) -> ChatError:
    at = next(
        (k for k, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(whole)
    )
    window = slice(max(0, at - _CONTEXT), at + _CONTEXT)
    return ChatError(
        f"message {number}: the chat template renders it differently from the prompt that it "
        f"answers, from character {at:,} on\n"
        f"  prompt:       ...{prompt[window]!r}\n"
        f"  conversation: ...{whole[window]!r}",
        hint="mark the assistant's words with {% generation %} in the template, or set the "
        "template's variables (data.chat_template_kwargs), such as enable_thinking",
    )


def _without_eos(number: int, completion: str) -> ChatError:
    return ChatError(
        f"message {number}: the template ends it with {completion[-_CONTEXT:]!r}, which has none "
        "of the model's EOS tokens: a server would not stop there",
        hint="list the token that ends a turn in eos_token_id of generation_config.json",
    )
