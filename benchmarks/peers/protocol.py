"""How a peer talks: one JSON object a line, on stdin and stdout, for as long as stdin is open.

    python -m peers.NAME MODEL CACHE          # in benchmarks/, with the Python of the peer

The peer first says `{"version", "dtype", "load_seconds"}`: what it is, what it holds the weights
in, and the seconds it took to import its libraries and load the model. Then it answers each
`{"prompts", "output_len"}` (token ids, one list a sequence, all of one length) with
`{"total_seconds", "ttft_seconds", "tokens"}`. It generates greedily and exactly as many new tokens
as asked, past any end-of-text; a peer that cannot tell its first token says null. What it cannot do
it answers with `{"error"}`, and it goes on.

A peer is a module that calls `serve(load)`. `load` imports what it needs, so that this counts, and
returns a `LoadedModel`.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TextIO

Prompts = list[list[int]]
Generate = Callable[[Prompts, int], tuple[float | None, list[list[int]]]]
"""From prompts and a number of new tokens: seconds until the first tokens, or None; all tokens."""


@dataclass(frozen=True)
class LoadedModel:
    """What was loaded."""

    version: str
    dtype: str
    generate: Generate


def serve(
    load: Callable[[Path], LoadedModel], prepare: Callable[[Path, Path], Path] | None = None
) -> None:
    """Load the model and answer until stdin is closed.

    `prepare` makes the file that is loaded out of the model's directory, in the cache; what that
    takes is no part of the start.
    """
    # What libraries print, C++ included, goes to stderr; stdout is ours alone.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    model, cache = map(Path, sys.argv[1:])
    source = prepare(model, cache) if prepare else model
    start = perf_counter()
    peer = load(source)
    _say(answers, version=peer.version, dtype=peer.dtype, load_seconds=perf_counter() - start)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            start = perf_counter()
            first, tokens = peer.generate(request["prompts"], request["output_len"])
            end = perf_counter()
        except Exception as error:
            traceback.print_exc()
            _say(answers, error=f"{type(error).__name__}: {error}")
            continue
        _say(answers, total_seconds=end - start, ttft_seconds=first, tokens=tokens)


def _say(file: TextIO, **fields: object) -> None:
    print(json.dumps(fields), file=file, flush=True)
