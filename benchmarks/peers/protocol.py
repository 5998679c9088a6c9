"""The protocol of a compared system: one JSON object per line, on stdin and stdout.

    python -m peers.NAME MODEL CACHE          # in benchmarks/, with the Python of its environment

The system first writes `{"version", "dtype", "load_seconds"}`: its version, the format of its
weights, and the seconds it took to import its libraries and load the model; or `{"error"}` if it
cannot load the model. Then it answers each
`{"prompts", "output_len"}` (token ids, one list per sequence, all of one length) with
`{"total_seconds", "ttft_seconds", "tokens"}`. It generates greedily and always `output_len` tokens,
also after an end of text; `ttft_seconds` is null if it cannot be measured. A request that fails is
answered with `{"error"}`; the next request may succeed. The process exits when stdin is closed.

A system is a module that calls `serve(load)`. `load` imports the libraries, so that this time
counts, and returns a `LoadedModel`.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TextIO

Prompts = list[list[int]]
Generate = Callable[[Prompts, int], tuple[float | None, list[list[int]]]]
"""From prompts and a number of tokens: seconds to the first tokens, or None; all tokens."""


@dataclass(frozen=True)
class LoadedModel:
    """A loaded model and how to generate with it."""

    version: str
    dtype: str
    generate: Generate


def serve(
    load: Callable[[Path], LoadedModel], prepare: Callable[[Path, Path], Path] | None = None
) -> None:
    """Load the model and answer requests until stdin is closed.

    `prepare` converts the model directory to the file that is loaded, in the cache. Neither its
    time nor its memory count: it runs in another process, before loading.
    """
    # Output of libraries, C++ included, goes to stderr; stdout is for the protocol alone.
    output = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    directory, cache = map(Path, sys.argv[1:])
    try:
        source = _run_in_child(prepare, directory, cache) if prepare else directory
        start = perf_counter()
        model = load(source)
    except Exception as error:
        traceback.print_exc()
        _write(output, error=f"{type(error).__name__}: {error}")
        sys.exit(1)
    _write(output, version=model.version, dtype=model.dtype, load_seconds=perf_counter() - start)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            start = perf_counter()
            first, tokens = model.generate(request["prompts"], request["output_len"])
            end = perf_counter()
        except Exception as error:
            traceback.print_exc()
            _write(output, error=f"{type(error).__name__}: {error}")
            continue
        _write(output, total_seconds=end - start, ttft_seconds=first, tokens=tokens)


def _run_in_child(prepare: Callable[[Path, Path], Path], directory: Path, cache: Path) -> Path:
    with ProcessPoolExecutor(max_workers=1) as child:
        return child.submit(prepare, directory, cache).result()


def _write(file: TextIO, **fields: object) -> None:
    print(json.dumps(fields), file=file, flush=True)
