from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from ingot.bench.peaks import Peak, Peaks
from ingot.cli.doctor import findings, report
from ingot.core.device import Device, Gpu, detect

Run = Callable[..., subprocess.CompletedProcess[str]]

STEADY = Peak(value=20.0, low=19.0, typical=20.0, high=21.0)
MEASURED = Peaks(
    method=1,
    measured=datetime(2026, 11, 15, tzinfo=UTC),
    read_bandwidth=STEADY,
    matmul={"fp32": STEADY, "bf16": STEADY, "int8": None},
    missing={"int8": "no kernel"},
)
GPU = Gpu(type="xpu", name="A GPU", memory=2**34, capability="sm_90")


@pytest.fixture
def known_peaks(tmp_path: Path) -> Path:
    """A cache in which this machine's peaks are already known."""
    path = tmp_path / "ingot" / "peaks" / f"{detect().fingerprint}.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(MEASURED.to_json())
    return path


@pytest.fixture
def sound(monkeypatch: pytest.MonkeyPatch) -> Device:
    """This machine, without whatever may be odd about it today."""
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("INGOT_ISA", raising=False)
    device = replace(detect(), torch="2.13.0", gpus=())
    return replace(device, cpu=replace(device.cpu, cores=1, isa=("avx2", "portable")))


@pytest.mark.usefixtures("known_peaks")
def test_json_has_the_peaks_and_their_spread(ingot: Run) -> None:
    result = ingot("doctor", "--json")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["read_bandwidth_gbs"] == 20.0
    assert found["matmul_gflops"] == {"fp32": 20.0, "bf16": 20.0, "int8": None}
    assert found["spread"]["read_bandwidth_gbs"] == [19.0, 21.0]
    assert found["fingerprint"] == detect().fingerprint
    assert found["versions"]["torch"]


@pytest.mark.usefixtures("known_peaks")
def test_everything_fits_one_screen(ingot: Run) -> None:
    lines = ingot("doctor").stdout.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    for shown in ("CPU", "ISA tiers", "caches", "memory", "GPUs", "compiler", "20.0 GB/s"):
        assert any(shown in line for line in lines), shown


def test_a_sound_machine_has_no_findings(sound: Device) -> None:
    assert findings(sound, MEASURED, frozenset()) == []


@pytest.mark.parametrize(
    ("change", "installed", "what"),
    [
        ({"torch": "2.20.1"}, (), "torch 2.20.1 is not the version"),
        ({"compiler": None}, (), "PyTorch stands in for ingot's kernels"),
        ({}, ("nvidia-smi",), "an NVIDIA driver, but torch sees no GPU"),
        ({}, ("rocm-smi",), "an AMD driver, but torch sees no GPU"),
        ({"gpus": (GPU,)}, (), "without Triton"),
        ({"gpus": (replace(GPU, capability="sm_75"),)}, ("triton",), "A GPU: too old for Triton"),
        ({"gpus": (replace(GPU, capability="gfx950"),)}, ("triton",), "A GPU (gfx950): ingot's"),
    ],
)
def test_what_is_odd_is_found_with_a_hint(
    sound: Device, change: dict[str, object], installed: tuple[str, ...], what: str
) -> None:
    (finding,) = findings(replace(sound, **change), MEASURED, frozenset(installed))
    assert what in finding.what
    assert finding.hint


def test_a_machine_that_gives_torch_too_few_threads_is_odd(sound: Device) -> None:
    many = replace(sound, cpu=replace(sound.cpu, cores=4096))
    (finding,) = findings(many, MEASURED, frozenset())
    assert "of 4096 cores" in finding.what


def test_an_unsteady_peak_is_odd(sound: Device) -> None:
    noisy = replace(MEASURED, read_bandwidth=replace(STEADY, typical=10.0))
    (finding,) = findings(sound, noisy, frozenset())
    assert "measured beside other work: reading reached" in finding.what


def test_a_cxx_that_is_no_compiler_is_odd(sound: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/bin/false")
    (finding,) = findings(sound, MEASURED, frozenset())
    assert "CXX is '/bin/false'" in finding.what


def test_a_forced_tier_is_odd(sound: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INGOT_ISA", "avx2")
    (finding,) = findings(sound, MEASURED, frozenset())
    assert "INGOT_ISA holds ingot's CPU kernels to the tier avx2" in finding.what


def test_a_cache_that_cannot_be_written_is_no_reason_to_show_nothing(
    known_peaks: Path, ingot: Run
) -> None:
    """A valid file in a directory where not even a lock can be made."""
    (known_peaks.with_name(known_peaks.name + ".lock")).mkdir()
    assert "20.0 GB/s" in ingot("doctor").stdout


@pytest.mark.parametrize("capability", ["sm_80", "sm_120", "gfx942", None])
def test_a_gpu_with_triton_is_not_odd(sound: Device, capability: str | None) -> None:
    gpus = (replace(GPU, capability=capability),)
    assert findings(replace(sound, gpus=gpus), MEASURED, frozenset({"triton"})) == []


def test_the_report_can_be_written_as_json(sound: Device) -> None:
    assert json.loads(json.dumps(report(sound, MEASURED, [])))["findings"] == []


@pytest.mark.slow
def test_two_measurements_agree_within_15_percent(ingot: Run) -> None:
    """On a quiet machine; a neighbour on the same core takes more than that away."""
    first, second = (json.loads(ingot("doctor", "--json", "--refresh").stdout) for _ in range(2))
    pairs = [(first["read_bandwidth_gbs"], second["read_bandwidth_gbs"])]
    pairs += zip(first["matmul_gflops"].values(), second["matmul_gflops"].values(), strict=True)
    for one, other in pairs:
        assert max(one, other) / min(one, other) < 1.15, pairs
