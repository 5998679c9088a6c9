"""Blocks of replies: each is opened once and closed once."""

from __future__ import annotations

from ingot.serving.engine.detokenizer import TokenTexts
from ingot.serving.engine.reply import Delta
from ingot.serving.engine.sampling_params import SamplingParams
from ingot.serving.server.blocks import ReplyBlock, blocks_of
from ingot.serving.server.messages import MessagesWriter
from ingot.serving.server.openai import GenerationJob
from ingot.serving.server.writer import Reply, ToolCall
from tests.serving.engine.test_detokenizer import TOKENIZER


def test_blocks_of_a_reply() -> None:
    assert blocks_of(Reply(0)) == [ReplyBlock("content")]
    calls = [ToolCall("f"), ToolCall("g")]
    found = blocks_of(Reply(0, reasoning=["Hm"], content=["\n"], calls=calls))
    assert found == [ReplyBlock("reasoning"), ReplyBlock("call", 0), ReplyBlock("call", 1)]


def test_a_block_is_closed_when_the_next_is_opened() -> None:
    job = GenerationJob(
        **{"model": "m", "prompts": [(1,)], "echo": [], "n": 1, "max_tokens": 9},
        sampling_params=SamplingParams(),
    )
    writer, reply = MessagesWriter(job, TokenTexts(TOKENIZER)), Reply(0)
    deltas = [
        *(Delta("content", "a"), Delta("content", "b")),
        *(Delta("call", "f", 0), Delta("arguments", "{}", 0), Delta("call", "g", 1)),
    ]
    events = b""
    for delta in deltas:
        reply.add([delta])
        events += writer.deltas(reply, [delta])
    events += writer.finish(reply) + writer.finish(reply)
    names = [line[7:] for line in events.decode().splitlines() if line.startswith("event: ")]
    opened, changed, closed = "content_block_start", "content_block_delta", "content_block_stop"
    text = [opened, changed, changed, closed]
    assert names == [*text, opened, changed, closed, opened, closed]
