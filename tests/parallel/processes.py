"""Ranks in processes of their own, which run a function of a test module.

    run_ranks(4, "tests.parallel.comparison:train_all", {"jobs": jobs}, tmp_path)

calls `train_all(ranks, {"jobs": jobs}, tmp_path)` in each of them.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

_TIMEOUT_S = 300  # for each rank: the cores of a small machine are shared


def run_ranks(size: int, function: str, options: dict[str, Any], directory: Path) -> None:
    """Run `module:function` on this number of ranks; raise unless all succeed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        **os.environ,
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", __name__, function, json.dumps(options), str(directory)]
    processes = [
        subprocess.Popen(
            command,
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        outputs = [process.communicate(timeout=_TIMEOUT_S * size)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    failed = [
        f"rank {rank}: {output}"
        for rank, (process, output) in enumerate(zip(processes, outputs, strict=True))
        if process.returncode != 0
    ]
    assert not failed, "\n".join(failed)


def _main(function: str, options: str, directory: str) -> None:
    from ingot.parallel.ranks import connect, disconnect

    module, _, name = function.partition(":")
    run = getattr(importlib.import_module(module), name)
    ranks = connect()
    run(ranks, json.loads(options), Path(directory))
    disconnect()


if __name__ == "__main__":
    _main(*sys.argv[1:])
