"""`ingot chat`: talk to a model in the terminal."""

from __future__ import annotations

import importlib
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from ingot.cli.generate import SamplingOptions, TextStreamer, check_max_tokens, load, print_stats
from ingot.core.errors import IngotError
from ingot.core.log import stderr
from ingot.interop.chat import ChatError, Message
from ingot.serving.engine.speculate import SpeculateKind

if TYPE_CHECKING:
    from ingot.workflows.llm import LLM


def chat(
    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")],
    sampling: Annotated[SamplingOptions, tyro.conf.OmitArgPrefixes] = SamplingOptions(),  # noqa: B008
    system: str | None = None,
    max_tokens: int = 512,
    device: str = "auto",
    adapter: Path | None = None,
    speculate: SpeculateKind | None = None,
) -> None:
    """Chat with a model in the terminal; each line is a message.

    Ctrl-C stops an answer; at the prompt, Ctrl-C or Ctrl-D quits. If stdin is not a terminal, each
    of its lines is a message: `echo "What is the capital of France?" | ingot chat smollm2`.

    Examples: `ingot chat smollm2`, `ingot chat smollm2 --system "Answer in one word."`,
    `ingot chat smollm2 --temperature 0.7 --top-p 0.9 --seed 1`.

    Args:
        model: A model directory, or ORG/NAME on the Hugging Face hub.
        sampling: How tokens are sampled.
        system: The system prompt.
        max_tokens: The most tokens of an answer.
        device: Where to compute: auto, cpu, cuda, cuda:1.
        adapter: PEFT directory of a LoRA adapter of the model.
        speculate: Speculative decoding: ngram (for quotes, edits and code), or int4 (a 4-bit copy
            of the model drafts). The answer is the same.
    """
    check_max_tokens(max_tokens)
    params = sampling.params()
    llm = load(model, device, adapter, speculate=speculate)
    if llm.tokenizer.chat_template is None:
        raise ChatError(
            f"{model}: the model has no chat template",
            hint=f'have it complete a text: ingot generate {model} "Once upon a time"',
        )
    streamer = TextStreamer(llm, params, max_tokens)
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    if sys.stdin.isatty():
        stderr().print("[dim]Ctrl-C stops an answer, Ctrl-D quits.[/]", highlight=False)
    while (line := _read_line()) is not None:
        messages.append({"role": "user", "content": line})
        result = streamer.run(_encode(llm, messages))
        print_stats(result)
        messages.append({"role": "assistant", "content": result.text})
        if result.finish_reason == "interrupt" and not sys.stdin.isatty():
            raise KeyboardInterrupt


def _encode(llm: LLM, messages: list[Message]) -> list[int]:
    ids = llm.apply_chat_template(messages)
    if len(ids) >= llm.max_seq_len:
        raise IngotError(
            f"conversation: expected at most {llm.max_seq_len - 1:,} tokens, got {len(ids):,}",
            hint="start a new one, or send shorter messages",
        )
    return ids


def _read_line() -> str | None:
    """Read the next message, without empty lines; None at the end of the input."""
    terminal = sys.stdin.isatty()
    if terminal:
        with suppress(ImportError):
            importlib.import_module("readline")  # gives input() arrow keys and a history
    try:
        while True:
            line = input("> " if terminal and sys.stdout.isatty() else "").strip()
            if line:
                return line
    except (EOFError, KeyboardInterrupt) as error:
        if not terminal and isinstance(error, KeyboardInterrupt):
            raise
        if terminal:
            print()  # noqa: T201
        return None
