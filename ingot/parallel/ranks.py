"""The processes of a distributed run, and sums whose bits do not depend on their number.

Floating-point sums depend on their order, and a library's all-reduce has an order for each number
of ranks. Here a sum over the ranks is a binary tree over their indices:

    ((r0 + r1) + (r2 + r3)) + ((r4 + r5) + (r6 + r7))

If a rank holds the sum of a subtree already, the result has the same bits. So the number of ranks
is a power of two.

A reduce-scatter is an all-to-all and a local sum in this order: as many bytes as a ring sends. An
all-reduce is this and an all-gather.

Every collective counts the bytes that this rank sends to others, without headers (`sent_bytes`),
and the seconds that it waits (`waited_seconds`).
"""

# pyright: basic, reportPrivateImportUsage=false
from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from ingot.core import spans
from ingot.core.device import resolve
from ingot.core.errors import ConfigError
from ingot.parallel.trace import record_collectives

_HEARTBEAT_S = 1.0
_SENT = 2**22  # elements for each rank
_SUMMED = 2**18  # temporaries of as many stay in the cache


@dataclass(frozen=True)
class Ranks:
    """The ranks of a process group; `Ranks()` is a single process, without a group.

    >>> ranks = Ranks()
    >>> ranks.gather([1.0, 2.0]), ranks.is_main
    ([[1.0, 2.0]], True)
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    @property
    def is_main(self) -> bool:
        """Whether this rank writes the files of the run."""
        return self.rank == 0

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Return the values of all ranks, by rank; each rank has to pass as many."""
        own = torch.tensor(values, dtype=torch.float64)
        if self.size == 1:
            return [own.tolist()]
        return all_gather(own[None], self.group).tolist()

    def max(self, values: Tensor) -> Tensor:
        """Return the largest value of all ranks, by element."""
        if self.size > 1:
            values = values.clone()
            with waiting("all_reduce", 2 * values.nbytes * (self.size - 1) // self.size):
                dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group)
        return values

    def sum_integers(self, values: Tensor) -> Tensor:
        """Return the sum of the values of all ranks, by element; integers have no order."""
        if self.size > 1:
            values = values.clone()
            with waiting("all_reduce", 2 * values.nbytes * (self.size - 1) // self.size):
                dist.all_reduce(values, group=self.group)
        return values

    def share(self, text: str, source: int = 0) -> str:
        """Return the text of one rank, by default the main rank."""
        if self.size == 1:
            return text
        length = int(self.gather([len(text.encode())])[source][0])
        content = torch.zeros(length, dtype=torch.uint8)
        if self.rank == source and length:
            content = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
            count_sent(length * (self.size - 1))
        dist.broadcast(content, group=self.group, group_src=source)
        return bytes(content.tolist()).decode()

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        if self.size > 1:
            dist.barrier(group=self.group)


class Heartbeat:
    """Reports once a second that this process is running, and finds the ranks that do not."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._stop = threading.Event()
        threading.Thread(target=self._beat, name="ingot-heartbeat", daemon=True).start()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()

    def silent_ranks(self, seconds: float) -> list[int]:
        """Return the ranks whose last heartbeat is older than this.

        Rank 0 has them all. If its process is stopped, a request to it never returns.
        """
        found: list[list[int]] = []
        request = threading.Thread(
            target=lambda: found.append(self._compare_beats(seconds)), daemon=True
        )
        request.start()
        request.join(2 * seconds + _HEARTBEAT_S)
        return found[0] if found else [0]

    def _compare_beats(self, seconds: float) -> list[int]:
        beats = [f"heartbeat/{rank}" for rank in range(self._size)]
        try:
            before = self._store.multi_get(beats)
            time.sleep(seconds)
            after = self._store.multi_get(beats)
        except (RuntimeError, dist.DistError):
            return [0]
        return [rank for rank in range(self._size) if before[rank] == after[rank]]

    def _beat(self) -> None:
        count = 0
        with suppress(RuntimeError):  # the store is gone: the run is over
            while not self._stop.wait(_HEARTBEAT_S):
                count += 1
                self._store.set(f"heartbeat/{self._rank}", str(count))


_heartbeat: Heartbeat | None = None


def connect(timeout_s: float = 600.0, device: str = "cpu") -> Ranks:
    """Join the process group that torchrun started this process for; `Ranks()` without torchrun.

    A collective that has not finished after `timeout_s` is an error. Of several accelerators of a
    machine, a rank uses the one of its local index.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return Ranks()
    if size & (size - 1):
        raise ConfigError(
            f"ranks: must be a power of two, got {size}", hint="start 2, 4, 8 or more ranks"
        )
    global _heartbeat
    if not dist.is_initialized():
        record_collectives()
        store, rank, size = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
        join(store, rank, size, timeout_s, device, int(os.environ["LOCAL_RANK"]))
        _heartbeat = Heartbeat(store, rank, size)
    return Ranks(dist.get_rank(), size, dist.group.WORLD)


def create_store() -> dist.TCPStore:
    """Return the store where the ranks of this machine find each other: see `join`."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # other machines cannot connect
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def find_store(port: int) -> dist.TCPStore:
    """Return the store that another process of this machine has created."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return dist.TCPStore("127.0.0.1", port, is_master=False)


def join(
    store: dist.Store, rank: int, size: int, timeout_s: float, device: str, local_rank: int
) -> Ranks:
    """Join the process group of a store; `local_rank` is the index among those of a machine."""
    options = {"store": store, "rank": rank, "world_size": size}
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(_backend(device, local_rank), timeout=timeout, **options)
    return Ranks(rank, size, dist.group.WORLD)


def _backend(device: str, index: int) -> str:
    """Return the library of collectives for a device, after selecting that of this rank."""
    kind = resolve(device).type
    if kind == "cpu":
        return "gloo"
    count = torch.accelerator.device_count()
    if index >= count:
        raise ConfigError(
            f"device: rank {index} of this machine needs a device of its own, torch sees {count}",
            hint=f"start at most {count} ranks on this machine, or set device=cpu",
        )
    torch.accelerator.set_device_index(index)
    return f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}"


