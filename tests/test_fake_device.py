"""Code for accelerators on the fake device, which rejects tensors on the wrong device.

Each test runs in a separate process, since registering the device cannot be undone.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import sys
import traceback
from contextlib import redirect_stdout
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from ingot import ops

ROOT = Path(__file__).parents[1]


# A process that has imported torch and the fake device. Scripts run in forks of it: each has a new
# device, and none waits for imports. `torch._dynamo` is what torch's optimizers import.
_FORKSERVER = multiprocessing.get_context("forkserver")
_FORKSERVER.set_forkserver_preload(
    [
        "tests.fake_device",
        "ingot.training.trainer",
        "torch._dynamo",
        "tokenizers",
        "sklearn.datasets",
    ]
)


def run_script(code: str, *arguments: str) -> str:
    """Return what a script prints that has the fake device."""
    receiver, sender = _FORKSERVER.Pipe(duplex=False)
    process = _FORKSERVER.Process(target=_execute, args=(code, arguments, sender))
    process.start()
    sender.close()
    try:
        printed, error = receiver.recv()
    except EOFError:
        process.join()
        raise AssertionError(f"the script ended with exit status {process.exitcode}") from None
    process.join()
    assert error is None, error
    return printed


def _execute(code: str, arguments: tuple[str, ...], sender: Connection) -> None:
    from tests import fake_device

    os.chdir(ROOT)
    sys.argv = ["-c", *arguments]
    printed = io.StringIO()
    error = None
    try:
        with redirect_stdout(printed):
            exec(code, {"fake_device": fake_device, "sys": sys, "torch": torch})
    except BaseException:
        error = traceback.format_exc()
    sender.send((printed.getvalue(), error))


def test_device_computes_and_rejects_mixed_devices() -> None:
    code = """
x = torch.arange(6, device=fake_device.DEVICE).view(2, 3)[:, 1:]
print((x * 2).sum(1).cpu())
for wrong in (lambda: x + torch.ones(2, 2), lambda: x.numpy(), lambda: torch.cat((x, x.cpu()))):
    try:
        wrong()
    except (RuntimeError, TypeError) as error:
        print(error)
"""
    result, mixed, read, joined = run_script(code).splitlines()
    assert result == "tensor([ 6, 18])"
    assert mixed == "aten.add.Tensor: expected all tensors to be on the same device"
    assert read == "can't convert a fake device tensor to numpy"
    assert joined == "aten.cat.default: expected all tensors to be on the same device"


def test_transfers_and_synchronizations_are_counted() -> None:
    code = """
def counted(call):
    before = fake_device.COUNTS.snapshot()
    call()
    print(*vars(fake_device.COUNTS.since(before)).values())

x, host = torch.arange(6, device=fake_device.DEVICE), torch.zeros(6, dtype=torch.int64)
counted(lambda: (x * 2).sum())
counted(lambda: x.sum().item())
counted(lambda: x.tolist())
counted(lambda: x.cpu())
counted(lambda: host.copy_(x, non_blocking=True))
counted(lambda: host.to(fake_device.DEVICE))
counted(lambda: host.to(fake_device.DEVICE, non_blocking=True))
counted(lambda: x.copy_(host, non_blocking=True))
counted(lambda: x[x > 2])
counted(lambda: x.copy_(x.float()))
counted(lambda: x[host])
x = host.to(fake_device.DEVICE)
with torch.inference_mode():
    counted(lambda: x.cpu())
    counted(lambda: x.to("cpu", non_blocking=True))
    counted(lambda: x.float())
    counted(lambda: x[0].item())
    counted(lambda: int(x[0]))
    counted(lambda: bool(x[0] > 2))
    counted(lambda: x[x > 2])
"""
    counts = [tuple(map(int, line.split())) for line in run_script(code).splitlines()]
    assert counts == [
        (0, 0, 0),
        (0, 1, 1),
        (0, 1, 1),
        (0, 1, 1),
        (0, 1, 0),
        (1, 0, 1),
        (1, 0, 0),
        (1, 0, 0),
        (0, 1, 1),
        (0, 0, 0),
        (1, 0, 1),
        (0, 1, 1),
        (0, 1, 0),
        (0, 0, 0),
        *[(0, 1, 1)] * 4,
    ]


def test_ops_are_benchmarked_against_measured_peaks() -> None:
    """Events use Python's clock, since calls are done when they return."""
    code = """
import time

class Event:
    def __init__(self, device, enable_timing):
        assert torch.device(device) == fake_device.DEVICE and enable_timing
    def record(self):
        self.at = time.perf_counter()
    def synchronize(self):
        pass
    def elapsed_time(self, other):
        return (other.at - self.at) * 1e3

torch.Event = Event
torch.compile = lambda function, **options: function
from ingot.bench import gpu_peaks
from ingot.bench.ops import OpBench
from ingot.bench.workloads import WORKLOADS

gpu_peaks.ROUNDS = 2
sizes = {"fp32": 64, "bf16": 64, "int8": 64}
machine = gpu_peaks.measure(str(fake_device.DEVICE), read_bytes=2**21, sizes=sizes)
assert all(machine.matmul.values()), machine
bench = OpBench(machine, 0.001, 2**26, str(fake_device.DEVICE))
first = {workload.op: workload for workload in reversed(WORKLOADS)}
for op in ("rope_and_cache", "cross_entropy", "philox_uniform", "attention"):
    rows = bench.rows(first[op])
    assert all(row.p50_us > 0 and row.roofline_fraction > 0 for row in rows), rows
    print(op, *(row.provider for row in rows))
"""
    lines = run_script(code).splitlines()
    assert [line.split()[0] for line in lines] == [
        *("rope_and_cache", "cross_entropy", "philox_uniform", "attention"),
    ]
    assert lines[-1].endswith("sdpa")


def test_certificate_names_the_device(tmp_path: Path) -> None:
    code = """
from pathlib import Path
from ingot.cli import verify
from ingot.core import lineage
from tests import models
directory = models.small(Path(sys.argv[1]) / "tiny")
verify.verify(str(directory), schedules=1, device=str(fake_device.DEVICE))
(step,) = lineage.read(directory).steps
print(step["bitwise_equal"], step["gpu"], "cpu" in step)
"""
    assert run_script(code, str(tmp_path)).splitlines()[-1] == "True fake False"


def test_samples_and_references_are_on_the_device() -> None:
    """`pytest -m gpu` computes samples and reference results on the device."""
    code = """
from ingot import ops
from ingot.ops.accuracy import backward_errors, forward_errors
from ingot.ops.inputs import TensorMaker

for op in ops.registry().values():
    for sample in op.samples(TensorMaker(torch.float32, device=str(fake_device.DEVICE))):
        args = op.with_defaults(sample.args)
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        assert all(tensor.device == fake_device.DEVICE for tensor in tensors), (op, sample.name)
        if sample.name == "odd":
            assert max(forward_errors(op, "reference", args)) <= 1
            if op.gradient:
                assert max(backward_errors(op, "reference", args).values()) <= 1
    print(op.name)
"""
    assert len(run_script(code).splitlines()) == len(ops.registry())
