"""API keys: a file of tenant names and hashed keys.

A line has a tenant's name and the SHA-256 of a key, and may limit what the tenant uses per minute:

    alice sha256:2bd806c97f0e00af1a1fc3328fa763a9269723c8db8fac4f93af71db186d6e90
    bob   sha256:81b637d8fcd2c6da6359e6963113a1170de795e4b725b84d1e0b4cfd9ec58ce9 tokens=90000

`ingot keys create alice >> keys.txt` appends such a line and shows the key once, on stderr. Keys
are 256 random bits, so that a plain hash of them cannot be searched and the file reveals no key. A
tenant may have several lines, which is how a key is replaced. Cached blocks are never shared
between tenants: `cache_salt` is part of every block key.

A received key is hashed and compared with every line in constant time.
"""

from __future__ import annotations

import hmac
import re
import secrets
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from ingot.core.errors import ConfigError

MAX_KEYS = 1000
MAX_FILE = 1 << 20
MAX_KEY = 512
_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_HASH = re.compile(r"sha256:([0-9a-f]{64})")
_BOUND = re.compile(r"(requests|tokens)=([1-9][0-9]{0,11})")


@dataclass(frozen=True, kw_only=True)
class Tenant:
    """A user of the server, and its limits per minute; None is unlimited.

    >>> Tenant(name="alice").cache_salt == Tenant(name="bob").cache_salt
    False
    """

    name: str
    requests: int | None = None
    tokens: int | None = None

    @property
    def cache_salt(self) -> bytes:
        """Keeps the tenant's cached blocks apart from others'."""
        return sha256(b"ingot tenant " + self.name.encode()).digest()


ANONYMOUS = Tenant(name="anonymous")
"""The only tenant of a server without keys."""


class Keys:
    """Tenants by their keys.

    >>> keys = Keys.parse(format_line("alice", "a key"))
    >>> keys.find("a key").name, keys.find("another")
    ('alice', None)
    """

    def __init__(self, entries: list[tuple[bytes, Tenant]]) -> None:
        self._entries = entries

    @classmethod
    def load(cls, path: Path) -> Keys:
        """Read a file of keys."""
        try:
            with path.open("rb") as file:
                content = file.read(MAX_FILE + 1)
            if len(content) > MAX_FILE:
                raise ConfigError(
                    f"{path}: expected at most {MAX_FILE:,} bytes", hint="give a file of keys"
                )
            return cls.parse(content.decode())
        except OSError as error:
            message = f"cannot read the keys in {path}: {error.strerror}"
            hint = "create one: ingot keys create NAME >> FILE"
            raise ConfigError(message, hint=hint) from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path} is not a text file", hint="give a file of keys") from error

    @classmethod
    def parse(cls, text: str) -> Keys:
        """Parse a file of keys; empty lines and those that start with # are skipped."""
        entries: list[tuple[bytes, Tenant]] = []
        for number, row in enumerate(text.splitlines(), start=1):
            words = row.split()
            if words and not words[0].startswith("#"):
                entries.append(_entry(words, number))
        if not 1 <= len(entries) <= MAX_KEYS:
            raise ConfigError(
                f"expected 1 to {MAX_KEYS:,} keys, got {len(entries):,}",
                hint="add a key: ingot keys create NAME >> FILE",
            )
        return cls(entries)

    def find(self, key: str) -> Tenant | None:
        """Return the tenant of a key, in a time that does not depend on the keys."""
        digest = sha256(key[:MAX_KEY].encode("utf-8", "replace")).digest()
        match: Tenant | None = None
        for known, tenant in self._entries:
            if hmac.compare_digest(known, digest):
                match = tenant
        return match


def format_line(name: str, key: str) -> str:
    """Return the line of a tenant's key.

    >>> format_line("alice", "a key")[:25]
    'alice sha256:8fa3aab2faa9'
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"invalid tenant name '{name[:80]}'",
            hint="use 1 to 64 letters, digits and . _ @ -",
        )
    return f"{name} sha256:{sha256(key.encode()).hexdigest()}"


def _entry(words: list[str], number: int) -> tuple[bytes, Tenant]:
    name, digest = words[0], _HASH.fullmatch(words[1]) if len(words) > 1 else None
    bounds = [_BOUND.fullmatch(word) for word in words[2:]]
    if not _NAME.fullmatch(name) or digest is None or None in bounds:
        raise ConfigError(
            f"line {number}: expected 'NAME sha256:HASH [requests=N] [tokens=N]'",
            hint="create the line: ingot keys create NAME >> FILE",
        )
    given = {bound[1]: int(bound[2]) for bound in bounds if bound}
    return bytes.fromhex(digest[1]), Tenant(name=name, **given)


def create_key(name: str) -> tuple[str, str]:
    """Return a new random key, and its line for the file.

    >>> key, line = create_key("alice")
    >>> Keys.parse(line).find(key).name
    'alice'
    """
    key = f"ingot-{secrets.token_urlsafe(32)}"
    return key, format_line(name, key)
