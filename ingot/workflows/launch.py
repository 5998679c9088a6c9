"""Start the ranks of a run on this machine, with torch's elastic agent.

The ranks are processes of `python -m ingot`. Rank 0 has the terminal; the output of the others is
in `ranks/` in the directory of the run. If one fails, the others are stopped, and up to
`max_restarts` times all are started again, from the newest checkpoint. On a cluster, torchrun
starts the same processes on every machine:

    torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \
        -m ingot train recipe.toml --run DIRECTORY
"""

# pyright: basic
from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ingot.core.device import detect
from ingot.core.errors import IngotError
from ingot.workflows.train import LOGS


def launch(
    ranks: int,
    arguments: Sequence[str],
    run_dir: Path,
    *,
    max_restarts: int = 0,
    quiet: bool = False,
) -> None:
    """Run `ingot` with these arguments on this number of ranks, and wait for them.

    With `quiet`, the output of rank 0 is in a file, too.
    """
    if max_restarts < 0:
        raise IngotError(f"max_restarts: must be at least 0, got {max_restarts}", hint="give 3")
    threads = max(1, detect().cpu.cores // ranks)
    settings = {
        "OMP_NUM_THREADS": str(threads),
        "GLOO_SOCKET_IFNAME": "lo",  # other machines cannot connect
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    os.environ.update({name: os.environ.get(name, value) for name, value in settings.items()})
    logs = run_dir / LOGS
    logs.mkdir(parents=True, exist_ok=True)
    in_files = dict.fromkeys(range(0 if quiet else 1, ranks), Std.ALL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id="ingot",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=max_restarts,
        monitor_interval=0.2,
        logs_specs=DefaultLogsSpecs(log_dir=str(logs), redirects=in_files),
    )
    try:
        elastic_launch(config, sys.executable)("-m", "ingot", *arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        raise IngotError(
            f"rank {rank} of {ranks} exited with status {failure.exitcode}",
            hint=f"see its output above or in {logs}; continue with --resume, or let a failed run "
            "continue by itself: --max-restarts 3",
        ) from None
    except SignalException:
        raise KeyboardInterrupt from None  # the ranks got it, too, and wrote a checkpoint
