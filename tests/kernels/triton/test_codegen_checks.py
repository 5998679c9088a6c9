"""The gates of compiled kernels, and that a planted fault of each kind turns its gate red."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ingot.kernels.triton.codegen_checks import violations
from ingot.kernels.triton.compiler import (
    CompileJob,
    compile_all,
    compile_launch,
    inspect_binary,
    jobs,
)
from ingot.kernels.triton.config_store import default_config
from ingot.kernels.triton.launch import KernelConfig, Launch, record_launches
from ingot.kernels.triton.provider import ExampleInputs, triton_ops
from ingot.kernels.triton.target import TARGETS


def one_launch_of_each_kernel() -> list[CompileJob]:
    found: dict[tuple[str, str], CompileJob] = {}
    for job in jobs(every_config=False):
        found.setdefault((job.kernel, job.target), job)
    return list(found.values())


def test_every_kernel_compiles_as_it_should_for_every_target() -> None:
    facts = compile_all(one_launch_of_each_kernel())
    assert {fact.target for fact in facts} == set(TARGETS)
    assert [fault for fact in facts for fault in violations(fact)] == []


@pytest.mark.slow
def test_every_configuration_of_every_launch_compiles_as_it_should() -> None:
    facts = compile_all(jobs())
    assert [fault for fact in facts for fault in violations(fact)] == []


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes_compile_without_spills(dtype: torch.dtype) -> None:
    """The tables are of bfloat16. float32 is multiplied on no tensor core."""
    for one in triton_ops().values():
        for direction in ("forward", "backward"):
            for launch in one.launches(direction, dtype)[:1]:
                fact = compiled(launch, default_config(launch, "sm_90"))
                assert not [fault for fault in violations(fact) if "spill" in fault]


def compiled(launch: Launch, config: KernelConfig, target: str = "sm_90") -> Any:
    binary = compile_launch(launch, config, TARGETS[target])
    return inspect_binary("planted", launch, config, TARGETS[target], binary)


def launch_of(op: str, direction: str = "forward", *args: Any) -> Launch:
    if not args:
        return triton_ops()[op].launches(direction)[0]
    with record_launches() as launches:
        triton_ops()[op].forward(*args)
    return launches[0]


def test_a_configuration_that_spills_is_noticed() -> None:
    launch = launch_of("add_layer_norm", "backward")
    assert any("spills" in fault for fault in violations(compiled(launch, KernelConfig.of(1))))


def test_a_scalar_load_is_noticed() -> None:
    make = ExampleInputs()
    launch = launch_of("rms_norm", "forward", make(64, 4099)[:, :4096], make(4096), 1e-6)
    fact = compiled(launch, launch.configs(TARGETS["sm_90"])[0])
    assert any("less than 128 bits" in fault for fault in violations(fact)), fact


def test_a_missing_tensor_core_is_noticed() -> None:
    make = ExampleInputs(torch.float32)
    launch = launch_of("linear", "forward", make(512, 512), make(512, 512), None)
    config = launch.configs(TARGETS["sm_90"])[0]
    assert any("tensor cores" in fault for fault in violations(compiled(launch, config)))


def test_too_much_shared_memory_is_noticed() -> None:
    config = KernelConfig.of(8, 6, BLOCK_M=128, BLOCK_N=256, BLOCK_K=64)
    fact = compiled(launch_of("linear"), config)
    assert any("shared memory" in fault for fault in violations(fact))


def test_products_are_on_tensor_cores_of_each_generation() -> None:
    words = {"sm_80": "HMMA", "sm_90": "HGMMA", "sm_100": "UTCHMMA", "gfx942": "v_mfma"}
    wanted = [
        job
        for job in jobs(("linear", "attention"), tuple(words), every_config=False)
        if job.kernel in ("linear", "attention")
    ]
    for fact in compile_all(wanted):
        assert any(name.startswith(words[fact.target]) for name in fact.stats.tensor_ops), fact


def test_integers_are_multiplied_as_integers() -> None:
    words = {"sm_80": "IMMA", "sm_90": "IGMMA", "sm_100": "UTCIMMA", "gfx942": "v_mfma_i32"}
    wanted = [
        job
        for job in jobs(("linear_int8_dynamic",), tuple(words), every_config=False)
        if job.kernel == "linear_int8_dynamic"
    ]
    for fact in compile_all(wanted):
        assert any(name.startswith(words[fact.target]) for name in fact.stats.tensor_ops), fact


def test_the_hidden_states_of_a_loss_never_meet_logits_in_memory() -> None:
    """No tensor of a launch is as large as the logits."""
    make, rows, width, vocabulary = ExampleInputs(), 8192, 512, 131072
    hidden, weight, targets = make(rows, width), make(vocabulary, width), make.ints(rows)
    one = triton_ops()["linear_cross_entropy"]
    with record_launches() as launches:
        one.forward(*one.op.with_defaults((hidden, weight, targets)))
    assert launches
    for launch in launches:
        sizes = [arg.numel() for arg in launch.args if isinstance(arg, torch.Tensor)]
        assert max(sizes) < rows * vocabulary // 8
