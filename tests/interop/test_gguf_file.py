"""Files that lie: every one is an error with a hint, at once, without much memory."""

from __future__ import annotations

import shutil
import struct
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import gguf as package
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ingot.core.errors import IngotError
from ingot.interop import gguf, gguf_file
from ingot.interop.gguf_file import GgufError
from tests.interop import conftest
from tests.interop.conftest import Small

HUGE = 2**63 + 5


def string(text: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text


def header(
    tensors: int = 0, keys: int = 0, rest: bytes = b"", magic: bytes = b"GGUF", version: int = 3
) -> bytes:
    return magic + struct.pack("<IQQ", version, tensors, keys) + rest


def key(kind: int, value: bytes, name: bytes = b"k") -> bytes:
    return string(name) + struct.pack("<I", kind) + value


def array(kind: int, count: int, content: bytes = b"") -> bytes:
    return key(9, struct.pack("<IQ", kind, count) + content)


def info(
    dims: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0, name: bytes = b"t"
) -> bytes:
    packed = struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
    return string(name) + packed


LIES = {
    "empty": (b"", "does not begin with"),
    "short": (b"GGUF\x03", "does not begin with"),
    "magic": (header(magic=b"GGML"), "does not begin with"),
    "version": (header(version=1), "version 1"),
    "big endian": (header(version=0x03000000), "big-endian"),
    "tensors": (header(tensors=HUGE), "tensors"),
    "keys": (header(keys=HUGE), "keys"),
    "many keys, none there": (header(keys=60000), "within its header"),
    "many tensors, none there": (header(tensors=60000), "within its header"),
    "long name": (header(keys=1, rest=string(b"k", HUGE)), "a name or string of"),
    "long string": (header(keys=1, rest=key(8, string(b"v", 2**27))), "within its header"),
    "longer string": (header(keys=1, rest=key(8, string(b"v", HUGE))), "a name or string of"),
    "not UTF-8": (header(keys=1, rest=key(8, string(b"\xff"))), "not UTF-8"),
    "unknown type": (header(keys=1, rest=key(99, b"")), "unknown type 99"),
    "long array": (header(keys=1, rest=array(4, HUGE)), "elements of arrays"),
    "array not there": (header(keys=1, rest=array(4, 2**21)), "within its header"),
    "strings not there": (header(keys=1, rest=array(8, 2**21)), "within its header"),
    "array of arrays": (header(keys=1, rest=array(9, 1)), "array of unsupported type 9"),
    "key twice": (header(keys=2, rest=2 * key(0, b"\0")), "'k' is a duplicate"),
    "alignment 0": (
        header(keys=1, rest=key(4, b"\0\0\0\0", b"general.alignment")),
        "alignment is 0",
    ),
    "no dims": (header(tensors=1, rest=info(())), "0 dimensions"),
    "many dims": (header(tensors=1, rest=info((1,) * 5)), "5 dimensions"),
    "dim 0": (header(tensors=1, rest=info((0, 4))), r"shape \(4, 0\)"),
    "huge dims": (header(tensors=1, rest=info((HUGE, HUGE))), "has the shape"),
    "unknown quantization": (header(tensors=1, rest=info(kind=77)), "unknown type 77"),
    "odd row": (header(tensors=1, rest=info((31,), 8)), "not a multiple of 32"),
    "offset": (header(tensors=1, rest=info(offset=HUGE)), "ends at byte"),
    "no data": (header(tensors=1, rest=info((2**30,))), "ends at byte"),
    "tensor twice": (header(tensors=2, rest=2 * info() + bytes(512)), "'t' is a duplicate"),
    "overlap": (
        header(
            tensors=9, rest=b"".join(info((64,), name=b"%d" % n) for n in range(9)) + bytes(320)
        ),
        "overlap",
    ),
}


@pytest.mark.parametrize("name", LIES)
def test_malformed_headers_raise_quickly(tmp_path: Path, name: str) -> None:
    content, message = LIES[name]
    path = tmp_path / "lie.gguf"
    path.write_bytes(content)
    gguf_file.package("constants")
    tracemalloc.start()
    start = time.perf_counter()
    with pytest.raises(GgufError, match=message) as raised:
        gguf_file.read(path)
    assert time.perf_counter() - start < 1
    assert tracemalloc.get_traced_memory()[1] < 20e6
    tracemalloc.stop()
    assert raised.value.hint


def test_missing_file_or_directory_raises(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.gguf"):
        with pytest.raises(GgufError, match="cannot read"):
            gguf_file.read(path)


def test_missing_gguf_package_hints_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf.quants", None)
    with pytest.raises(IngotError, match="package `gguf` is needed") as raised:
        gguf_file.package("quants")
    assert raised.value.hint == "pip install 'ingot[gguf]'"


def test_header_matches_the_gguf_package(small: Small) -> None:
    change = {"x.bool": True, "x.float": -0.5, "x.string": "é", "x.empty": ""}
    path = small(change={**change, "x.array": [1.5, 2.5]})
    ours, theirs = gguf_file.read(path), package.GGUFReader(path)
    fields = {name: field for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert ours.metadata == {name: field.contents() for name, field in fields.items()}
    assert set(ours.tensors) == {tensor.name for tensor in theirs.tensors}
    for tensor in theirs.tensors:
        found = ours.tensors[tensor.name]
        assert found.shape == tuple(reversed(tensor.shape.tolist()))
        assert found.type == tensor.tensor_type.name
        assert (found.start, found.num_bytes) == (tensor.data_offset, tensor.n_bytes)


def test_smollm2_header_matches_the_gguf_package(smollm2_gguf: Path) -> None:
    ours, theirs = gguf_file.read(smollm2_gguf), package.GGUFReader(smollm2_gguf)
    for name in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges", "llama.rope.freq_base"):
        assert ours.metadata[name] == theirs.fields[name].contents()
    last = theirs.tensors[-1]
    assert ours.tensors[last.name].start == last.data_offset


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, int]:
    """The bytes of a whole small model with a quantized tensor, and where its header ends."""
    made = conftest.model("llama", num_hidden_layers=1, hidden_size=32, num_attention_heads=4)
    weights: dict[str, Any] = conftest.tensors(made, "llama")
    name, kind = "blk.0.attn_q.weight", package.GGMLQuantizationType.Q4_1
    weights[name] = package.quants.quantize(np.ascontiguousarray(weights[name]), kind)
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    values = conftest.metadata(made, "llama")
    conftest.write(path, "llama", values, weights, {name: kind})
    end = min(tensor.start for tensor in gguf_file.read(path).tensors.values())
    return path.read_bytes(), end


CHANGES = st.lists(
    st.tuples(
        st.floats(0, 1, exclude_max=True),
        st.one_of(
            st.binary(min_size=1, max_size=4),
            st.sampled_from([b"\xff" * 8, b"\0" * 8, struct.pack("<Q", 2**40), b"\x7f" * 4]),
        ),
    ),
    max_size=4,
)


@settings(
    max_examples=300, deadline=3000, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(changes=CHANGES, keep=st.one_of(st.just(1.0), st.floats(0, 1)), in_header=st.booleans())
@example(changes=[], keep=1.0, in_header=False)
def test_damaged_files_load_or_raise(
    tiny: tuple[bytes, int],
    tmp_path: Path,
    changes: list[tuple[float, bytes]],
    keep: float,
    in_header: bool,
) -> None:
    content = bytearray(tiny[0])
    end = tiny[1] if in_header else len(content)
    for place, new in changes:
        at = int(place * end)
        content[at : at + len(new)] = new
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content[: int(keep * len(content))])
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    try:
        gguf.convert(path, tmp_path / "out")
    except IngotError:
        assert changes or keep < 1
        assert [entry.name for entry in tmp_path.iterdir()] == ["damaged.gguf"]
    else:
        assert (tmp_path / "out" / "config.json").exists()
