from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ingot.core.errors import IngotError
from ingot.interop import hf
from ingot.nn import Decoder, preset
from ingot.nn.weights import INDEX, SINGLE, SafetensorsDir, WeightsError, read_json, write

TENSORS = {
    "b.weight": torch.randn(5, 3),
    "a.bias": torch.randn(7).bfloat16(),
    "empty": torch.empty(0, 4),
    "scalar": torch.tensor(3.0),
    "half": torch.randn(2, 2, 2).half(),
}


def read_all(directory: Path) -> dict[str, torch.Tensor]:
    weights, found = SafetensorsDir(directory), {}
    weights.check_matches(
        {n: torch.empty(p.shape, device="meta") for n, p in weights.entries.items()}
    )
    for name, entry in weights.entries.items():
        found[name] = torch.empty(entry.shape, dtype=entry.dtype)
    weights.read(found)
    return found


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert (tensor.dtype, tensor.shape) == (other[name].dtype, other[name].shape)
        assert torch.equal(tensor, other[name]), name


def test_files_are_interchangeable_with_safetensors(tmp_path: Path) -> None:
    write(tmp_path / "ours", TENSORS)
    assert_equal(load_file(tmp_path / "ours" / SINGLE), TENSORS)
    (tmp_path / "theirs").mkdir()
    save_file(TENSORS, tmp_path / "theirs" / SINGLE, metadata={"format": "pt"})
    assert_equal(read_all(tmp_path / "theirs"), TENSORS)
    one, other = (tmp_path / name / SINGLE for name in ("ours", "theirs"))
    assert one.read_bytes() == other.read_bytes()


def test_shards_have_an_index(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.full((10,), float(i)) for i in range(7)}
    write(tmp_path, tensors, shard_bytes=80)
    names = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert names == [f"model-0000{i}-of-00004.safetensors" for i in (1, 2, 3, 4)]
    index = read_json(tmp_path / INDEX)
    assert index["metadata"]["total_size"] == 280
    assert index["weight_map"]["t0"] == names[0]
    assert_equal(read_all(tmp_path), tensors)


def test_views_are_read_in_place_and_written_contiguously(tmp_path: Path) -> None:
    whole = torch.randn(6, 4)
    write(tmp_path, {"top": whole[:2], "rest": whole[2:], "turned": whole.T})
    into = torch.zeros(6, 4, dtype=torch.bfloat16)
    weights = SafetensorsDir(tmp_path)
    weights.read({"top": into[:2], "rest": into[2:]})
    assert torch.equal(into, whole.bfloat16())
    back = torch.zeros(6, 4)
    weights.read({"turned": back.T})
    assert torch.equal(back, whole)


@pytest.mark.parametrize("most", [1, 3, 7, 100])
def test_short_reads_are_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    write(tmp_path, TENSORS)
    whole = os.preadv

    def little(file: int, views: list[memoryview], at: int) -> int:
        piece = bytearray(most)
        count = whole(file, [piece], at)
        for view in views:
            view[: len(piece)] = piece[: len(view)]
            piece = piece[len(view) :]
        return min(count, sum(len(view) for view in views))

    monkeypatch.setattr("os.preadv", little)
    assert_equal(read_all(tmp_path), TENSORS)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_read_every_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    tensors = {f"t{i}": torch.randn(i % 13, 5) for i in range(40)}
    write(tmp_path, tensors, shard_bytes=1000)
    monkeypatch.setattr("ingot.nn.weights._THREADS", threads)
    monkeypatch.setattr("ingot.nn.weights._MAX_BUFFERS", 6)
    assert_equal(read_all(tmp_path), tensors)
    weights = SafetensorsDir(tmp_path)
    into = {name: torch.zeros_like(t, dtype=torch.float64) for name, t in tensors.items()}
    del into["t7"]  # a gap
    weights.read(into)
    assert_equal(into, {name: tensors[name].double() for name in into})


def test_writing_over_weights_raises(tmp_path: Path) -> None:
    write(tmp_path, TENSORS)
    with pytest.raises(WeightsError, match="already has weights"):
        write(tmp_path, TENSORS)


def test_failed_write_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(specs: Any, path: Path, metadata: Any) -> None:
        path.write_bytes(b"half of it")
        raise SafetensorError("No space left on device")

    monkeypatch.setattr("ingot.nn.weights.serialize_file", full)
    with pytest.raises(WeightsError, match="No space left"):
        write(tmp_path, TENSORS)
    assert not list(tmp_path.iterdir())


