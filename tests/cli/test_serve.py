"""`ingot serve` at a terminal, in a log, and where it cannot start."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from rich.console import Console

from ingot.cli.serve import deployment_table, describe_cache, example, format_fleet, format_stats
from ingot.interop import classifier
from ingot.nn import CNN, CNNConfig
from ingot.serving.engine.output import EngineStats
from ingot.serving.fleet.deployment import Deployment, DeploymentSpec
from ingot.serving.fleet.pool import DeploymentPool
from ingot.serving.server.config import ServerConfig
from ingot.serving.workers.wire import EngineReady
from ingot.workflows.serve import build_server
from tests.cli.conftest import COMMAND, Run


def read_until(terminal: int, pattern: str, seconds: float = 60.0) -> str:
    text, start = "", time.monotonic()
    while not re.search(pattern, text):
        assert time.monotonic() - start < seconds, text
        if select.select([terminal], [], [], 0.1)[0]:
            text += os.read(terminal, 65536).decode("utf-8", "replace")
            text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    return text


def test_a_terminal_shows_what_to_try_and_how_it_goes(
    tiny: Path, environment: dict[str, str]
) -> None:
    ours, theirs = pty.openpty()
    variables = {**environment, "TERM": "xterm", "COLUMNS": "150"}
    process = subprocess.Popen(
        [COMMAND, "serve", str(tiny), "--port", "0"], stderr=theirs, env=variables
    )
    try:
        shown = read_until(ours, r"metrics at http\S+/metrics")
        assert "loading" in shown
        found = re.search(r"curl (http://127.0.0.1:\d+)/v1/chat/completions .* -d '(.*)'", shown)
        assert found, shown
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(
            f"{found[1]}/v1/chat/completions", found[2].encode(), headers
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            assert json.load(response)["choices"]
        read_until(ours, r"running \d+, waiting 0, [\d,]+ tokens/s, KV \d+%, prefix hits \d+%")
        process.send_signal(signal.SIGINT)
        read_until(ours, "server stopped")
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(theirs)


def test_a_port_in_use_has_a_hint(tiny: Path, ready: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        found = ready("serve", str(tiny), "--port", port)
        assert found.returncode == 2
        assert f"port {port} of 127.0.0.1 is in use" in found.stderr.replace("\n", " ")
        assert "choose another --port" in found.stderr.replace("\n", " ")
        found = ready("serve", str(tiny), "--port", "0", "--admin-address", f"127.0.0.1:{port}")
        assert found.returncode == 2
        assert "--admin-address" in found.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--admin-address", "9000"], "--admin-address"),
        (["--max-requests", "0"], "requests"),
        (["--kv-cache-gib", "nan"], "--kv-cache-gib"),
        (["--api-key-file", "none"], "ingot keys create"),
    ],
)
def test_wrong_options_have_a_hint(
    tiny: Path, ready: Run, options: list[str], message: str
) -> None:
    found = ready("serve", str(tiny), "--port", "0", *options)
    assert found.returncode == 2
    assert message in found.stderr
    assert "hint" in found.stderr


def test_other_files_are_rejected_before_anything_is_loaded(tmp_path: Path, ready: Run) -> None:
    start = time.monotonic()
    found = ready("serve", str(tmp_path / "none"), "--port", "0")
    assert found.returncode == 2
    assert "directory not found" in found.stderr
    assert time.monotonic() - start < 20


def test_without_the_extra_it_says_what_to_install(tiny: Path) -> None:
    code = (
        "import sys; sys.modules['uvicorn'] = None\n"
        f"from ingot.cli import main; main({['serve', str(tiny)]})"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 2
    assert "ingot[serve]" in found.stderr


def test_the_line() -> None:
    stats = EngineStats(
        **{**dict.fromkeys(EngineStats.__struct_fields__, 0), "num_running": 3, "num_blocks": 10}
    )
    assert format_stats(stats, 1234.5, 3).startswith("running 3, waiting 0, 1,234 tokens/s, KV 0%")
    assert format_stats(stats, 0.0, 0).startswith("running 0"), "the last step is not now"


def test_what_a_classifier_greets_with(tmp_path: Path) -> None:
    (tmp_path / "digits").mkdir()
    model = CNN.from_config(CNNConfig(widths=(4,), num_classes=3), seed=0)
    classifier.save(model, tmp_path / "digits", (1, 2, 2))
    server = build_server(tmp_path / "digits", port=0, admin_port=0)
    sizes = dict.fromkeys(("vocab_size", "max_model_len", "block_size", "num_blocks"), 0)
    (deployment,) = server.gateway.deployments
    (client,) = deployment.engine.engines
    client.info = EngineReady(
        model="digits",
        kv_cache_dtype="",
        kv_cache_bytes=0,
        signature=classifier.describe(tmp_path / "digits").signature,
        max_batch_size=64,
        **sizes,
    )
    assert describe_cache(client.info) == "batches of up to 64 rows"
    assert f"POST {server.address}/v2/models/digits/infer" in example(server, deployment)
    server._main.close()
    server._admin.close()


def test_several_models_are_shown_with_their_memory_and_state(tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(3 << 30)
    specs = [
        DeploymentSpec(
            name=name,
            directory=tmp_path,
            config=ServerConfig(kv_cache_bytes=1 << 30, adapters={f"{name}-lora": tmp_path / "x"}),
            pinned=name == "one",
        )
        for name in ("one", "two")
    ]
    deployments = [Deployment(spec) for spec in specs]
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(deployment_table(DeploymentPool(deployments, 16 << 30)))
    shown = console.export_text()
    assert "of 16.00 GiB" in shown
    assert re.search(r"one .* one-lora +at the start, pinned +4.39 GiB", shown)
    assert re.search(r"two .* two-lora +on demand +4.39 GiB", shown)
    assert format_fleet(deployments, 7.0) == "one: unloaded, two: unloaded, 7 tokens/s"
