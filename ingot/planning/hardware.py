"""GPUs and their links: what data sheets say, and what the best kernels reach.

Peaks are those of the data sheets, dense. `matmul_share` is the largest share of the bf16 peak that
a matmul of any size was measured to reach (MAMF of stas00/ml-engineering, compute/accelerator);
for GPUs without such a measurement it is that of the nearest relative, marked below. Attention
rates are rounded from the figures of the FlashAttention-2 and -3 papers (forward and backward,
causal, head_dim 128, long sequences); those of Blackwell are an estimate. One fitted constant
scales all of them, so only their ratios matter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from ingot.core import config
from ingot.core.errors import ConfigError, UnknownName


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """A GPU: peaks, memory and links.

    >>> ACCELERATORS["h100"].bf16_tflops
    989.0
    """

    bf16_tflops: float
    """Dense peak of the data sheet."""
    fp8_tflops: float | None = None
    """Dense peak in fp8; None if it has none."""
    fp4_tflops: float | None = None
    """Dense peak in fp4; None if it has none."""
    matmul_share: float = 0.8
    """Share of the bf16 peak that the best matmul reaches."""
    fp8_matmul_share: float = 0.7
    """The same in fp8, and taken for fp4, too."""
    attention_tflops: float
    """Attention with the best kernel: FlashAttention 3 or cuDNN."""
    fa2_tflops: float | None = None
    """Attention with FlashAttention 2; None for the rate of the best kernel."""
    fa1_tflops: float | None = None
    """Attention with FlashAttention 1; None for the rate of the best kernel."""
    memory_gib: float
    """Memory that a process can allocate."""
    memory_tb_s: float
    """Bandwidth of the memory in TB/s."""
    nvlink_gb_s: float
    """Bandwidth to the other GPUs of a node, per direction in GB/s."""
    per_node: int = 8
    """GPUs that this link connects."""
    nic_gb_s: float
    """Network bandwidth of one GPU to other nodes, per direction in GB/s."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not (isinstance(value, int | float) and 0 < value < 1e9):
                raise ConfigError(
                    f"Accelerator.{name}: must be above 0, got {value!r}"[:200],
                    hint="give a positive number",
                )


_A100 = Accelerator(
    bf16_tflops=312.0,
    matmul_share=0.869,
    fa1_tflops=135.0,
    fa2_tflops=195.0,
    attention_tflops=195.0,
    memory_gib=79.2,
    memory_tb_s=2.04,
    nvlink_gb_s=300.0,
    nic_gb_s=25.0,
)
_H100 = Accelerator(
    bf16_tflops=989.0,
    fp8_tflops=1979.0,
    matmul_share=0.803,
    fp8_matmul_share=0.709,
    fa1_tflops=215.0,
    fa2_tflops=330.0,
    attention_tflops=510.0,
    memory_gib=79.6,
    memory_tb_s=3.35,
    nvlink_gb_s=450.0,
    nic_gb_s=50.0,
)
_B200 = Accelerator(
    bf16_tflops=2250.0,
    fp8_tflops=4500.0,
    fp4_tflops=9000.0,
    matmul_share=0.776,
    fp8_matmul_share=0.763,
    fa1_tflops=480.0,
    fa2_tflops=740.0,
    attention_tflops=1100.0,
    memory_gib=179.0,
    memory_tb_s=8.0,
    nvlink_gb_s=900.0,
    nic_gb_s=50.0,
)

ACCELERATORS: dict[str, Accelerator] = {
    "a100": _A100,
    "a100-40gb": replace(_A100, memory_gib=39.4, memory_tb_s=1.555),
    "a800": replace(_A100, nvlink_gb_s=200.0),
    "h100": _H100,
    # 96 GB of HBM2e and a limit of 500 W, as in torchtitan's benchmarks; matmul_share is estimated.
    "h100-500w": replace(_H100, matmul_share=0.72, memory_gib=95.0, memory_tb_s=2.4),
    "h200": replace(_H100, memory_gib=140.4, memory_tb_s=4.8),
    "h800": replace(_H100, nvlink_gb_s=200.0),
    "b200": _B200,
    # matmul_share of fp8 is that of B200; fp4 peak and network are from memory.
    "b300": replace(
        _B200, fp4_tflops=13500.0, matmul_share=0.786, memory_gib=268.0, nic_gb_s=100.0
    ),
    # NVL72: 72 GPUs share NVLink; 64 divide evenly.
    "gb200": replace(
        _B200,
        bf16_tflops=2450.0,
        fp8_tflops=4900.0,
        fp4_tflops=9800.0,
        matmul_share=0.744,
        fp8_matmul_share=0.738,
        memory_gib=185.0,
        per_node=64,
    ),
    # The shares are those of B300 and B200.
    "gb300": replace(
        _B200,
        bf16_tflops=2500.0,
        fp8_tflops=5000.0,
        fp4_tflops=15000.0,
        matmul_share=0.786,
        memory_gib=268.0,
        per_node=64,
        nic_gb_s=100.0,
    ),
}
"""The GPUs that `ingot plan --gpu` knows by name."""


def find_accelerator(name: str) -> Accelerator:
    """Return a GPU by its name, or the one that a TOML file describes.

    >>> find_accelerator("h200").memory_tb_s
    4.8
    """
    if name in ACCELERATORS:
        return ACCELERATORS[name]
    if not name.endswith(".toml"):
        raise UnknownName("GPU", name, ACCELERATORS)
    return config.load(Accelerator, Path(name))


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Equal GPUs in nodes: NVLink inside a node, a network between nodes.

    >>> cluster = Cluster(accelerator=ACCELERATORS["h100"], gpus=16)
    >>> cluster.transfer(450e9, 8, stride=1), cluster.transfer(450e9, 16, stride=1)
    ((1.0, 0.0), (1.0, 1.125))
    """

    accelerator: Accelerator
    gpus: int
    per_node: int = 0
    """GPUs of a node; 0 for what the data sheet says."""
    nic_gb_s: float = 0.0
    """Network bandwidth of one GPU; 0 for what the data sheet says."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "per_node", self.per_node or self.accelerator.per_node)
        object.__setattr__(self, "nic_gb_s", self.nic_gb_s or self.accelerator.nic_gb_s)
        if self.gpus < 1 or self.per_node < 1 or self.nic_gb_s <= 0:
            raise ConfigError(
                "Cluster: GPUs, GPUs per node and network bandwidth must be above 0, got "
                f"{self.gpus}, {self.per_node} and {self.nic_gb_s}",
                hint="give positive numbers",
            )

    def transfer(
        self, num_bytes: float, size: int, *, stride: int, shared: bool = True
    ) -> tuple[float, float]:
        """Return the seconds that a collective needs on NVLink and on the network.

        Each GPU of the group moves `num_bytes`. The group has `size` GPUs, every `stride`-th of
        the cluster. In a ring, those in one node share their NICs (`shared`); in an all-to-all,
        each needs its own. The network takes 0 s inside a node.
        """
        if size <= 1:
            return 0.0, 0.0
        nvlink = num_bytes / (self.accelerator.nvlink_gb_s * 1e9)
        if size * stride <= self.per_node:
            return nvlink, 0.0
        members = min(size, max(1, self.per_node // stride)) if shared else 1
        return nvlink, num_bytes / (members * self.nic_gb_s * 1e9)