def test_pickles_are_not_opened(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(WeightsError, match="are not opened"):
        SafetensorsDir(tmp_path)
    with pytest.raises(WeightsError, match=r"no model\.safetensors"):
        SafetensorsDir(tmp_path / "nowhere")


def test_mismatched_names_or_shapes_raise(tmp_path: Path) -> None:
    write(tmp_path, {"a": torch.ones(2), "b": torch.ones(3)})
    weights = SafetensorsDir(tmp_path)
    with pytest.raises(WeightsError, match=r"1 tensors are not in .*: c"):
        weights.check_matches({"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(1)})
    with pytest.raises(WeightsError, match="not in the model: b"):
        weights.check_matches({"a": torch.ones(2)})
    with pytest.raises(WeightsError, match=r"'b' is \(3,\) where the model has \(4,\)"):
        weights.check_matches({"a": torch.ones(2), "b": torch.ones(4)})


def test_integer_weights_raise(tmp_path: Path) -> None:
    write(tmp_path, {"a": torch.ones(2, dtype=torch.int8)})
    with pytest.raises(WeightsError, match="convert the weights"):
        SafetensorsDir(tmp_path).check_matches({"a": torch.ones(2)})


@pytest.mark.parametrize(
    "file",
    [
        "../model.safetensors",
        "/etc/passwd",
        "a/b.safetensors",
        "..",
        "x.bin",
        ".safetensors",
        3,
        {},
    ],
)
def test_index_with_a_path_as_shard_raises(file: Any, tmp_path: Path) -> None:
    write(tmp_path / "inner", {"a": torch.ones(2)})
    write(tmp_path, {"a": torch.ones(2)})
    index = {"weight_map": {"a": file}}
    (tmp_path / "inner" / INDEX).write_text(json.dumps(index))
    with pytest.raises(WeightsError, match=r"invalid shard name|is not JSON"):
        SafetensorsDir(tmp_path / "inner")


def test_index_that_contradicts_its_shards_raises(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.full((10,), float(i)) for i in range(4)}
    write(tmp_path, tensors, shard_bytes=80)
    index = read_json(tmp_path / INDEX)
    first, last = index["weight_map"]["t0"], index["weight_map"]["t3"]

    def with_map(**changes: Any) -> None:
        kept = {k: v for k, v in {**index["weight_map"], **changes}.items() if v}
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": kept}))

    with_map(t0=last)
    with pytest.raises(WeightsError, match="missing: t0"):
        SafetensorsDir(tmp_path)
    with_map(t0=None)
    with pytest.raises(WeightsError, match="does not list t0"):
        SafetensorsDir(tmp_path)
    with_map(t9="model-9.safetensors")
    with pytest.raises(WeightsError, match="cannot read"):
        SafetensorsDir(tmp_path)
    with_map()
    (tmp_path / last).write_bytes((tmp_path / first).read_bytes())
    with pytest.raises(WeightsError, match=f"'t0' in {first} and {last}"):
        SafetensorsDir(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, '{"weight_map": []}', "\xff"])
def test_malformed_index_raises(text: str, tmp_path: Path) -> None:
    write(tmp_path, {"a": torch.ones(2)})
    (tmp_path / INDEX).write_text(text, encoding="latin1")
    with pytest.raises(WeightsError):
        SafetensorsDir(tmp_path)


def _file(header: bytes, body: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + body


numbers = st.one_of(
    st.integers(-3, 40), st.sampled_from([2**31, 2**32, 2**62, 2**63, 2**64, 1e300, "4", None, []])
)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "F16", "I8", "F8_E4M3", "F4", "X", "", 3]),
        "shape": st.one_of(st.lists(numbers, max_size=3), numbers),
        "data_offsets": st.one_of(st.tuples(numbers, numbers), st.lists(numbers, max_size=3)),
    }
)
headers = st.dictionaries(
    st.sampled_from(["a", "b", "__metadata__", "", "\x00", "../x"]),
    st.one_of(entries, st.dictionaries(st.text(max_size=2), numbers, max_size=3)),
    max_size=3,
).map(lambda table: json.dumps(table).encode())
lying = st.builds(_file, headers, st.binary(max_size=40))
length_lies = st.builds(
    lambda size, rest: size.to_bytes(8, "little") + rest,
    st.one_of(st.integers(0, 200), st.integers(0, 2**64 - 1)),
    st.binary(max_size=60),
)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """Return a valid file with some bytes changed, removed or added."""
    content = bytearray(GOOD)
    for _ in range(draw(st.integers(0, 3))):
        content[draw(st.integers(0, len(content) - 1))] = draw(st.integers(0, 255))
    cut = draw(st.integers(0, len(content)))
    return bytes(content[:cut]) if draw(st.booleans()) else bytes(content) + b"x" * (cut % 5)


def _good() -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    header["a"] = {"dtype": "F32", "shape": [3, 2], "data_offsets": [0, 24]}
    header["b"] = {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]}
    return _file(json.dumps(header).encode(), bytes(32))


GOOD = _good()


def test_unmodified_fuzz_input_loads(tmp_path: Path) -> None:
    (tmp_path / SINGLE).write_bytes(GOOD)
    assert read_all(tmp_path)["a"].shape == (3, 2)


@settings(
    max_examples=400,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.one_of(damaged(), lying, length_lies))
def test_fuzzed_files_load_or_raise(tmp_path: Path, content: bytes) -> None:
    (tmp_path / SINGLE).write_bytes(content)
    try:
        found = read_all(tmp_path)
    except IngotError:
        return
    assert sum(tensor.nbytes for tensor in found.values()) <= len(content)


def test_every_truncation_raises(tmp_path: Path) -> None:
    for length in range(len(GOOD)):
        (tmp_path / SINGLE).write_bytes(GOOD[:length])
        with pytest.raises(WeightsError):
            SafetensorsDir(tmp_path)


def test_file_truncated_while_reading_raises(tmp_path: Path) -> None:
    (tmp_path / SINGLE).write_bytes(GOOD)
    weights = SafetensorsDir(tmp_path)
    (tmp_path / SINGLE).write_bytes(GOOD[:-20])
    with pytest.raises(WeightsError, match="is truncated"):
        weights.read({"a": torch.empty(3, 2)})


MEASURED = r"""
import re, sys
from ingot.interop import hf
from ingot.nn import Decoder, preset
def peak():  # not ru_maxrss, which a process inherits from the one that started it
    status = open("/proc/self/status").read()
    return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", status)[1])
Decoder.from_config(preset("tiny"), seed=0)
before = peak()
model = hf.load(sys.argv[1])
size = sum(p.nbytes for p in model.parameters())
print((peak() - before) / size)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_takes_memory_for_one_copy_of_the_weights(tmp_path: Path) -> None:
    config = replace(preset("llama-100m"), layers=4, vocab_size=8000)
    hf.save(Decoder.from_config(config, seed=0), tmp_path / "model")
    command = [sys.executable, "-c", MEASURED, str(tmp_path / "model")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert 0.7 < float(done.stdout) < 1.15
