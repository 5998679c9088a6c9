"""`ingot bench`: how fast ops and models are on this machine, compared with its roofline and with
other systems."""

from __future__ import annotations

from ingot.cli.bench_compare import compare
from ingot.cli.bench_engine import engine
from ingot.cli.bench_ops import ops
from ingot.cli.bench_serve import serve
from ingot.cli.bench_train import train

bench = {"ops": ops, "compare": compare, "engine": engine, "serve": serve, "train": train}
