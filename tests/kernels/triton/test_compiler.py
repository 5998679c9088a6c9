from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ingot.core.errors import IngotError
from ingot.kernels.triton import compiler
from ingot.kernels.triton.compiler import compile_all, jobs


def test_jobs_are_distinct_and_cover_the_tuning_space() -> None:
    every, quick = jobs(("silu",)), jobs(("silu",), every_config=False)
    assert len({job.key for job in every}) == len(every)
    assert {job.target for job in quick} == {job.target for job in every}
    assert len(quick) == 10  # forward and backward, five targets
    assert set(quick) < set(every)


def test_what_was_compiled_is_not_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    wanted = jobs(("silu",), ("sm_80",), every_config=False)[:1]
    heard: list[int] = []
    first = compile_all(wanted, done=lambda: heard.append(1))
    monkeypatch.setattr(compiler, "compile_one", None)
    assert compile_all(wanted, done=lambda: heard.append(1)) == first
    assert len(heard) == 2
    (kept,) = (tmp_path / "ingot" / "triton").iterdir()
    kept.write_text("{}")  # damaged: compiled again
    with pytest.raises(TypeError):
        compile_all(wanted)


def test_the_key_knows_configuration_and_target() -> None:
    first, second, *_ = jobs(("silu",), ("sm_80",))
    (other,) = [job for job in jobs(("silu",), ("sm_90",)) if job.config == first.config][:1]
    assert len({first.key, second.key, other.key}) == 3
    assert replace(first, key="") != first


def test_nothing_is_compiled_while_interpreting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(IngotError, match="unset it"):
        jobs()
