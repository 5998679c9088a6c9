"""`ingot` with an engine whose steps fail for those who ask for it.

    python -m tests.serving.faulty serve DIR ...

A step that computes a prompt which begins with POISON fails, as for want of memory; one that begins
with DEADLY kills the process. A model in a directory `failing` fails every third step, one in
`slow` takes 50 ms more for each.
"""

from __future__ import annotations

import os
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

POISON = (1, 2, 3, 1, 2, 3)
DEADLY = (3, 2, 1, 3, 2, 1)


def main() -> None:
    """Run the command line; with a file's number for its first argument, the fork server."""
    if sys.argv[1].isdigit():
        from ingot.serving.workers import fork_server, worker

        plain = worker.serve

        def serve(settings: worker.WorkerSettings, *rest: Any) -> int:
            break_steps(Path(settings.directory).name)
            return plain(settings, *rest)

        worker.serve = serve
        fork_server.main()
    else:
        from ingot.cli import main as run
        from ingot.serving.workers.fork_server import ForkServer

        ForkServer.command = (sys.executable, "-m", "tests.serving.faulty")
        run()


def break_steps(model: str) -> None:
    """Replace the steps of this process."""
    from ingot.serving.engine.runner import Runner

    plain, numbers = Runner.run, count(1)

    def run(self, work, slots=None):  # pyright: ignore
        if model == "failing" and next(numbers) > 12 and next(numbers) % 3 == 0:  # not the warm-up
            raise MemoryError("no memory, for a test")
        if model == "slow":
            time.sleep(0.05)
        if any(item.tokens[: len(POISON)] == POISON for item in work):
            raise MemoryError("no memory, for a test")
        if any(item.tokens[: len(DEADLY)] == DEADLY for item in work):
            os._exit(1)
        return plain(self, work, slots)

    Runner.run = run  # pyright: ignore


if __name__ == "__main__":
    main()
