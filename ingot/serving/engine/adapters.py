"""Adapters: the LoRA adapters that an engine serves, by name, and their slots in the decoder.

The decoder has memory for `max_loras` adapters of at most `max_lora_rank` (`add_lora_slots`).
Loading an adapter writes its matrices to a free slot, so that captured steps remain valid; tokens
refer to a slot. The base model and all adapters are computed in one batch.

Unloading removes the name: later requests for it are errors, running ones finish. The slot can be
reused when the last of them has finished.

Imports no torch, so that the HTTP process can describe adapters without loading it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ingot.core.errors import ConfigError, IngotError, UnknownName
from ingot.core.log import logger

if TYPE_CHECKING:
    from ingot.interop.peft import Adapter
    from ingot.nn import Decoder

_log = logger(__name__)
BASE_SLOT = -1
"""Slot of tokens that are computed without an adapter."""
MAX_LORAS = 256
DEFAULT_MAX_LORA_RANK = 16
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")


def check_name(name: str, kind: str = "an adapter") -> None:
    """Raise unless a name can be that of an adapter, or of another kind of model.

    >>> check_name("no spaces")
    Traceback (most recent call last):
    ...
    ingot.core.errors.ConfigError: invalid name of an adapter: 'no spaces'
      hint: use up to 128 letters, digits and . _ : -
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"invalid name of {kind}: {name[:128]!r}",
            hint="use up to 128 letters, digits and . _ : -",
        )


def parse_adapters(options: Sequence[str]) -> dict[str, str]:
    """Return the directories of adapters by name, from options `NAME=DIRECTORY`.

    >>> parse_adapters(["pirate=runs/pirate"])
    {'pirate': 'runs/pirate'}
    """
    adapters: dict[str, str] = {}
    for option in options:
        name, separator, directory = option.partition("=")
        if not (separator and directory) or name in adapters:
            raise ConfigError(
                f"--adapter: expected NAME=DIRECTORY, each name once, got '{option[:256]}'",
                hint="for example --adapter pirate=runs/pirate",
            )
        check_name(name)
        adapters[name] = directory
    return adapters


class LoadedAdapter(msgspec.Struct, frozen=True):
    """An adapter in a slot of the decoder.

    >>> LoadedAdapter("pirate", "5b3f", 16, 0).rank
    16
    """

    name: str
    digest: str
    """SHA-256 of its config and tensors. It is part of the key of KV-cache blocks."""
    rank: int
    slot: int
    directory: str = ""
    """Where it was read from; empty for one that was given as tensors."""


class AdapterPool:
    """The adapters of a decoder by name.

    >>> from ingot.nn import Decoder, preset
    >>> pool = AdapterPool(Decoder.from_config(preset("tiny"), seed=0), max_loras=2)
    >>> pool.find("pirate")
    Traceback (most recent call last):
    ...
    ingot.core.errors.UnknownName: unknown adapter 'pirate'
      hint: valid: none is loaded
    """

    def __init__(
        self, decoder: Decoder, max_loras: int, max_lora_rank: int = DEFAULT_MAX_LORA_RANK
    ) -> None:
        self.max_loras, self.max_lora_rank = max_loras, max_lora_rank
        self._decoder = decoder
        self._loaded: dict[str, LoadedAdapter] = {}
        if not 0 <= max_loras <= MAX_LORAS:
            raise ConfigError(
                f"max_loras: expected 0 to {MAX_LORAS}, got {max_loras}", hint="lower it"
            )
        if max_loras:
            decoder.add_lora_slots(max_loras, max_lora_rank)

    @staticmethod
    def of(
        decoder: Decoder,
        directories: Mapping[str, Path | str],
        *,
        max_loras: int | None = None,
        max_lora_rank: int | None = None,
        skip_broken: bool = False,
    ) -> AdapterPool:
        """Load the adapters of PEFT directories by name.

        Args:
            decoder: The model that they adapt.
            directories: By the name of the adapter.
            max_loras: Slots; by default as many as there are adapters.
            max_lora_rank: By default the largest rank of the adapters, at least 16.
            skip_broken: Log the error of an adapter that cannot be read, instead of raising it.
        """
        adapters: dict[str, Adapter] = {}
        for name, directory in directories.items():
            try:
                adapters[name] = _read(directory, decoder)
            except IngotError as error:
                if not skip_broken:
                    raise
                _log.error("adapter %s is not served: %s", name, error.message)
        if max_lora_rank is None:
            ranks = [adapter.rank for adapter in adapters.values()]
            max_lora_rank = max([DEFAULT_MAX_LORA_RANK, *ranks])
        pool = AdapterPool(
            decoder, len(directories) if max_loras is None else max_loras, max_lora_rank
        )
        for name, adapter in adapters.items():
            pool._write(name, adapter, pool._free_slot(name, ()), str(directories[name]))
        return pool

    @property
    def loaded(self) -> list[LoadedAdapter]:
        """The adapters that requests can name."""
        return list(self._loaded.values())

    def find(self, name: str) -> LoadedAdapter:
        """Return the adapter of this name."""
        if name not in self._loaded:
            raise UnknownName("adapter", name[:128], self._loaded or ["none is loaded"])
        return self._loaded[name]

    def load(
        self,
        name: str,
        source: Adapter | Path | str,
        *,
        replace: bool = False,
        busy: Collection[int] = (),
    ) -> LoadedAdapter:
        """Write an adapter to a free slot.

        Args:
            name: Name by which requests refer to it.
            source: The adapter, or its PEFT directory.
            replace: Whether to replace an adapter of the same name; an error otherwise.
            busy: Slots that running requests use.
        """
        check_name(name)
        if name in self._loaded and not replace:
            raise ConfigError(
                f"adapter '{name}' is loaded already", hint="unload it first, or replace it"
            )
        slot = self._free_slot(name, busy)
        if not isinstance(source, Path | str):
            return self._write(name, source, slot, "")
        return self._write(name, _read(source, self._decoder), slot, str(source))

    def unload(self, name: str) -> None:
        """Remove a name; its slot is free when no request uses it."""
        self.find(name)
        del self._loaded[name]

    def _write(self, name: str, adapter: Adapter, slot: int, directory: str) -> LoadedAdapter:
        if adapter.rank > self.max_lora_rank:
            raise ConfigError(
                f"adapter '{name}' has rank {adapter.rank}, at most {self.max_lora_rank} fits",
                hint=f"raise max_lora_rank to {adapter.rank}",
            )
        from ingot.interop import peft

        self._loaded.pop(name, None)
        weights = peft.lora_weights(adapter, self._decoder)
        self._decoder.set_adapter(slot, weights, adapter.scale)
        loaded = LoadedAdapter(name, adapter.digest, adapter.rank, slot, directory)
        self._loaded[name] = loaded
        return loaded

    def _free_slot(self, name: str, busy: Collection[int]) -> int:
        """Return a slot that no other adapter and no running request uses."""
        used = {one.slot for one in self._loaded.values() if one.name != name} | set(busy)
        for slot in range(self.max_loras):
            if slot not in used:
                return slot
        raise ConfigError(
            f"adapter '{name}': all {self.max_loras} slots are in use",
            hint="raise max_loras, or unload an adapter and wait for its requests to finish",
        )


def _read(directory: Path | str, decoder: Decoder) -> Adapter:
    from ingot.interop import peft

    return peft.load(directory, decoder)
