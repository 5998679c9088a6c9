"""Parameters of the CPU kernels: none changes a bit, and what was stored is used."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from ingot import ops
from ingot.core.device import detect
from ingot.core.errors import IngotError
from ingot.kernels import tuned
from ingot.kernels.cpu import build, tuning
from ingot.ops.arguments import as_tuple
from ingot.ops.inputs import TensorMaker

pytestmark = pytest.mark.skipif(detect().compiler is None, reason="no C++ compiler")

KIND = "values"
chosen_values = st.fixed_dictionaries(
    {each.name: st.sampled_from(each.choices) for each in tuning.TUNABLES}
)


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Redirect the database to an empty directory; the kernels stay where they are built."""
    path = tmp_path / "tuned.db"
    monkeypatch.setattr(tuned, "database_path", lambda: path)
    yield path
    tuning._load_stored.cache_clear()


def test_names_are_those_of_the_header_in_its_order() -> None:
    header = (build.HERE / "tunables.h").read_text()
    enum = re.search(r"enum class Tunable \{(.*?)COUNT", header, re.DOTALL)
    assert enum
    assert re.findall(r"\w+", enum[1]) == [each.name.upper() for each in tuning.TUNABLES]


def test_defaults_are_choices_and_all_names_are_used_by_a_kernel() -> None:
    sources = "".join(path.read_text() for path in build.HERE.glob("*.h"))
    for each in tuning.TUNABLES:
        assert each.default in each.choices
        assert f"Tunable::{each.name.upper()})" in sources


def results(rows: int, channels: int, seed: int) -> list[Tensor]:
    """Return results of ops whose code depends on parameters."""
    make, low = TensorMaker(torch.float32, seed=seed), TensorMaker(torch.bfloat16, seed=seed)
    x, weight = low(rows, channels), low(70, channels)
    random = torch.Generator().manual_seed(seed)
    codes = torch.randint(-127, 127, (64, channels), dtype=torch.int8, generator=random)
    scale = torch.rand(64, generator=random) + 0.5
    grad_x, grad_w = low(rows, channels), low(channels)
    ops.rms_norm(grad_x.requires_grad_(), grad_w.requires_grad_()).backward(low(rows, channels))
    linear_x = low(rows, channels).requires_grad_()
    ops.linear(linear_x, weight).backward(low(rows, 70))
    gradients = [each.grad for each in (grad_x, grad_w, linear_x)]
    return [
        *(gradient for gradient in gradients if gradient is not None),
        ops.linear(make(rows, channels), make(70, channels)),
        ops.linear(x, weight),
        ops.silu(make(rows, channels)),
        ops.rms_norm(x, low(channels)),
        *as_tuple(ops.linear_int8_dynamic(x, codes, scale)),
    ]


@pytest.mark.parametrize(("rows", "channels"), [(1, 577), (20, 1100), (545, 600)])
def test_no_value_changes_a_bit(rows: int, channels: int, explore: Any) -> None:
    expected = results(rows, channels, seed=rows)

    def check(values: dict[str, int]) -> None:
        with tuning.use(values):
            assert tuning.values() == values
            found = results(rows, channels, seed=rows)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))

    explore(chosen_values, check, 10)
    assert tuning.values() == tuning.defaults()


def test_stored_values_are_used_by_the_next_process(tmp_path: Path) -> None:
    code = """
import json, sys
from ingot.kernels.cpu import tuning
if sys.argv[1] == "save":
    tuning.save("matmul", {"pack_rows": 24, "lane_rows": 7, "no": 1}, 0.9)
print(json.dumps(tuning.values()))
"""

    def run(action: str) -> dict[str, int]:
        environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
        command = [sys.executable, "-c", code, action]
        return json.loads(subprocess.check_output(command, env=environment))

    assert run("load") == tuning.defaults()
    run("save")
    assert run("load") == {**tuning.defaults(), "pack_rows": 24}  # 7 is not in the space


@pytest.mark.usefixtures("database")
def test_values_of_other_machines_of_the_tier_are_known() -> None:
    ours = tuning._key("tasks")
    other = tuned.Key(ours.kernel, ours.source, ours.bucket, ours.dtype, "another CPU")
    tier = tuned.Key(ours.kernel, ours.source, ours.bucket, "none", "another CPU")
    tuned.save(other, '{"tasks_per_thread": 8, "unknown": 1}', 1.1)
    tuned.save(tier, '{"tasks_per_thread": 1}', 1.1)
    assert tuning.stored("tasks") == {}
    assert tuning.stored_elsewhere("tasks") == [{"tasks_per_thread": 8}]


@pytest.mark.parametrize("stored", ["", "[1]", "{", '{"pack_rows": "24"}', '{"pack_rows": [8]}'])
@pytest.mark.usefixtures("database")
def test_damaged_values_are_ignored(stored: str) -> None:
    tuned.save(tuning._key("matmul"), stored, 1.0)
    assert tuning.stored("matmul") == {}


def test_configurations_are_exported_and_imported(
    database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = tuned.Key("cpu.matmul", "1", "", "avx2", '["a CPU", 2]')
    assert tuned.load(key) is None
    tuned.save(key, "one", 2.0)
    tuned.save(key, "two", 1.0)
    assert tuned.export(tmp_path / "tuned.json") == 1
    database.unlink()
    assert tuned.load(key) is None
    assert tuned.import_(tmp_path / "tuned.json") == 1
    assert tuned.load(key) == "two"


def _edited(edit: Callable[[dict[str, Any]], object]) -> str:
    row = {"kernel": "a", "source": "b", "bucket": "c", "dtype": "d", "device": "e"}
    full = {**row, "config": "f", "score": 1.0}
    edit(full)
    return json.dumps([full])


HOSTILE = (
    "",
    "{",
    "[1]",
    "{}",
    "[" * 100_000,
    _edited(lambda row: row.pop("device")),
    _edited(lambda row: row.update(config=5)),
    _edited(lambda row: row.update(config="x" * 5000)),
    _edited(lambda row: row.update(score="1")),
    _edited(lambda row: row.update(score=float("nan"))),
    _edited(lambda row: row.update(score=-1)),
)


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: text[:20] or "empty")
def test_a_bad_file_is_an_error_and_stores_nothing(
    text: str, database: Path, tmp_path: Path
) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(IngotError, match=r"bad\.json"):
        tuned.import_(path)
    assert not database.exists()


def test_a_damaged_database_is_named_when_something_is_stored(database: Path) -> None:
    database.write_bytes(b"no database" * 100)
    with pytest.raises(IngotError, match=r"tuned\.db") as caught:
        tuned.save(tuning._key("tasks"), "{}", 1.0)
    assert "delete it" in str(caught.value.hint)