def disconnect() -> None:
    """Leave the process group, if there is one."""
    if _heartbeat is not None:
        _heartbeat.stop()
    if dist.is_initialized():
        dist.destroy_process_group()


def name_silent_ranks() -> list[int]:
    """Return the ranks that do not answer; for the message after a collective has failed."""
    return [] if _heartbeat is None else _heartbeat.silent_ranks(3 * _HEARTBEAT_S)


_sent = 0


def sent_bytes() -> int:
    """Return how many bytes this process has sent to other ranks."""
    return _sent


def count_sent(count: int) -> None:
    """Add bytes that were sent by other means than the functions of this module."""
    global _sent
    _sent += count


_waited: defaultdict[str, float] = defaultdict(float)


def waited_seconds() -> dict[str, float]:
    """Return how long this process has waited in collectives, by their kind.

    On an accelerator they run while it computes: then these are the seconds to start them.
    """
    return dict(_waited)


@contextmanager
def waiting(kind: str, sent: int) -> Generator[None]:
    """Count the bytes and the seconds of a collective."""
    count_sent(sent)
    start = time.perf_counter()
    with record_function(f"{spans.COMMUNICATION}: {kind}"):
        yield
    _waited[kind] += time.perf_counter() - start


def all_to_all(
    values: Tensor,
    group: dist.ProcessGroup | None,
    received: list[int] | None = None,
    sent: list[int] | None = None,
) -> Tensor:
    """Send each rank its part of the first dimension; return the parts received, by rank.

    The parts are equal, unless `received` and `sent` have their sizes.
    """
    assert group is not None
    rows = len(values) if received is None else sum(received)
    output = values.new_empty(rows, *values.shape[1:])
    kept = len(values) // group.size() if sent is None else sent[group.rank()]
    with waiting("all_to_all", values.nbytes - values[:kept].nbytes):
        dist.all_to_all_single(output, values.contiguous(), received, sent, group=group)
    return output


def all_gather(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the values of all ranks, joined along the first dimension, by rank."""
    assert group is not None
    size = group.size()
    found = values.new_empty(size * len(values), *values.shape[1:])
    with waiting("all_gather", values.nbytes * (size - 1)):
        dist.all_gather_single(found, values.contiguous(), group=group)
    return found


def tree_sum(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of the parts, pairwise; their number is a power of two.

    >>> tree_sum([torch.tensor(1e8), torch.tensor(-1e8), torch.tensor(1.0), torch.tensor(2.0)])
    tensor(3.)
    """
    sums = list(parts)
    while len(sums) > 1:
        sums = [left + right for left, right in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]


def reduce_scatter(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's part of the sum over the ranks, in float32.

    Values are sent in their own dtype; many of them in chunks, so that what is received takes
    less memory than `values`.
    """
    parts = values.view(group.size(), -1)
    total = values.new_empty(parts.shape[1], dtype=torch.float32)
    for sent, own in zip(parts.split(_SENT, 1), total.split(_SENT), strict=True):
        received = all_to_all(sent, group)
        for some, sums in zip(received.split(_SUMMED, 1), own.split(_SUMMED), strict=True):
            sums.copy_(tree_sum([part.float() for part in some]))
    return total


def all_reduce(values: Tensor, group: dist.ProcessGroup) -> None:
    """Replace a float32 vector by its sum over the ranks."""
    size = group.size()
    if size == 1:
        return
    part = -(-values.numel() // size)
    padded = torch.nn.functional.pad(values, (0, part * size - values.numel()))
    values.copy_(all_gather(reduce_scatter(padded, group), group)[: values.numel()])


def row_slice(rows: int, rank: int, size: int) -> slice:
    """Return which rows FSDP2 gives to a rank: equal parts, the last may have fewer or none.

    >>> [row_slice(10, rank, 4) for rank in range(4)]
    [slice(0, 3, None), slice(3, 6, None), slice(6, 9, None), slice(9, 10, None)]
    """
    part = -(-rows // size)
    begin = min(part * rank, rows)
    return slice(begin, min(begin + part, rows))
