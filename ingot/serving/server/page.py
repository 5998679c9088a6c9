"""The page at `/`: a chat with the served model, and the statistics that it shows.

The files in `assets` are plain HTML, CSS and ES modules, sent as they are. They are public, as they
hold no data; what the page requests needs the API key, like every other request.

The statistics are on the main listener because browsers cannot reach the admin listener, which is
on loopback by default. They are fewer than the metrics: what clients may know of the load, and
no counts of prompt tokens, from which a tenant could find the lengths of prompts of others.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.responses import Response

from ingot.serving.workers.replicas import ReplicaSet

_MEDIA_TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_ASSETS = Path(__file__).parent / "assets"
_FILES = {f"/assets/{path.name}": path for path in _ASSETS.iterdir() if path.suffix in _MEDIA_TYPES}
PATHS = frozenset({"/", *_FILES})
"""The paths of the page and its files."""
_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def add_page(app: FastAPI, list_stats: Callable[[], list[dict[str, Any]]]) -> None:
    """Add the page, its files and its statistics to an application."""
    _add_file(app, "/", _ASSETS / "index.html", "text/html")
    for path, file in _FILES.items():
        _add_file(app, path, file, _MEDIA_TYPES[file.suffix])

    @app.get("/v1/stats")
    async def stats() -> dict[str, Any]:
        return {"object": "list", "data": list_stats()}


def model_stats(model: str, engine: ReplicaSet, draining: bool) -> dict[str, Any]:
    """Return the status of a model, its load, and its generated tokens since the engine's start."""
    status = "draining" if draining else "ready" if engine.ready else engine.status
    fields: dict[str, Any] = {"model": model, "status": status}
    stats = engine.stats if engine.ready else None
    if stats is None:
        return fields
    busy = engine.num_outstanding > 0  # if not, the last step may have had more requests
    usage = stats.num_used_blocks / stats.num_blocks if stats.num_blocks and busy else 0.0
    hits = stats.cached_tokens / stats.prompt_tokens if stats.prompt_tokens else 0.0
    return {
        **fields,
        "num_requests_running": stats.num_running if busy else 0,
        "num_requests_waiting": stats.num_waiting if busy else 0,
        "kv_cache_usage": round(usage, 2),
        "prefix_cache_hit_rate": round(hits, 2),
        "generated_tokens": stats.generated_tokens,
    }


def _add_file(app: FastAPI, path: str, file: Path, media_type: str) -> None:
    content = file.read_bytes()

    @app.get(path, response_class=Response, include_in_schema=False)
    async def send() -> Response:  # pyright: ignore[reportUnusedFunction]
        return Response(content, headers=_HEADERS, media_type=media_type)
