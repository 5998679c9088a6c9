"""Rank the default configurations of the GPU kernels again: `python -m tools.gpu_defaults`.

Run this after adding a kernel or changing a tuning space. It compiles the whole tuning space of
every kernel for all targets, ranks the configurations by the compiled code
(`ingot.kernels.triton.report.rank_configs`) and writes `ingot/kernels/triton/defaults.json`.
Cached binaries are not recompiled. Needs `pip install 'ingot[gpu]'`, but no GPU.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from ingot.core import paths
from ingot.kernels.triton import config_store
from ingot.kernels.triton.compiler import compile_all, compile_jobs
from ingot.kernels.triton.report import rank_configs


def main() -> None:
    """Compile, rank and write."""
    ranking = rank_configs(compile_all(compile_jobs()))
    paths.write_atomic(config_store.DEFAULTS, format_ranking(ranking))


def format_ranking(ranking: Mapping[str, Mapping[str, Sequence[str]]]) -> str:
    """Return a ranking as JSON with one line for each kernel and target.

    >>> print(format_ranking({"silu": {"sm_90": ["num_warps=4 num_stages=1"]}}), end="")
    {
      "silu": {
        "sm_90": ["num_warps=4 num_stages=1"]
      }
    }
    """
    kernels = [
        f'  "{kernel}": {{\n'
        + ",\n".join(f'    "{target}": {json.dumps(configs)}' for target, configs in ranks.items())
        + "\n  }"
        for kernel, ranks in ranking.items()
    ]
    return "{\n" + ",\n".join(kernels) + "\n}\n"


if __name__ == "__main__":
    main()
