from __future__ import annotations

import subprocess
import sys

import msgspec

from ingot.serving.engine.output import EngineStats, Logprob, Output
from ingot.serving.engine.request import FinishReason

OUTPUT = Output(
    7,
    (11, 12),
    (Logprob(11, -0.5, ((11, -0.5), (9, -1.5))), Logprob(12, -2.0)),
    (Logprob(3, -0.25),),
    num_cached_tokens=32,
    finish_reason=FinishReason.STOP,
    error="none",
)


def test_outputs_and_stats_survive_the_wire() -> None:
    stats = EngineStats(**{name: at for at, name in enumerate(EngineStats.__struct_fields__)})
    for value, kind in (([OUTPUT, Output(1)], list[Output]), (stats, EngineStats)):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=kind) == value


def test_outputs_import_without_torch() -> None:
    names = "ingot.serving.engine.output, ingot.serving.engine.scheduler"
    code = f"import sys, {names}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
