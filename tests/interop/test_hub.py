"""`ingot pull` against a hub on loopback, with real HTTP and injected faults."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from ingot.core import lineage, paths
from tests import fork, models
from tools import hub

REPO = "ingot-tests/tiny-llama"


@pytest.fixture
def repository(tmp_path: Path) -> hub.Repository:
    source = models.small(tmp_path / "source")
    (source / "modeling_tiny.py").write_text("raise SystemExit('code of a model ran')")
    (source / "pytorch_model.bin").write_bytes(b"a pickle")
    (source / "1_Pooling").mkdir()
    (source / "1_Pooling/config.json").write_text("{}")
    (source / "training").mkdir()
    (source / "training/model.safetensors").write_bytes(b"not part of the model")
    return hub.Repository(source)


@pytest.fixture
def endpoint(repository: hub.Repository) -> Generator[str]:
    with hub.serving({REPO: repository}) as endpoint:
        yield endpoint


class Client:
    """`ingot` in a process of its own, with its own data directory."""

    def __init__(self, tmp_path: Path, endpoint: str) -> None:
        self.data = tmp_path / "data"
        self.environment = {
            **os.environ,
            "HF_ENDPOINT": endpoint,
            "XDG_DATA_HOME": str(self.data),
            "HF_HOME": str(tmp_path / "hf"),
        }

    @property
    def model(self) -> Path:
        return self.data / "ingot/models" / REPO

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return fork.run(["-m", "ingot", *arguments], env=self.environment)


def wait_until(condition: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def client(tmp_path: Path, endpoint: str) -> Client:
    return Client(tmp_path, endpoint)


def test_pull_downloads_weights_configuration_and_tokenizer_only(
    client: Client, repository: hub.Repository
) -> None:
    result = client.run("pull", REPO)
    assert result.returncode == 0, result.stderr
    source, model = repository.directory, client.model
    names = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    names |= {"1_Pooling/config.json"}
    found = {str(path.relative_to(model)) for path in model.rglob("*") if path.is_file()}
    assert found - {"generation_config.json"} == names | {lineage.NAME}
    for name in names:
        assert (model / name).read_bytes() == (source / name).read_bytes()
    step = lineage.read(model).steps[-1]
    assert (step["step"], step["source"], step["commit"]) == ("pull", REPO, repository.commit)


def test_a_pulled_model_is_used_by_name_and_not_downloaded_again(
    client: Client, repository: hub.Repository
) -> None:
    first = client.run("generate", REPO, "ab", "--max-tokens", "3")
    assert first.returncode == 0, first.stderr
    downloads = len(repository.requests)
    assert downloads > 0
    client.environment["HF_ENDPOINT"] = "http://127.0.0.1:9"  # no hub is needed any more
    second = client.run("generate", REPO, "ab", "--max-tokens", "3")
    assert (second.returncode, second.stdout) == (0, first.stdout)
    assert len(repository.requests) == downloads


def test_pull_again_downloads_nothing(client: Client, repository: hub.Repository) -> None:
    client.run("pull", REPO)
    downloads = len(repository.requests)
    assert client.run("pull", REPO).returncode == 0
    assert len(repository.requests) == downloads


def test_pull_replaces_an_older_revision(client: Client, repository: hub.Repository) -> None:
    client.run("pull", REPO)
    (repository.directory / "generation_config.json").write_text('{"eos_token_id": 7}')
    del repository.listing  # the next request lists again
    assert client.run("pull", REPO).returncode == 0
    assert "7" in (client.model / "generation_config.json").read_text()
    assert [path.name for path in client.model.parent.iterdir() if path.name.endswith(".old")] == []


def test_an_interrupted_download_resumes_at_its_byte(
    client: Client, repository: hub.Repository
) -> None:
    repository.stall["model.safetensors"] = 1000
    # A file is written in chunks of 10 MiB, more than the whole model has.
    code = "import sys, huggingface_hub.constants as c; c.DOWNLOAD_CHUNK_SIZE = 500\n"
    code += "from ingot.cli import main; main(sys.argv[1:])"
    process = subprocess.Popen([sys.executable, "-c", code, "pull", REPO], env=client.environment)
    partial = f".{client.model.name}.{repository.commit[:12]}.partial"
    incomplete = client.model.parent / partial / "model.safetensors.incomplete"
    wait_until(
        lambda: (incomplete.exists() and incomplete.stat().st_size == 1000) or process.poll()
    )
    process.kill()
    process.wait()
    assert not client.model.exists()
    repository.stall.clear()
    repository.requests.clear()
    result = client.run("pull", REPO)
    assert result.returncode == 0, result.stderr
    assert repository.requests == [("model.safetensors", "bytes=1000-")]
    expected = (repository.directory / "model.safetensors").read_bytes()
    assert (client.model / "model.safetensors").read_bytes() == expected


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_bytes_that_do_not_match_the_listed_hash_are_refused(
    client: Client, repository: hub.Repository, name: str
) -> None:
    repository.corrupt.add(name)
    result = client.run("pull", REPO)
    assert result.returncode == 2
    assert f"{name} does not have the hash" in " ".join(result.stderr.split())
    assert not client.model.exists()
    repository.corrupt.clear()
    assert client.run("pull", REPO).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("pull", "no-such/model"), "model not found on the hub: no-such/model"),
        (("pull", REPO, "--revision", "v9"), "has no revision v9"),
        (("pull", "../../etc"), "invalid repository name"),
        (("generate", "missing-directory", "x"), "model directory not found: missing-directory"),
    ],
)
def test_a_mistake_gets_a_message_with_a_hint(
    client: Client, arguments: tuple[str, ...], message: str
) -> None:
    result = client.run(*arguments)
    assert result.returncode == 2
    assert message in " ".join(result.stderr.split())
    assert "hint:" in result.stderr


def test_a_repository_without_safetensors_is_refused(
    client: Client, repository: hub.Repository
) -> None:
    (repository.directory / "model.safetensors").unlink()
    result = client.run("pull", REPO)
    assert result.returncode == 2
    assert "no config.json with safetensors" in " ".join(result.stderr.split())


def test_an_unreachable_hub_is_an_error_with_a_hint(client: Client) -> None:
    client.environment["HF_ENDPOINT"] = "http://127.0.0.1:9"
    result = client.run("pull", REPO)
    assert result.returncode == 2
    assert "HF_ENDPOINT" in result.stderr


def test_models_are_kept_in_the_data_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert paths.models("org", "name") == Path("/data/ingot/models/org/name")
