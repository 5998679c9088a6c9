"""Keys are found by their hashes alone, and a file that is not one is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ingot.core.errors import ConfigError
from ingot.serving.server.keys import MAX_KEYS, Keys, Tenant, format_line


def test_a_made_key_is_found_and_is_not_in_the_file(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ingot", "keys", "create", "alice"]
    made = subprocess.run(command, capture_output=True, text=True, check=True)
    path = tmp_path / "keys"
    path.write_text(f"# a comment\n\n{made.stdout}")
    key = made.stderr.split()[-1]
    assert key not in path.read_text()
    assert len(key) > 40
    assert Keys.load(path).find(key) == Tenant(name="alice")
    assert Keys.load(path).find(key[:-1]) is None
    assert Keys.load(path).find("") is None


def test_a_wrong_name_makes_no_key() -> None:
    command = [sys.executable, "-m", "ingot", "keys", "create", "a b"]
    made = subprocess.run(command, capture_output=True, text=True)
    assert made.returncode
    assert "hint" in made.stderr
    assert not made.stdout


def test_a_tenant_may_have_several_keys_and_bounds() -> None:
    keys = Keys.parse(
        f"{format_line('a', 'old')}\n{format_line('a', 'new')} requests=60 tokens=90000\n"
    )
    assert keys.find("old") == Tenant(name="a")
    assert keys.find("new") == Tenant(name="a", requests=60, tokens=90000)
    assert keys.find("old").cache_salt == keys.find("new").cache_salt  # pyright: ignore


def test_every_line_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []
    monkeypatch.setattr(
        "ingot.serving.server.keys.hmac.compare_digest", lambda a, b: compared.append(a) or a == b
    )
    keys = Keys.parse("\n".join(format_line("a", str(n)) for n in range(5)))
    assert keys.find("0")
    assert keys.find("none") is None
    assert len(compared) == 10


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# nothing",
        "alice",
        "alice plain-key",
        "alice sha256:12",
        format_line("a", "k") + " tokens=0",
        format_line("a", "k") + " tokens=many",
        format_line("a", "k") + " more=1",
        "a/b" + format_line("a", "k")[1:],
        "\n".join(format_line("a", str(n)) for n in range(MAX_KEYS + 1)),
    ],
)
def test_invalid_key_file_is_rejected(text: str) -> None:
    with pytest.raises(ConfigError, match="hint"):
        Keys.parse(text)


def test_a_file_that_is_missing_large_or_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        Keys.load(tmp_path / "none")
    for content in (b"\xff\xfe\x00", b"#" * (1 << 21)):
        (tmp_path / "keys").write_bytes(content)
        with pytest.raises(ConfigError):
            Keys.load(tmp_path / "keys")
