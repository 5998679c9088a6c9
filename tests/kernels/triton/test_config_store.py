"""Choice of configurations, with mocked devices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ingot.kernels import tuned
from ingot.kernels.triton import config_store
from ingot.kernels.triton.launch import Launch, record_launches
from ingot.kernels.triton.provider import ExampleInputs, triton_ops
from ingot.kernels.triton.target import TARGETS


@pytest.fixture(autouse=True)
def _temporary_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    clear_caches()
    yield
    clear_caches()


def clear_caches() -> None:
    config_store.config_cache.clear()
    config_store.current_target.cache_clear()
    config_store.device_arch.cache_clear()


def linear(rows: int, columns: int = 4096, dtype: torch.dtype = torch.bfloat16) -> Launch:
    make = ExampleInputs(dtype)
    with record_launches() as launches:
        triton_ops()["linear"].forward(make(rows, 4096), make(columns, 4096), None, 0, None)
    return launches[0]


@dataclass
class Device:
    major: int
    minor: int
    name: str = "a GPU"
    gcnArchName: str = "gfx942:sramecc+"


def mock_device(monkeypatch: pytest.MonkeyPatch, device: Device, hip: str | None = None) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    monkeypatch.setattr(torch, "version", SimpleNamespace(hip=hip))


def test_tuned_configuration_is_loaded() -> None:
    launch, target = linear(64), TARGETS["sm_90"]
    assert config_store.load_tuned(launch, "H100", target) is None
    chosen = launch.configs(target)[2]
    config_store.save(launch, "H100", chosen, 12.5)
    assert config_store.load_tuned(linear(1), "H100", target) == chosen  # for any number of rows
    assert config_store.load_tuned(launch, "H200", target) is None
    assert config_store.load_tuned(linear(64, columns=8192), "H100", target) is None
    assert config_store.load_tuned(linear(64, dtype=torch.float16), "H100", target) is None


def test_tuned_configuration_outside_of_the_space_is_ignored() -> None:
    launch = linear(64)
    config_store.save(launch, "H100", launch.configs(TARGETS["sm_90"])[1], 12.5)
    assert config_store.load_tuned(launch, "H100", TARGETS["sm_120"]) is None


def test_corrupt_database_is_ignored(tmp_path: Path) -> None:
    launch = linear(64)
    tuned.database_path().parent.mkdir(parents=True)
    tuned.database_path().write_bytes(b"no database" * 100)
    assert config_store.load_tuned(launch, "H100", TARGETS["sm_90"]) is None


def test_dispatch_prefers_tuned_configurations(monkeypatch: pytest.MonkeyPatch) -> None:
    mock_device(monkeypatch, Device(9, 0, "H100"))
    launch = linear(64)
    other = linear(64, columns=512)
    wanted = launch.configs(TARGETS["sm_90"])[3]
    config_store.save(launch, "H100", wanted, 1.0)
    assert config_store.choose_config(launch) == wanted
    assert config_store.choose_config(other) == config_store.default_config(other, "sm_90")


@pytest.mark.parametrize(
    ("device", "hip", "name"),
    [
        (Device(8, 0), None, "sm_80"),
        (Device(8, 9), None, "sm_120"),
        (Device(10, 3), None, "sm_100"),
        (Device(9, 4), "6.4", "gfx942"),
    ],
)
def test_target_follows_from_the_device(
    monkeypatch: pytest.MonkeyPatch, device: Device, hip: str | None, name: str
) -> None:
    mock_device(monkeypatch, device, hip)
    assert config_store.current_target()[0].name == name


def test_every_default_is_in_the_space_of_a_representative_launch() -> None:
    launches = [
        launch
        for one in triton_ops().values()
        for direction in ("forward", "backward")
        for launch in one.launches(direction)
    ]
    defaults = config_store.load_defaults()
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


def test_prefill_and_decode_share_a_configuration() -> None:
    forward = [
        launch
        for launch in triton_ops()["attention"].launches("forward")
        if launch.kernel.name == "attention"
    ]
    assert len(forward) == 2  # packed prefill, and decoding from a KV cache
    assert len({launch.bucket for launch in forward}) == 1
    for target in TARGETS:
        assert len({config_store.default_config(launch, target) for launch in forward}) == 1


def test_launch_uses_the_best_default_of_its_own_space(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, gated = linear(64), triton_ops()["gated_linear"].launches("forward")[0]
    spaces = [[str(c) for c in launch.configs(TARGETS["sm_90"])] for launch in (plain, gated)]
    only_plain = next(config for config in spaces[0] if config not in spaces[1])
    ranking = {"linear": {"sm_90": [only_plain, spaces[1][-1]]}}
    monkeypatch.setattr(config_store, "load_defaults", lambda: ranking)
    assert str(config_store.default_config(plain, "sm_90")) == only_plain
    assert str(config_store.default_config(gated, "sm_90")) == spaces[1][-1]
    assert str(config_store.default_config(linear(64, dtype=torch.float32), "sm_90")) == str(
        linear(64, dtype=torch.float32).configs(TARGETS["sm_90"])[0]
    )
