"""Ranks in processes of their own, which run a function of a test module.

    run_ranks(4, "tests.parallel.comparison:train_all", {"jobs": jobs}, tmp_path)

calls `train_all(ranks, {"jobs": jobs}, tmp_path)` in each of them.

The processes are forked from one that has imported torch and ingot, which takes seconds each time.
"""

from __future__ import annotations

import importlib
import os
import socket
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any
from unittest import mock

_TIMEOUT_S = 300  # for each rank: the cores of a small machine are shared


def run_ranks(size: int, function: str, options: dict[str, Any], directory: Path) -> None:
    """Run `module:function` on this number of ranks; raise unless all succeed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    context = get_context("forkserver")
    context.set_forkserver_preload(["tests.parallel.comparison"])
    with TemporaryDirectory() as directory_of_outputs:
        outputs = [Path(directory_of_outputs, str(rank)) for rank in range(size)]
        processes = [
            context.Process(
                target=_run_rank, args=(shared, rank, output, function, options, directory)
            )
            for rank, output in enumerate(outputs)
        ]
        try:
            # OpenMP reads it in the process they are forked from, which starts with the first.
            with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):
                for process in processes:
                    process.start()
            end = monotonic() + _TIMEOUT_S * size
            for process in processes:
                process.join(max(0, end - monotonic()))
        finally:
            for process in processes:
                process.kill()
        failed = [
            f"rank {rank}: {output.read_text()}"
            for rank, (process, output) in enumerate(zip(processes, outputs, strict=True))
            if process.exitcode != 0
        ]
    assert not failed, "\n".join(failed)


def _run_rank(
    shared: dict[str, str],
    rank: int,
    output: Path,
    function: str,
    options: dict[str, Any],
    directory: Path,
) -> None:
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(shared, RANK=str(rank), LOCAL_RANK=str(rank))
    from ingot.parallel.ranks import connect, disconnect

    module, _, name = function.partition(":")
    run = getattr(importlib.import_module(module), name)
    ranks = connect()
    run(ranks, options, directory)
    disconnect()
