from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ingot.cli.verify import verify
from ingot.core import lineage
from ingot.core.errors import IngotError
from ingot.interop import hf, hub, peft
from ingot.serving import verify as serving
from tests import adapters


def test_certificate_is_printed_and_stored(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    verify(str(tiny), schedules=3, json=True)
    found = json.loads(capsys.readouterr().out)
    assert (found["schedules"], found["mismatches"], found["bitwise_equal"]) == (3, 0, True)
    (step,) = lineage.read(tiny).steps
    assert step["step"] == "verify"
    assert {name: step[name] for name in found} == found
    verify(str(tiny), schedules=1, kv_cache_dtype="int8")
    lines = capsys.readouterr().out
    assert "bitwise equal" in lines
    assert lineage.read(tiny).steps[1]["kv_cache_dtype"] == "int8"
    assert len(lineage.read(tiny).steps) == 2


def test_difference_sets_the_exit_code_and_is_stored(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(some: Any, all: Any) -> bool:
        return False

    monkeypatch.setattr(serving, "_same_bits", other)
    with pytest.raises(SystemExit) as exit:
        verify(str(tiny), schedules=2)
    assert exit.value.code == 1
    out = capsys.readouterr().out
    assert "2 schedules differ" in out
    assert "first difference" in out
    (step,) = lineage.read(tiny).steps
    assert (step["mismatches"], step["bitwise_equal"]) == (2, False)


def test_adapters_are_mixed_with_the_base(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    decoder = hf.load(tiny)
    names = {f"a{i}": adapters.save(decoder, tmp_path / f"a{i}", i) for i in range(2)}
    options = tuple(f"{name}={path}" for name, path in names.items())
    verify(str(tiny), schedules=4, adapter=options)
    out = " ".join(capsys.readouterr().out.split())  # lines are wrapped
    assert "2 adapters and the base, up to 3 of them in one step" in out
    (step,) = lineage.read(tiny).steps
    assert step["bitwise_equal"] is True
    digests = {name: peft.load(path, decoder).digest for name, path in names.items()}
    assert step["adapters"] == digests


def test_command_verifies_a_directory(ready: Any, tiny: Path) -> None:
    run = ready("verify", str(tiny), "--schedules", "1", "--json")
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["bitwise_equal"] is True
    assert ready("verify", str(tiny), "--schedules", "0").returncode == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_missing_gpu_is_an_error(tiny: Path) -> None:
    with pytest.raises(IngotError, match="GPU"):
        verify(str(tiny), schedules=1, device="cuda")


def test_unknown_device_is_an_error(tiny: Path) -> None:
    with pytest.raises(IngotError, match="device"):
        verify(str(tiny), schedules=1, device="cuda:x")


def test_hub_name_is_resolved(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The certificate is stored in the directory of the downloaded model."""
    monkeypatch.setattr(hub, "model_path", lambda name: {"org/name": tiny}.get(str(name), name))
    verify("org/name", schedules=1)
    assert "bitwise equal" in capsys.readouterr().out
    assert len(lineage.read(tiny).steps) == 1
