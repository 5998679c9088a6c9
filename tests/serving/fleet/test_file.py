"""The file of several models: what it may contain, and what is refused with which hint."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from ingot.core.errors import ConfigError, IngotError
from ingot.interop.hub import model_path
from ingot.serving.fleet.deployment import PROCESS_BYTES, Deployment, DeploymentSpec
from ingot.serving.fleet.file import DEFAULT_KV_CACHE_BYTES, load_fleet
from ingot.serving.fleet.pool import DeploymentPool
from ingot.serving.fleet.release import CanaryConfig
from ingot.serving.server.config import ServerConfig

GOOD = """
memory_gib = 8
[deployments.one]
model = "model"
pinned = true
adapters = { pirate = "runs/pirate" }
max_requests = 64
kv_cache_gib = 0.5
timeout = 60
[deployments.two]
model = "model"
memory_gib = 0.75
speculate = "ngram"
"""


def load(
    folder: Path, text: str, server: ServerConfig | None = None
) -> tuple[int, list[DeploymentSpec]]:
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "model.safetensors").write_bytes(bytes(1000))
    (folder / "fleet.toml").write_text(text)
    target = load_fleet(folder / "fleet.toml", server or ServerConfig(), model_path)
    return target.memory_bytes, [one.spec for one in target.deployments]


def test_a_deployment_overrides_the_command_line(tmp_path: Path) -> None:
    budget, (one, two) = load(tmp_path, GOOD, ServerConfig(timeout=30.0, max_requests=8, port=1))
    assert budget == 8 << 30
    assert (one.name, one.directory, one.pinned) == ("one", tmp_path / "model", True)
    assert (one.config.timeout, one.config.max_requests) == (60, 64)
    assert one.config.kv_cache_bytes == 1 << 29
    assert one.config.adapters == {"pirate": tmp_path / "runs/pirate"}
    assert (two.config.timeout, two.config.max_requests, two.pinned) == (30.0, 8, False)
    assert (two.config.speculate, two.config.adapters, two.config.port) == ("ngram", {}, 1)


def test_the_memory_of_a_deployment_is_estimated_or_given(tmp_path: Path) -> None:
    _, specs = load(
        tmp_path,
        GOOD.replace("[deployments.two]", "[deployments.none]\nmodel='model'\n[deployments.two]"),
    )
    one, none, two = (Deployment(spec).footprint for spec in specs)
    assert one.total == 1000 + PROCESS_BYTES + (1 << 29)
    assert none.total == 1000 + PROCESS_BYTES + DEFAULT_KV_CACHE_BYTES
    assert (two.total, two.weights_bytes) == (3 << 28, 1000)
    assert one.weights == two.weights


CANARY = GOOD.replace("[deployments.two]", "[deployments.one.canary]\nTABLE\n[deployments.two]")


def test_a_canary_is_its_deployment_with_changes(tmp_path: Path) -> None:
    shutil.copytree(Path(__file__).parent, tmp_path / "tuned")
    load(tmp_path, GOOD)
    table = "model = 'tuned'\nkv_cache_dtype = 'int8'\nshare = 0.3\nmax_drift = inf"
    (tmp_path / "fleet.toml").write_text(CANARY.replace("TABLE", table))
    one, two = load_fleet(tmp_path / "fleet.toml", ServerConfig(), model_path).deployments
    assert one.canary is not None
    assert one.canary.directory == tmp_path / "tuned"
    assert one.canary.config == replace(one.spec.config, kv_cache_dtype="int8")
    assert one.canary.version.startswith("tuned@")
    assert one.config == CanaryConfig(share=0.3, max_drift=math.inf)
    assert two.canary is None


def test_a_single_deployment_is_pinned(tmp_path: Path) -> None:
    _, (spec,) = load(tmp_path, "[deployments.a]\nmodel = 'model'")
    assert spec.pinned


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("memory_gib = 8", "missing deployments"),
        ("[deployments]", "expected 1 to 256 deployments"),
        ("deployments = 3", "deployments"),
        ("[deployments.a]", "missing deployments.a.model"),
        ("[deployments.a]\nmodel = 'model'\nmax_request = 3", "did you mean 'max_requests'"),
        ("[deployments.a]\nmodel = 'model'\nport = 3", "unknown key at deployments.a.port"),
        ("memory = 8\n[deployments.a]\nmodel = 'model'", "did you mean 'memory_gib'"),
        ("memory_gib = -1\n[deployments.a]\nmodel = 'model'", "expected 0 to 65536, got -1"),
        ("memory_gib = nan\n[deployments.a]\nmodel = 'model'", "expected 0 to 65536, got nan"),
        ("[deployments.a]\nmodel = 'model'\nkv_cache_gib = 0", "expected 0 to 65536, got 0"),
        ("[deployments.a]\nmodel = 'model'\nmax_requests = 0", "deployments.a: .*max_requests"),
        ("[deployments.a]\nmodel = 'model'\ntimeout = inf", "deployments.a: .*timeout"),
        ("[deployments.a]\nmodel = 'model'\npinned = 'yes'", "deployments.a.pinned"),
        ("[deployments.a]\nmodel = 'model'\nspeculate = 'x'", "deployments.a.speculate"),
        ("[deployments.'a b']\nmodel = 'model'", "invalid name of a deployment: 'a b'"),
        ("[deployments.a]\nmodel = 'missing'", "model directory not found: missing"),
        ("[deployments.a]\nmodel = 'model'\nadapters = { a = 'x' }", "'a' of deployment 'a'"),
        (
            "[deployments.a]\nmodel = 'model'\nadapters = { x = 'x' }\n"
            "[deployments.b]\nmodel = 'model'\nadapters = { x = 'x' }",
            "'x' of deployment 'b' is also a name of 'a'",
        ),
        ("not toml", "is not TOML"),
        (CANARY.replace("TABLE", "share = 0.3"), "deployments.one.canary: the same version"),
        (CANARY.replace("TABLE", "model = 'missing'"), "model directory not found: missing"),
        (CANARY.replace("TABLE", "share = 0"), "share: expected a number from 0.001 to 0.9"),
        (CANARY.replace("TABLE", "max_drift = nan"), "max_drift: expected a number"),
        (CANARY.replace("TABLE", "shar = 0.3"), "did you mean 'share'"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(IngotError, match=message) as error:
        load(tmp_path, text)
    assert error.value.hint


def test_a_budget_that_is_too_small_is_an_error_at_the_start(tmp_path: Path) -> None:
    budget, specs = load(tmp_path, GOOD.replace("memory_gib = 8", "memory_gib = 1.2"))
    with pytest.raises(ConfigError, match="'one' and 'two' together need"):
        DeploymentPool([Deployment(spec) for spec in specs], budget)


def test_adapters_of_the_command_line_have_no_base_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--adapter") as error:
        load(tmp_path, GOOD, ServerConfig(adapters={"a": "b"}))
    assert "add it to a deployment" in error.value.hint
