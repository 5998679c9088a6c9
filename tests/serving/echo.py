"""`ingot` with an engine that repeats its prompts: its process starts in a fraction of a second.

    python -m tests.serving.echo serve fleet.toml ...

HTTP process, worker process and the messages between them are the real ones; only the model is not
computed. The engine takes as much memory as its weights' files and its KV cache.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from ingot.core.errors import ConfigError
from ingot.serving.engine.adapters import LoadedAdapter
from ingot.serving.engine.output import EngineStats, Output
from ingot.serving.engine.request import FinishReason, Request
from ingot.serving.workers import fork_server, wire, worker

BLOCK, BLOCKS = 32, 1000


class EchoEngine:
    """Generates the tokens of the prompt again and again, one in each step of a millisecond."""

    def __init__(self, settings: worker.WorkerSettings, size: int) -> None:
        self.memory = bytearray(size)
        self.memory[::4096] = bytes([1]) * len(self.memory[::4096])
        self.adapters = {
            name: LoadedAdapter(name, "", 4, slot, path)
            for slot, (name, path) in enumerate(settings.adapters.items())
        }
        self.requests: dict[int, tuple[Request, int]] = {}

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    @property
    def loaded_adapters(self) -> list[LoadedAdapter]:
        return list(self.adapters.values())

    def add_request(self, request: Request) -> None:
        self.requests[request.id] = (request, len(request.generated))

    def abort(self, id: int, reason: FinishReason) -> None:
        self.requests.pop(id, None)

    def load_adapter(self, name: str, directory: str, *, replace: bool = False) -> None:
        self.adapters[name] = LoadedAdapter(name, "", 4, len(self.adapters), directory)

    def unload_adapter(self, name: str) -> None:
        del self.adapters[name]

    def step(self) -> list[Output]:
        time.sleep(0.001)
        outputs: list[Output] = []
        for id, (request, count) in list(self.requests.items()):
            token = request.prompt[count % len(request.prompt)]
            is_last = count + 1 == request.max_tokens
            reason = FinishReason.LENGTH if is_last else None
            cached = None if count else 0
            outputs.append(Output(id, (token,), num_cached_tokens=cached, finish_reason=reason))
            if is_last:
                del self.requests[id]
            else:
                self.requests[id] = (request, count + 1)
        return outputs

    def stats(self) -> EngineStats:
        """A request takes an eighth of the KV cache."""
        stats = dict.fromkeys(EngineStats.__struct_fields__, 0)
        used = min(BLOCKS, len(self.requests) * BLOCKS // 8)
        return EngineStats(**stats | {"num_blocks": BLOCKS, "num_used_blocks": used})


def load(
    settings: worker.WorkerSettings, connection: socket.socket, clock: Callable[[], float]
) -> worker.Worker:
    """Return a worker with an echo of the directory's model."""
    directory = Path(settings.directory)
    config = json.loads((directory / "config.json").read_bytes())
    if config["model_type"] != "llama":
        raise ConfigError(f"unknown model_type {config['model_type']!r}", hint="use another model")
    weights = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    kv_cache = settings.kv_cache_bytes or 1 << 20
    engine = EchoEngine(settings, weights + kv_cache)
    ready = wire.EngineReady(
        model=directory.name,
        vocab_size=256,
        max_model_len=config["max_position_embeddings"],
        block_size=BLOCK,
        num_blocks=BLOCKS,
        kv_cache_dtype="int8",
        kv_cache_bytes=kv_cache,
        adapters=engine.loaded_adapters,
        max_loras=4,
        max_lora_rank=16,
    )
    connection.sendall(wire.frame(ready))
    return worker.Worker(engine, connection, ready.model)  # pyright: ignore[reportArgumentType]


def main() -> None:
    """Run the command line; with a file's number for its first argument, the fork server."""
    if sys.argv[1].isdigit():
        worker.load = load
        fork_server.main(imports=())
    else:
        from ingot.cli import main as run

        fork_server.ForkServer.command = (sys.executable, "-m", "tests.serving.echo")
        run()


if __name__ == "__main__":
    main()
