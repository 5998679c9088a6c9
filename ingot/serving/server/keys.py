"""Who may use the server: a file of hashed keys.

A line names a tenant and the SHA-256 of a key, and may bound what the tenant uses in a minute:

    alice sha256:2bd806c97f0e00af1a1fc3328fa763a9269723c8db8fac4f93af71db186d6e90
    bob   sha256:81b637d8fcd2c6da6359e6963113a1170de795e4b725b84d1e0b4cfd9ec58ce9 tokens=90000

`python -m ingot.serving.server.keys alice >> keys.txt` writes such a line, and shows the key once,
on stderr. Keys are 256 random bits, so a plain hash of them cannot be searched; whoever reads the
file learns no key. A tenant may have several lines: that is how a key is replaced. What a tenant
computed is cached for that tenant alone: `salt` goes into every cached block's key.

A key that comes is hashed and compared with every line in constant time.
"""

from __future__ import annotations

import hmac
import re
import secrets
import sys
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
    """Who asks, and what they may use in a minute; None is no bound.

    >>> Tenant(name="alice").salt == Tenant(name="bob").salt
    False
    """

    name: str
    requests: int | None = None
    tokens: int | None = None

    @property
    def salt(self) -> bytes:
        """What keeps the tenant's cached blocks from the others'."""
        return sha256(b"ingot tenant " + self.name.encode()).digest()


ANYBODY = Tenant(name="anybody")
"""The only tenant of a server without keys."""


class Keys:
    """The tenants of a file, by their keys.

    >>> keys = Keys.parse(line("alice", "a key"))
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
                    f"{path} has more than {MAX_FILE:,} bytes", hint="name a file of keys"
                )
            return cls.parse(content.decode())
        except OSError as error:
            what = f"cannot read the keys in {path}: {error.strerror}"
            hint = "make one: python -m ingot.serving.server.keys NAME >> FILE"
            raise ConfigError(what, hint=hint) from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path} is not text", hint="name a file of keys") from error

    @classmethod
    def parse(cls, text: str) -> Keys:
        """Read the lines of a file of keys; empty ones and those that begin with # are none."""
        entries: list[tuple[bytes, Tenant]] = []
        for number, row in enumerate(text.splitlines(), start=1):
            words = row.split()
            if words and not words[0].startswith("#"):
                entries.append(_entry(words, number))
        if not 1 <= len(entries) <= MAX_KEYS:
            raise ConfigError(
                f"a file of {len(entries):,} keys",
                hint=f"give 1 to {MAX_KEYS:,}: python -m ingot.serving.server.keys NAME >> FILE",
            )
        return cls(entries)

    def find(self, key: str) -> Tenant | None:
        """The tenant of a key. The time it takes tells nothing about the keys there are."""
        digest = sha256(key[:MAX_KEY].encode("utf-8", "replace")).digest()
        found: Tenant | None = None
        for known, tenant in self._entries:
            if hmac.compare_digest(known, digest):
                found = tenant
        return found


def line(name: str, key: str) -> str:
    """The line of a tenant's key.

    >>> line("alice", "a key")[:25]
    'alice sha256:8fa3aab2faa9'
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"'{name[:80]}' is no name for a tenant",
            hint="use 1 to 64 letters, digits and . _ @ -",
        )
    return f"{name} sha256:{sha256(key.encode()).hexdigest()}"


def _entry(words: list[str], number: int) -> tuple[bytes, Tenant]:
    name, digest = words[0], _HASH.fullmatch(words[1]) if len(words) > 1 else None
    bounds = [_BOUND.fullmatch(word) for word in words[2:]]
    if not _NAME.fullmatch(name) or digest is None or None in bounds:
        raise ConfigError(
            f"line {number} of the keys is not 'NAME sha256:HASH [requests=N] [tokens=N]'",
            hint="write it with python -m ingot.serving.server.keys NAME >> FILE",
        )
    given = {bound[1]: int(bound[2]) for bound in bounds if bound}
    return bytes.fromhex(digest[1]), Tenant(name=name, **given)


def main() -> None:
    """Print the line of a new key to stdout, and the key to stderr."""
    if len(sys.argv) != 2:
        sys.exit("usage: python -m ingot.serving.server.keys NAME >> FILE")
    key = f"ingot-{secrets.token_urlsafe(32)}"
    try:
        row = line(sys.argv[1], key)
    except ConfigError as error:
        sys.exit(str(error))
    sys.stdout.write(row + "\n")
    sys.stderr.write(f"the key of {sys.argv[1]}, shown once: {key}\n")


if __name__ == "__main__":
    main()
