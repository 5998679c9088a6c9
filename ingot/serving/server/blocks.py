"""Formats whose replies are a list of blocks, each opened and closed by events of a stream."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from ingot.serving.engine.detokenizer import TokenTexts
from ingot.serving.engine.reply import Delta
from ingot.serving.server.openai import GenerationJob
from ingot.serving.server.writer import Reply, Writer, encode


class ReplyBlock(NamedTuple):
    """A part of a reply: its reasoning, its content, or one of its tool calls."""

    kind: Literal["reasoning", "content", "call"]
    call: int = 0
    """Index of the tool call."""


def blocks_of(reply: Reply) -> list[ReplyBlock]:
    """Return the blocks of a whole reply.

    >>> blocks_of(Reply(0, content=["Hello"]))
    [ReplyBlock(kind='content', call=0)]
    """
    found = [ReplyBlock("reasoning")] if reply.reasoning else []
    if "".join(reply.content).strip() or not reply.calls:
        found.append(ReplyBlock("content"))
    return found + [ReplyBlock("call", index) for index in range(len(reply.calls))]


class BlockWriter(Writer):
    """Opens a block at its first text, and closes it at the next one or at the end."""

    def __init__(self, job: GenerationJob, token_texts: TokenTexts) -> None:
        super().__init__(job, token_texts)
        self._block: ReplyBlock | None = None
        self.num_blocks = 0
        """Blocks that were opened."""

    def deltas(self, reply: Reply, deltas: Sequence[Delta]) -> bytes:
        """Return the events of new parts."""
        events: list[bytes] = []
        for delta in deltas:
            kind = "call" if delta.kind == "arguments" else delta.kind
            block = ReplyBlock(kind, delta.call)
            if block != self._block:
                events.append(self._close(reply))
                self._block = block
                self.num_blocks += 1
                events.append(self.open_block(reply, block))
            if delta.kind != "call":
                events.append(self.block_delta(reply, block, delta.text))
        return b"".join(events)

    def finish(self, reply: Reply) -> bytes:
        """Return the events at the end of the reply."""
        return self._close(reply)

    def _close(self, reply: Reply) -> bytes:
        block, self._block = self._block, None
        return b"" if block is None else self.close_block(reply, block)

    @abstractmethod
    def open_block(self, reply: Reply, block: ReplyBlock) -> bytes:
        """Return the events that open a block, the last of `num_blocks`."""

    @abstractmethod
    def block_delta(self, reply: Reply, block: ReplyBlock, text: str) -> bytes:
        """Return the event of new text."""

    @abstractmethod
    def close_block(self, reply: Reply, block: ReplyBlock) -> bytes:
        """Return the events that close a block."""


def event(fields: Mapping[str, Any]) -> bytes:
    """Return a server-sent event with a name.

    >>> event({"type": "message_stop"})
    b'event: message_stop\\ndata: {"type":"message_stop"}\\n\\n'
    """
    return b"event: %b\ndata: %b\n\n" % (fields["type"].encode(), encode(fields))
