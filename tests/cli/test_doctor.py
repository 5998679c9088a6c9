from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from ingot.bench.peaks import Peak, Peaks
from ingot.cli.doctor import find_issues, report
from ingot.core.device import Device, Gpu, detect
from tests.cli.conftest import Run

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
    """A cache that holds the peaks of this machine."""
    path = tmp_path / "ingot" / "peaks" / f"{detect().fingerprint}.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(MEASURED.to_json())
    return path


@pytest.fixture
def sound(monkeypatch: pytest.MonkeyPatch) -> Device:
    """This machine without its current issues."""
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("INGOT_ISA", raising=False)
    device = replace(detect(), torch="2.13.0", gpus=())
    return replace(device, cpu=replace(device.cpu, cores=1, isa=("avx2", "portable")))


@pytest.mark.usefixtures("known_peaks")
def test_json_has_the_peaks_and_their_spread(cli: Run, tmp_path: Path) -> None:
    result = cli("doctor", "--json", XDG_CACHE_HOME=str(tmp_path))
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["read_bandwidth_gbs"] == 20.0
    assert found["matmul_gflops"] == {"fp32": 20.0, "bf16": 20.0, "int8": None}
    assert found["spread"]["read_bandwidth_gbs"] == [19.0, 21.0]
    assert found["fingerprint"] == detect().fingerprint
    assert found["versions"]["torch"]


@pytest.mark.usefixtures("known_peaks")
def test_output_fits_one_screen(ingot: Run) -> None:
    lines = ingot("doctor").stdout.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    for shown in ("CPU", "ISA tiers", "caches", "memory", "GPUs", "compiler", "20.0 GB/s"):
        assert any(shown in line for line in lines), shown


def test_sound_machine_has_no_issues(sound: Device) -> None:
    assert find_issues(sound, MEASURED, frozenset()) == []


@pytest.mark.parametrize(
    ("change", "installed", "what"),
    [
        ({"torch": "2.20.1"}, (), "torch 2.20.1 is not the version"),
        ({"compiler": None}, (), "no C++ compiler: ops fall back to PyTorch"),
        ({}, ("nvidia-smi",), "an NVIDIA driver, but torch sees no GPU"),
        ({}, ("rocm-smi",), "an AMD driver, but torch sees no GPU"),
        ({"gpus": (GPU,)}, (), "Triton is not installed"),
        ({"gpus": (replace(GPU, capability="sm_75"),)}, ("triton",), "A GPU: too old for Triton"),
        (
            {"gpus": (replace(GPU, capability="gfx950"),)},
            ("triton",),
            "A GPU (gfx950): the GPU kernels have no configurations",
        ),
    ],
)
def test_issue_has_message_and_hint(
    sound: Device, change: dict[str, object], installed: tuple[str, ...], what: str
) -> None:
    (issue,) = find_issues(replace(sound, **change), MEASURED, frozenset(installed))
    assert what in issue.message
    assert issue.hint


def test_too_few_torch_threads_are_an_issue(sound: Device) -> None:
    many = replace(sound, cpu=replace(sound.cpu, cores=4096))
    (issue,) = find_issues(many, MEASURED, frozenset())
    assert "of 4096 cores" in issue.message


def test_unsteady_peak_is_an_issue(sound: Device) -> None:
    noisy = replace(MEASURED, read_bandwidth=replace(STEADY, typical=10.0))
    (issue,) = find_issues(sound, noisy, frozenset())
    assert "busy while measuring: reading reached" in issue.message


def test_cxx_that_is_not_a_compiler_is_an_issue(
    sound: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/bin/false")
    (issue,) = find_issues(sound, MEASURED, frozenset())
    assert "CXX is '/bin/false'" in issue.message


def test_restricted_tier_is_an_issue(sound: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INGOT_ISA", "avx2")
    (issue,) = find_issues(sound, MEASURED, frozenset())
    assert "INGOT_ISA restricts the CPU kernels to the tier avx2" in issue.message


def test_peaks_are_shown_even_if_the_cache_is_read_only(known_peaks: Path, ingot: Run) -> None:
    """A valid file in a directory where no lock can be created."""
    (known_peaks.with_name(known_peaks.name + ".lock")).mkdir()
    assert "20.0 GB/s" in ingot("doctor").stdout


@pytest.mark.parametrize("capability", ["sm_80", "sm_120", "gfx942", None])
def test_gpu_with_triton_is_not_an_issue(sound: Device, capability: str | None) -> None:
    gpus = (replace(GPU, capability=capability),)
    assert find_issues(replace(sound, gpus=gpus), MEASURED, frozenset({"triton"})) == []


def test_report_is_json(sound: Device) -> None:
    assert json.loads(json.dumps(report(sound, MEASURED, [])))["issues"] == []


@pytest.mark.slow
def test_two_measurements_agree_within_15_percent(ingot: Run) -> None:
    """On a quiet machine; another tenant on the same core takes away more than that."""
    first, second = (json.loads(ingot("doctor", "--json", "--refresh").stdout) for _ in range(2))
    pairs = [(first["read_bandwidth_gbs"], second["read_bandwidth_gbs"])]
    pairs += zip(first["matmul_gflops"].values(), second["matmul_gflops"].values(), strict=True)
    for one, other in pairs:
        assert max(one, other) / min(one, other) < 1.15, pairs
