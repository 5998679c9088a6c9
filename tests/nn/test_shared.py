"""Weights that processes share: the same bits, in memory once, and never half of them."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ingot.interop import hf
from ingot.nn import BatchLayout, Decoder, preset
from ingot.nn.formats import Int4, Int8
from ingot.nn.quantized import quantize_
from ingot.nn.shared import SharedWeights
from tests import models


@pytest.fixture
def fd() -> Iterator[int]:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    yield fd
    os.close(fd)


@pytest.fixture(params=["float", "int8", "int4", "gpt2"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "gpt2":  # its weights are transposed in the file
        return models.gpt2(tmp_path / "model")
    decoder = Decoder.from_config(preset("tiny"), seed=0)
    if request.param != "float":
        format = Int8() if request.param == "int8" else Int4(group=32)
        quantize_(decoder.blocks, lambda _: format)
    hf.save(decoder, tmp_path / "model")
    return tmp_path / "model"


def tensors(decoder: Decoder) -> dict[str, torch.Tensor]:
    return {**dict(decoder.named_parameters()), **dict(decoder.named_buffers())}


def test_first_and_second_have_the_bits_and_layout_of_a_plain_load(
    directory: Path, fd: int
) -> None:
    plain = hf.load(directory)
    first = hf.load(directory, shared=SharedWeights(fd, directory))
    second = hf.load(directory, shared=SharedWeights(fd, directory))
    tokens = torch.arange(9)
    expected = plain(tokens, BatchLayout.packed([9]))
    for decoder in (first, second):
        assert tensors(decoder).keys() == tensors(plain).keys()
        for name, tensor in tensors(decoder).items():
            own = tensors(plain)[name]
            assert torch.equal(tensor, own), name
            assert (tensor.stride(), tensor.requires_grad) == (own.stride(), own.requires_grad)
        assert torch.equal(decoder(tokens, BatchLayout.packed([9])), expected)


def test_the_second_reads_nothing(directory: Path, fd: int) -> None:
    hf.load(directory, shared=SharedWeights(fd, directory))
    read: list[bool] = []
    SharedWeights(fd, directory).load(hf.load(directory), lambda: read.append(True))
    assert not read


def test_the_file_is_sealed(tmp_path: Path, fd: int) -> None:
    directory = models.small(tmp_path / "small")
    hf.load(directory, shared=SharedWeights(fd, directory))
    assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE
    with pytest.raises(PermissionError):
        os.pwrite(fd, b"x", 0)


def test_other_files_than_those_in_memory_are_read(tmp_path: Path, fd: int) -> None:
    directory = models.small(tmp_path / "small")
    hf.load(directory, shared=SharedWeights(fd, directory))
    (directory / "model.safetensors").unlink()
    (directory / "config.json").unlink()
    changed = Decoder.from_config(preset("tiny"), seed=1)
    hf.save(changed, directory)
    loaded = hf.load(directory, shared=SharedWeights(fd, directory))
    assert torch.equal(loaded.tok_embed.weight, changed.tok_embed.weight)


LOADER = """
import os, sys, time
from pathlib import Path
from ingot.interop import hf
from ingot.nn import shared

def slow(model, fd, source):
    print("publishing", flush=True)
    os.pwrite(fd, b"half", 0)
    time.sleep(60)

shared._publish = slow
hf.load(sys.argv[2], shared=shared.SharedWeights(int(sys.argv[1]), Path(sys.argv[2])))
"""


def test_a_process_that_dies_while_it_writes_leaves_nothing(tmp_path: Path, fd: int) -> None:
    directory = models.small(tmp_path / "small")
    command = [sys.executable, "-c", LOADER, str(fd), str(directory)]
    with subprocess.Popen(command, pass_fds=[fd], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"publishing\n"
        process.send_signal(signal.SIGKILL)
    start = time.monotonic()
    loaded = hf.load(directory, shared=SharedWeights(fd, directory))
    assert time.monotonic() - start < 30, "the lock of a dead process is free"
    assert torch.equal(loaded.tok_embed.weight, hf.load(directory).tok_embed.weight)
