from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ingot.core.errors import IngotError
from ingot.kernels.triton import compiler
from ingot.kernels.triton.compiler import compile_all, compile_jobs


def test_jobs_are_distinct_and_cover_the_tuning_space() -> None:
    every, default = compile_jobs(("silu",)), compile_jobs(("silu",), all_configs=False)
    assert len({job.key for job in every}) == len(every)
    assert {job.target for job in default} == {job.target for job in every}
    assert len(default) == 10  # forward and backward, five targets
    assert set(default) < set(every)


def test_cached_binaries_are_not_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    jobs = compile_jobs(("silu",), ("sm_80",), all_configs=False)[:1]
    calls: list[int] = []
    first = compile_all(jobs, on_done=lambda: calls.append(1))
    monkeypatch.setattr(compiler, "compile_one", None)
    assert compile_all(jobs, on_done=lambda: calls.append(1)) == first
    assert len(calls) == 2
    (cached,) = (tmp_path / "ingot" / "triton").iterdir()
    cached.write_text("{}")  # corrupt, so compiled again
    with pytest.raises(TypeError):
        compile_all(jobs)


def test_key_depends_on_configuration_and_target() -> None:
    first, second, *_ = compile_jobs(("silu",), ("sm_80",))
    other = next(j for j in compile_jobs(("silu",), ("sm_90",)) if j.config == first.config)
    assert len({first.key, second.key, other.key}) == 3
    assert replace(first, key="") != first


def test_compiling_while_interpreting_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(IngotError, match="unset TRITON_INTERPRET"):
        compile_jobs()
