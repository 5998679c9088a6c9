"""Which configuration is chosen, with devices that are not there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ingot.kernels.triton import tuned
from ingot.kernels.triton.code import Code
from ingot.kernels.triton.compiler import Fact
from ingot.kernels.triton.kernel import Launch, recording
from ingot.kernels.triton.provider import Meta, provided
from ingot.kernels.triton.target import TARGETS


@pytest.fixture(autouse=True)
def _own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    forget()
    yield
    forget()


def forget() -> None:
    tuned.chosen.clear()
    tuned.here.cache_clear()
    tuned.capability.cache_clear()


def linear(rows: int, columns: int = 4096, dtype: torch.dtype = torch.bfloat16) -> Launch:
    make = Meta(dtype)
    with recording() as launches:
        provided()["linear"].forward(make(rows, 4096), make(columns, 4096), None)
    return launches[0]


@dataclass
class Device:
    major: int
    minor: int
    name: str = "a GPU"
    gcnArchName: str = "gfx942:sramecc+"


def pretend(monkeypatch: pytest.MonkeyPatch, device: Device, hip: str | None = None) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    monkeypatch.setattr(torch, "version", SimpleNamespace(hip=hip))


def test_a_tuned_configuration_is_found_again() -> None:
    launch, target = linear(64), TARGETS["sm_90"]
    assert tuned.tuned(launch, "H100", target) is None
    chosen = launch.configs(target)[2]
    tuned.keep(launch, "H100", chosen, 12.5)
    assert tuned.tuned(linear(1), "H100", target) == chosen  # whatever the number of rows
    assert tuned.tuned(launch, "H200", target) is None
    assert tuned.tuned(linear(64, columns=8192), "H100", target) is None
    assert tuned.tuned(linear(64, dtype=torch.float16), "H100", target) is None


def test_what_does_not_fit_any_more_is_not_taken() -> None:
    launch = linear(64)
    tuned.keep(launch, "H100", launch.configs(TARGETS["sm_90"])[1], 12.5)
    assert tuned.tuned(launch, "H100", TARGETS["sm_120"]) is None


def test_a_damaged_store_is_no_store(tmp_path: Path) -> None:
    launch = linear(64)
    tuned.store().parent.mkdir(parents=True)
    tuned.store().write_bytes(b"no database" * 100)
    assert tuned.tuned(launch, "H100", TARGETS["sm_90"]) is None


def test_dispatch_prefers_what_is_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, Device(9, 0, "H100"))
    launch = linear(64)
    other = linear(64, columns=512)
    wanted = launch.configs(TARGETS["sm_90"])[3]
    tuned.keep(launch, "H100", wanted, 1.0)
    assert tuned.choose(launch) == wanted
    assert tuned.choose(other) == tuned.default(other, "sm_90")


@pytest.mark.parametrize(
    ("device", "hip", "name"),
    [
        (Device(8, 0), None, "sm_80"),
        (Device(8, 9), None, "sm_120"),
        (Device(10, 3), None, "sm_100"),
        (Device(9, 4), "6.4", "gfx942"),
    ],
)
def test_the_device_says_which_target(
    monkeypatch: pytest.MonkeyPatch, device: Device, hip: str | None, name: str
) -> None:
    pretend(monkeypatch, device, hip)
    assert tuned.here()[0].name == name


def test_every_default_is_in_the_space_of_a_representative_launch() -> None:
    launches = [
        launch
        for one in provided().values()
        for direction in ("forward", "backward")
        for launch in one.launches(direction)
    ]
    defaults = tuned.defaults()
    assert set(defaults) == {launch.kernel.name for launch in launches}
    for kernel, by_target in defaults.items():
        assert set(by_target) == set(TARGETS)
        for target, wanted in by_target.items():
            spaces = [
                {str(config) for config in launch.configs(TARGETS[target])}
                for launch in launches
                if launch.kernel.name == kernel
            ]
            assert set(wanted) <= set().union(*spaces), (kernel, target)
            assert all(set(wanted) & space for space in spaces), (kernel, target)


def test_attention_has_one_configuration_however_it_is_called() -> None:
    forward = [
        launch
        for launch in provided()["attention"].launches("forward")
        if launch.kernel.name == "attention"
    ]
    assert len(forward) == 2  # packed, and decoding from pages
    assert len({launch.bucket for launch in forward}) == 1
    for target in TARGETS:
        assert len({tuned.default(launch, target) for launch in forward}) == 1


def test_a_launch_gets_the_best_default_of_its_own_space(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, gated = linear(64), provided()["linear_swiglu"].launches("forward")[0]
    spaces = [[str(c) for c in launch.configs(TARGETS["sm_90"])] for launch in (plain, gated)]
    only_plain = next(config for config in spaces[0] if config not in spaces[1])
    ranking = {"linear": {"sm_90": [only_plain, spaces[1][-1]]}}
    monkeypatch.setattr(tuned, "defaults", lambda: ranking)
    assert str(tuned.default(plain, "sm_90")) == only_plain
    assert str(tuned.default(gated, "sm_90")) == spaces[1][-1]
    assert str(tuned.default(linear(64, dtype=torch.float32), "sm_90")) == str(
        linear(64, dtype=torch.float32).configs(TARGETS["sm_90"])[0]
    )


def fact(config: str, **changes: Any) -> Fact:
    code = Code(registers=64, spills=0, loads={128: 2}, stores={}, tensor={"HGMMA": 1}, copies=0)
    known: dict[str, Any] = {
        **{"name": "a", "kernel": "k", "bound": "tensor cores", "scalars": 0, "target": "sm_90"},
        **{"warps": 4, "stages": 1, "shared_bytes": 0, "occupancy": 0.5, "code": code},
    }
    return Fact(config=config, **known | changes)


def test_defaults_are_ranked_by_what_was_compiled() -> None:
    spilled = replace(fact("").code, spills=1)
    facts = [
        fact("ROWS=64 COLUMNS=64"),
        fact("ROWS=128 COLUMNS=256", occupancy=0.25),
        fact("ROWS=128 COLUMNS=128"),  # 256 columns count as no more
        fact("ROWS=64 COLUMNS=128"),
        fact("ROWS=64 COLUMNS=128", name="b", code=spilled),  # wrong in one launch of two
    ]
    assert tuned.ranked(facts) == {
        "k": {"sm_90": ["ROWS=128 COLUMNS=128", "ROWS=128 COLUMNS=256", "ROWS=64 COLUMNS=64"]}
    }
    wide = replace(fact("").code, tensor={}, loads={128: 4})
    facts = [
        fact("warps=4", bound="bandwidth", code=wide, occupancy=0.4),
        fact("warps=8", bound="bandwidth", code=wide, occupancy=0.6),
        fact("warps=2", bound="bandwidth", occupancy=1.0),
        fact("warps=8", bound="bandwidth", name="b", occupancy=0.4),  # the worst of its launches
    ]
    assert tuned.ranked(facts)["k"]["sm_90"] == ["warps=2", "warps=4", "warps=8"]
