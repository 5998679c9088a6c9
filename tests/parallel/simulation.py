"""All ranks of a run, one after another in this process, on a process group without processes.

`simulate` calls a function as each rank of a group, with the code that training uses. A collective
returns at once: what a rank receives is its own input, or ones, so numbers mean nothing, but each
rank's communication is recorded. `find_deadlock` then runs the recordings of all ranks together.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar
from unittest import mock

import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from ingot.parallel.ranks import Ranks


@dataclass(frozen=True)
class Collective:
    """A collective, for which all its ranks have to wait."""

    kind: str
    ranks: tuple[int, ...]
    signature: tuple[Any, ...]
    """What has to be the same on all ranks."""


@dataclass(frozen=True)
class Send:
    to: int
    size: int


@dataclass(frozen=True)
class Receive:
    """The end of waiting for the message that another rank has sent as its `index`-th to us."""

    sender: int
    index: int
    size: int


Program = list[Collective | Send | Receive]


class _Work(dist.Work):
    def __init__(self, on_wait: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self._on_wait = on_wait

    def wait(self, *args: Any) -> bool:
        self._on_wait()
        self._on_wait = lambda: None
        return True

    def is_completed(self) -> bool:
        return True


class _Recorder(dist.ProcessGroup):
    """A process group that writes what it is asked for to `program`."""

    program: ClassVar[Program]
    """That of the rank which is simulated."""
    received: ClassVar[Counter[int]]
    """Messages by sender."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # pyright: ignore
        self._size = size

    def size(self) -> int:
        return self._size

    def getBackendName(self) -> str:
        return "recorder"

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    def _record(self, kind: str, *signature: Any) -> _Work:
        ranks = tuple(dist.get_process_group_ranks(self))
        self.program.append(Collective(kind, ranks, signature))
        return _Work()

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> _Work:  # pyright: ignore
        return self._record("all_reduce", tensors[0].shape, tensors[0].dtype)

    def barrier(self, opts: Any = None) -> _Work:  # pyright: ignore
        return self._record("barrier")

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> _Work:  # pyright: ignore
        return self._record("broadcast", opts.rootRank, tensors[0].dtype)

    def all_gather_single(  # pyright: ignore
        self, output: Tensor, own: Tensor, opts: Any = None
    ) -> _Work:
        for part in output.view(self._size, -1):
            part.copy_(own.reshape(-1))
        return self._record("all_gather", own.shape, own.dtype)

    def all_to_all_single(  # pyright: ignore
        self, output: Tensor, own: Tensor, received: Any, sent: Any, opts: Any = None
    ) -> _Work:
        output.copy_(own)  # the splits of a simulated rank are symmetric
        return self._record("all_to_all", own.dtype, *(() if sent else (own.shape,)))

    def send(self, tensors: list[Tensor], to: int, tag: int) -> _Work:  # pyright: ignore
        to = dist.get_process_group_ranks(self)[to]
        self.program.append(Send(to, tensors[0].numel()))
        return _Work()

    def recv(self, tensors: list[Tensor], sender: int, tag: int) -> _Work:  # pyright: ignore
        tensors[0].fill_(1)  # stages of a pipeline also send votes
        sender = dist.get_process_group_ranks(self)[sender]
        index = self.received[sender]
        self.received[sender] += 1
        end = Receive(sender, index, tensors[0].numel())
        return _Work(lambda: self.program.append(end))


dist.Backend.register_backend(
    "recorder",
    lambda store, rank, size, timeout: _Recorder(rank, size),  # pyright: ignore
    devices=["cpu"],
)


def simulate(size: int, run: Callable[[Ranks], None]) -> list[Program]:
    """Call `run` as each rank; return the communication of each."""
    programs: list[Program] = []
    texts: dict[tuple[tuple[int, ...], int], str] = {}
    calls: Counter[tuple[int, ...]] = Counter()
    own = Ranks.share

    def share(self: Ranks, text: str, source: int = 0) -> str:
        """Return what the source has shared, if it has been simulated: the last rank is the
        first, because the last stage of a pipeline has the losses."""
        own(self, text, source)
        members = tuple(dist.get_process_group_ranks(self.group))
        calls[members] += 1
        key = members, calls[members]
        if self.rank == source:
            texts[key] = text
        return texts.get(key, text)

    for rank in reversed(range(size)):
        _Recorder.program, _Recorder.received = [], Counter()
        calls.clear()
        dist.init_process_group("recorder", store=FakeStore(), rank=rank, world_size=size)
        try:
            with mock.patch.object(Ranks, "share", share):
                run(Ranks(rank, size, dist.group.WORLD))
        finally:
            dist.destroy_process_group()
        programs.insert(0, _Recorder.program)
    return programs


def find_deadlock(programs: Sequence[Program]) -> str | None:
    """Run the programs of all ranks; return who waits for what if they cannot all end."""
    position = [0] * len(programs)
    sent: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    arrived: defaultdict[tuple[int, ...], dict[int, Collective]] = defaultdict(dict)
    waiting: dict[tuple[int, int], int] = {}
    ready = list(range(len(programs)))
    while ready:
        rank = ready.pop()
        while position[rank] < len(programs[rank]):
            step = programs[rank][position[rank]]
            if isinstance(step, Send):
                sent[rank, step.to].append(step.size)
                if waiting.pop((rank, step.to), None) is not None:
                    ready.append(step.to)
            elif isinstance(step, Receive):
                messages = sent[step.sender, rank]
                if step.index >= len(messages):
                    waiting[step.sender, rank] = rank
                    break
                if messages[step.index] != step.size:
                    return f"rank {rank}: {step}, but {messages[step.index]} were sent"
            else:
                members = arrived[step.ranks]
                members[rank] = step
                if len(members) < len(step.ranks):
                    break
                if len(set(members.values())) > 1:
                    return f"the ranks {step.ranks} are in different collectives: {members}"
                del arrived[step.ranks]
                for other in step.ranks:
                    position[other] += other != rank
                ready += [other for other in step.ranks if other != rank]
            position[rank] += 1
    left = {r: p[position[r]] for r, p in enumerate(programs) if position[r] < len(p)}
    return f"{len(left)} ranks wait: {dict(list(left.items())[:4])}" if left else None
