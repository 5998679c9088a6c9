"""ingot itself: one `Session` for the one sequence of a batch."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter

from peers.talk import Peer, Prompts, serve


def load(model: Path) -> Peer:
    """As `ingot generate` does, without an end of text."""
    import ingot
    from ingot.nn import Session

    decoder = ingot.load(model).decoder
    dtype = str(decoder.embed.weight.dtype).removeprefix("torch.")

    def generate(prompts: Prompts, new: int) -> tuple[float, list[list[int]]]:
        if len(prompts) > 1:
            raise NotImplementedError("a session has one sequence")
        start, times, tokens = perf_counter(), [], []
        for token in Session(decoder).stream(prompts[0], max_tokens=new):
            times.append(perf_counter() - start)
            tokens.append(token)
        return times[0], [tokens]

    return Peer(ingot.__version__, dtype, generate)


if __name__ == "__main__":
    serve(load)
