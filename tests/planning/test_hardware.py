from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
import tomli_w

from ingot.core.errors import ConfigError, IngotError, UnknownName
from ingot.planning.hardware import ACCELERATORS, Accelerator, Cluster, find_accelerator

H100 = ACCELERATORS["h100"]


@pytest.mark.parametrize("name", ACCELERATORS)
def test_rates_of_the_data_sheets_are_plausible(name: str) -> None:
    gpu = ACCELERATORS[name]
    assert 0.5 < gpu.matmul_share < 1
    assert gpu.fa1_tflops
    assert gpu.fa2_tflops
    assert gpu.fa1_tflops < gpu.fa2_tflops <= gpu.attention_tflops < gpu.bf16_tflops
    assert gpu.nic_gb_s < gpu.nvlink_gb_s < 1000 * gpu.memory_tb_s
    if gpu.fp8_tflops:
        assert gpu.fp8_tflops == pytest.approx(2 * gpu.bf16_tflops, rel=0.01)


def test_an_unknown_gpu_is_an_error_with_the_nearest_name() -> None:
    with pytest.raises(UnknownName, match="did you mean 'h100'"):
        find_accelerator("h10")


def test_a_file_describes_another_gpu(tmp_path: Path) -> None:
    fields = {name: value for name, value in asdict(H100).items() if value is not None}
    path = tmp_path / "mine.toml"
    path.write_text(tomli_w.dumps({**fields, "memory_gib": 64.0}))
    assert find_accelerator(str(path)).memory_gib == 64.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bf16_tflops = 1.0", "missing attention_tflops"),
        ("not toml", "is not TOML"),
        ('bf16_tflops = "fast"', "bf16_tflops"),
        ("bf16_tflop = 1.0", "did you mean 'bf16_tflops'"),
    ],
)
def test_a_file_that_describes_none_is_an_error(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(IngotError, match=message):
        find_accelerator(str(path))


def test_a_peak_of_zero_is_an_error() -> None:
    with pytest.raises(ConfigError, match="bf16_tflops"):
        Accelerator(**{**asdict(H100), "bf16_tflops": 0.0})


def test_a_group_in_a_node_does_not_use_the_network() -> None:
    cluster = Cluster(accelerator=H100, gpus=64)
    assert cluster.transfer(1e9, 8, stride=1)[1] == 0
    assert cluster.transfer(1e9, 1, stride=1) == (0, 0)
    assert cluster.transfer(1e9, 2, stride=8)[1] > 0


def test_gpus_of_a_node_share_their_nics_in_a_ring_only() -> None:
    cluster = Cluster(accelerator=H100, gpus=64)
    ring = cluster.transfer(1e9, 64, stride=1)[1]
    sparse = cluster.transfer(1e9, 8, stride=8)[1]
    assert sparse == pytest.approx(8 * ring)
    assert cluster.transfer(1e9, 64, stride=1, shared=False)[1] == pytest.approx(sparse)


def test_a_cluster_needs_gpus() -> None:
    with pytest.raises(ConfigError, match="above 0"):
        Cluster(accelerator=H100, gpus=0)
