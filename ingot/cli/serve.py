"""`ingot serve`: serve a model over OpenAI's API.

Long because `serve` documents each option of the command in its docstring.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from ingot.cli import escape_markup
from ingot.cli.tables import new_table
from ingot.core.errors import ConfigError
from ingot.core.log import logger, setup, stderr

if TYPE_CHECKING:
    from rich.table import Table

    from ingot.serving.engine.output import EngineStats
    from ingot.serving.fleet.autoscaler import AutoscalerConfig
    from ingot.serving.fleet.deployment import Deployment
    from ingot.serving.fleet.pool import DeploymentPool
    from ingot.serving.server.server import Server
    from ingot.serving.workers.wire import EngineReady

_log = logger("ingot.serving")


def serve(
    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")],
    host: str = "127.0.0.1",
    port: int = 8000,
    device: str = "auto",
    tp: int = 1,
    replicas: int = 1,
    max_replicas: int | None = None,
    ray: bool = False,
    admin_address: str | None = None,
    api_key_file: Path | None = None,
    kv_cache_gib: float | None = None,
    kv_cache_dtype: Literal["auto", "int8"] = "auto",
    max_requests: int = 256,
    timeout: float = 600.0,
    stall_timeout: float = 60.0,
    drain_timeout: float = 30.0,
    speculate: Literal["ngram", "int4"] | None = None,
    adapter: tyro.conf.UseAppendAction[tuple[str, ...]] = (),
    max_loras: int | None = None,
    max_lora_rank: int | None = None,
    max_batch_size: int = 64,
    max_queue_delay_ms: float = 5.0,
    log_format: Literal["text", "json"] = "text",
) -> None:
    """Serve a model to any OpenAI client: chat and completions, streamed or not; embeddings.

    Classifiers of `ingot train`, and embedding models, are also served over the Open Inference
    Protocol (KServe v2): /v2/models/NAME/infer, with dynamic batching.

    Ctrl-C or SIGTERM finishes running requests, then stops; a second one stops at once.

    Examples: `ingot serve smollm2`, `ingot serve smollm2 --host 0.0.0.0 --api-key-file keys.txt`
    (`ingot keys create NAME >> keys.txt` creates a key),
    `ingot serve smollm2 --log-format json`,
    `ingot serve smollm2 --adapter pirate=runs/pirate` (requests select it as their `model`),
    `ingot serve fleet.toml` (several models, loaded on demand).

    Args:
        model: A model directory, ORG/NAME on the Hugging Face hub, or a TOML file of several
            models, whose deployments may override options of the engine.
        host: Address to listen at; 0.0.0.0 accepts other machines.
        port: Port; 0 for any free one.
        device: Device of the engine: auto, cpu, cuda, cuda:1...
        tp: Tensor parallelism: number of processes that the layers are divided among, with the bits
            of a single one; for models that do not fit on one device.
        replicas: Number of engine processes. They share the cores; if one dies, its requests
            continue on another.
        max_replicas: Start replicas, up to this number, while requests wait or the KV caches are
            full, and drain them again, down to --replicas, after ten minutes of low load.
        ray: Run the replicas on the nodes of a Ray cluster: that of RAY_ADDRESS, one that runs on
            this machine, or a new one.
        admin_address: HOST:PORT of /metrics, /drain and loading of adapters; default: loopback,
            --port + 1000.
        api_key_file: File of tenants and hashed API keys; default: no authentication.
        kv_cache_gib: KV-cache size of a replica in GiB; default: 4, and at most a quarter of the
            machine's memory for all.
        kv_cache_dtype: Dtype of cached keys and values: auto, that of the model, or int8 for nearly
            twice as many tokens in the same memory (CPU only).
        max_requests: Maximum concurrent requests; further ones get 429 with Retry-After.
        timeout: Seconds after which a request is aborted.
        stall_timeout: Seconds without a completed step after which the engine is restarted. A step
            may have 2,048 tokens: raise it for a large model on a slow machine.
        drain_timeout: Seconds that running requests have to finish at shutdown.
        speculate: Speculative decoding: ngram (prompt lookup, for quotes, edits and code), or int4
            (a 4-bit copy of the model drafts). Faster while few requests run, with the same output.
        adapter: NAME=DIRECTORY of a LoRA adapter as PEFT saves it; may be repeated.
        max_loras: Maximum number of loaded adapters; default: as many as --adapter.
        max_lora_rank: Maximum rank of an adapter; default: the largest of --adapter, at least 16.
        max_batch_size: Maximum number of rows of a batch, and of a request, of a classifier.
        max_queue_delay_ms: Milliseconds that a request to a classifier may wait for others.
        log_format: Log format.
    """
    from ingot.serving.engine.adapters import parse_adapters
    from ingot.workflows import serve as workflow

    if kv_cache_gib is not None and not 0 < kv_cache_gib <= 1 << 16:
        raise ConfigError(
            f"--kv-cache-gib: expected 0 to 65536, got {kv_cache_gib}", hint="give a size in GiB"
        )
    setup(json=log_format == "json")
    admin_host, admin_port = _admin_address(admin_address, port)
    server = workflow.build_server(
        model,
        api_key_file=api_key_file,
        host=host,
        port=port,
        device=device,
        tp=tp,
        replicas=replicas,
        autoscale=_autoscaler(replicas, max_replicas),
        ray=ray,
        admin_host=admin_host,
        admin_port=admin_port,
        max_requests=max_requests,
        timeout=timeout,
        stall_timeout=stall_timeout,
        drain_timeout=drain_timeout,
        kv_cache_bytes=None if kv_cache_gib is None else int(kv_cache_gib * 2**30),
        kv_cache_dtype=kv_cache_dtype,
        speculate=speculate,
        adapters=parse_adapters(adapter),
        max_loras=max_loras,
        max_lora_rank=max_lora_rank,
        max_batch_size=max_batch_size,
        max_queue_delay=max_queue_delay_ms / 1000,
        json_logs=log_format == "json",
    )
    workflow.run(_serve(server, started=time.monotonic()))


def _autoscaler(replicas: int, max_replicas: int | None) -> AutoscalerConfig | None:
    from ingot.serving.fleet.autoscaler import AutoscalerConfig

    if max_replicas is None:
        return None
    if max_replicas < replicas:
        raise ConfigError(
            f"--max-replicas is {max_replicas}, --replicas is {replicas}",
            hint="give --max-replicas at least --replicas",
        )
    return AutoscalerConfig(min_replicas=replicas, max_replicas=max_replicas)


def _admin_address(text: str | None, port: int) -> tuple[str, int]:
    """Return host and port of the admin listener.

    >>> _admin_address(None, 8000), _admin_address("0.0.0.0:9090", 8000), _admin_address(None, 0)
    (('127.0.0.1', 9000), ('0.0.0.0', 9090), ('127.0.0.1', 0))
    """
    if text is None:
        return "127.0.0.1", port + 1000 if 0 < port <= 64535 else 0
    host, _, number = text.rpartition(":")
    if not host or not number.isdecimal():
        raise ConfigError(
            f"--admin-address: expected HOST:PORT, got '{text}'", hint="for example 127.0.0.1:9000"
        )
    return host.strip("[]"), int(number)


async def _serve(server: Server, started: float) -> None:
    live = sys.stderr.isatty() and not server.config.json_logs
    view = _StatusLine(server) if live else nullcontext()
    greeted, several = False, len(server.gateway.deployments) > 1

    def greet(deployment: Deployment) -> None:
        nonlocal greeted
        _log.info(
            "serving %s%s at %s, admin API at %s, %s, after %.1f s",
            deployment.version if greeted and not several else deployment.name,
            _describe_replicas(deployment),
            server.address,
            server.admin_address,
            describe_cache(deployment.engine.info),
            time.monotonic() - (deployment.started_at if several or greeted else started),
        )
        if live and not greeted:
            stderr().print(example(server, deployment), highlight=False, soft_wrap=True)
        greeted = True

    server.on_ready = greet
    if live:  # the status line replaces a log line per request
        logger("ingot.serving.access").setLevel("WARNING")
    addresses = {"address": server.address, "admin_address": server.admin_address}
    _log.info("listening at %s; loading", server.address, extra={"fields": addresses})
    if several and live:
        stderr().print(deployment_table(server.gateway.pool))
    if server.is_public and server.gateway.keys is None:
        _log.warning(
            "%s accepts requests from other machines without a key; see --api-key-file",
            server.address,
        )
    with view:
        showing = asyncio.create_task(view.run()) if isinstance(view, _StatusLine) else None
        try:
            await server.run()
        finally:
            if showing is not None:
                showing.cancel()
    _log.info("server stopped")


def deployment_table(pool: DeploymentPool) -> Table:
    """Return the deployments of a server and their memory."""
    budget = f"memory, of {pool.budget / 2**30:.2f} GiB"
    table = new_table(("model", "directory", "adapters", "loaded"), (budget,))
    for one in pool.deployments.values():
        loaded = "at the start, pinned" if one.spec.pinned else "on demand"
        memory = f"{one.footprint.total / 2**30:.2f} GiB"
        cells = (one.name, str(one.spec.directory), ", ".join(one.adapters), loaded, memory)
        table.add_row(*map(escape_markup, cells))
    return table


def _describe_replicas(deployment: Deployment) -> str:
    engine = deployment.engine
    count = engine.num_replicas
    return f" on {engine.num_ready} of {count} replicas" if count > 1 else ""


def describe_cache(info: EngineReady | None) -> str:
    """Return the size of the KV cache, or of the embeddings of a model without one.

    >>> describe_cache(None)
    'KV cache not allocated'
    """
    if info is None:
        return "KV cache not allocated"
    if info.embedding_dim is not None:
        return f"embeddings of {info.embedding_dim} elements"
    if info.signature is not None:
        return f"batches of up to {info.max_batch_size} rows"
    tokens, size = info.num_blocks * info.block_size, info.kv_cache_bytes / 2**30
    return f"KV cache of {tokens:,} tokens in {info.kv_cache_dtype} ({size:.2f} GiB)"


def example(server: Server, deployment: Deployment) -> str:
    """Return example requests for the terminal."""
    keys, info, service = server.gateway.keys, deployment.engine.info, deployment.service
    key = " -H 'Authorization: Bearer KEY'" if keys else ""
    if info is not None and info.signature is not None:
        url = f"{server.address}/v2/models/{deployment.name}"
        return (
            f"\n  [bold]curl[/] {url}{key}    (inputs and outputs)\n  POST {url}/infer\n"
            f"  [dim]Ctrl-C stops; metrics at {server.admin_address}/metrics[/]\n"
        )
    if info is not None and info.embedding_dim is not None:
        path, body = "embeddings", '"input": ["Hello", "Once upon a time"]'
    elif service is not None and service.tokenizer.chat_template is not None:
        path, body = "chat/completions", '"messages": [{"role": "user", "content": "Hello"}]'
    else:
        path, body = "completions", '"prompt": "Once upon a time", "max_tokens": 40'
    if len(server.gateway.deployments) > 1:
        body = f'"model": "{deployment.name}", {body}'
    given = "KEY" if keys else "none"
    return (
        f"\n  [bold]curl[/] {server.address}/v1/{path}{key} -H 'Content-Type: application/json' "
        f"-d '{{{escape_markup(body)}}}'\n"
        f'  [bold]openai[/].OpenAI(base_url="{server.address}/v1", api_key="{given}")\n'
        f"  [bold]browser[/] {server.address}\n"
        f"  [dim]Ctrl-C stops; metrics at {server.admin_address}/metrics[/]\n"
    )


class _StatusLine:
    """A status line at the bottom of the terminal."""

    def __init__(self, server: Server) -> None:
        from rich.live import Live

        self._server = server
        self._live = Live(console=stderr(), auto_refresh=False, transient=True)

    def __enter__(self) -> _StatusLine:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    async def run(self) -> None:
        """Update the line twice a second."""
        before, then = 0, time.monotonic()
        gateway = self._server.gateway
        while True:
            engines, now = [one.engine for one in gateway.deployments], time.monotonic()
            tokens = sum(engine.stats.generated_tokens for engine in engines if engine.stats)
            rate = max(0, tokens - before) / max(now - then, 1e-3)
            before, then = tokens, now
            if gateway.draining:
                text = f"finishing {gateway.num_requests} requests"
            elif len(engines) > 1:
                text = format_fleet(gateway.deployments, rate)
            elif not engines[0].ready:
                text = engines[0].status
            else:
                text = format_stats(engines[0].stats, rate, engines[0].num_outstanding)
            self._live.update(f"[dim]{escape_markup(text)}[/]", refresh=True)
            await asyncio.sleep(0.5)


def format_fleet(deployments: Sequence[Deployment], rate: float) -> str:
    """Return the state of several models in one line."""
    states = [
        f"{one.name}: {one.admission.requests} requests"
        if one.status == "ready"
        else f"{one.name}: {one.status}"
        for one in deployments
    ]
    return f"{', '.join(states)}, {rate:,.0f} tokens/s"


def format_stats(stats: EngineStats | None, rate: float, outstanding: int) -> str:
    """Return the stats in one line.

    >>> format_stats(None, 0.0, 0)
    'ready, no requests yet'
    """
    if stats is None:
        return "ready, no requests yet"
    busy = outstanding > 0
    usage = stats.num_used_blocks / stats.num_blocks if stats.num_blocks and busy else 0.0
    hits = stats.cached_tokens / stats.prompt_tokens if stats.prompt_tokens else 0.0
    return (
        f"running {stats.num_running if busy else 0}, waiting {stats.num_waiting if busy else 0}, "
        f"{rate:,.0f} tokens/s, KV {usage:.0%}, prefix hits {hits:.0%}"
    )
