"""Download models from the Hugging Face hub: `ORG/NAME` to a local model directory.

    path = hub.pull("HuggingFaceTB/SmolLM2-135M-Instruct")

Only weights (safetensors), configuration and tokenizer files are downloaded: never code, never
pickles. The hub lists every file with its hash; a file is used once its bytes match. A download
that was interrupted resumes at the byte where it stopped, and the model directory appears under its
name only when it is complete.

`huggingface_hub` finds, authenticates (`HF_TOKEN`) and transfers; `HF_ENDPOINT` selects a mirror.
Its `snapshot_download` is not used because it discards partial files when the process ends and
compares sizes, not hashes. Importing this module imports no torch: the HTTP process of a server
resolves its model here.
"""

# pyright: basic
from __future__ import annotations

import hashlib
import importlib.util
import io
import re
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from ingot.core import lineage, paths
from ingot.core.errors import IngotError
from ingot.core.log import Progress, progress

MAX_FILES = 2000
MAX_SMALL_FILE = 256 << 20  # everything but weights: a tokenizer of 256 MiB is malformed

_REPO = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")


@dataclass(frozen=True, kw_only=True)
class RemoteFile:
    """A file of a repository: its name, its size in bytes and the hash the hub has for it."""

    name: str
    size: int
    sha256: str | None
    git_sha1: str | None


def model_path(name: Path | str) -> Path:
    """Return the directory of a model: a path, or `ORG/NAME`, which is downloaded if missing.

    >>> model_path(".")
    PosixPath('.')
    """
    path = Path(name)
    if path.is_dir():
        return path
    if path.is_file():
        raise IngotError(
            f"{path} is a file, not a model directory",
            hint=f"convert it first: ingot import {path} DIRECTORY",
        )
    if not _REPO.fullmatch(str(name)):
        raise IngotError(
            f"model directory not found: {name}",
            hint="name a directory, or a model on the Hugging Face hub as ORG/NAME",
        )
    local = paths.models(*str(name).split("/"))
    return local if local.is_dir() else pull(str(name))


def pull(repo: str, directory: Path | None = None, *, revision: str = "main") -> Path:
    """Download a model from the hub and return its directory.

    Args:
        repo: The repository, as `ORG/NAME`.
        directory: The directory to create; `models/ORG/NAME` in ingot's data directory by default.
        revision: A branch, a tag or a commit.
    """
    if not _REPO.fullmatch(repo):
        raise IngotError(f"invalid repository name: {repo}", hint="write it as ORG/NAME")
    if importlib.util.find_spec("huggingface_hub") is None:
        raise IngotError(
            "downloading models requires huggingface_hub", hint="pip install 'ingot[hub]'"
        )
    target = directory or paths.models(*repo.split("/"))
    with _errors_explained(repo, revision):
        commit, files = list_files(repo, revision)
    if _pulled_commit(target) == (repo, commit):
        return target
    if target.exists() and directory is not None and any(target.iterdir()):
        raise IngotError(f"{target} is not empty", hint="name a new directory, or delete that one")
    partial = target.parent / f".{target.name}.{commit[:12]}.partial"
    with paths.lock(partial):
        if _pulled_commit(target) != (repo, commit):  # another process may have finished it
            _download_all(repo, commit, files, partial)
            _install(repo, commit, files, partial, target)
    return target


def list_files(repo: str, revision: str) -> tuple[str, list[RemoteFile]]:
    """Return the commit of a revision and the files of the model in it, smallest first."""
    from huggingface_hub import HfApi

    from ingot.interop.directory import CONFIG

    info = HfApi().model_info(repo, revision=revision, files_metadata=True)
    siblings = info.siblings or []
    if len(siblings) > MAX_FILES:
        raise IngotError(
            f"{repo} has {len(siblings)} files, more than {MAX_FILES}",
            hint="download it with another tool, then use `ingot import`",
        )
    files = [_remote_file(repo, s) for s in siblings if _is_wanted(s.rfilename)]
    names = {file.name for file in files}
    if CONFIG not in names or not any(_WEIGHTS.fullmatch(name) for name in names):
        raise IngotError(
            f"{repo} has no config.json with safetensors weights",
            hint="choose a repository in the transformers format; for a GGUF file, download it "
            "and use `ingot import`",
        )
    if not re.fullmatch(r"[0-9a-f]{40}", str(info.sha)):
        raise IngotError(f"{repo}: the hub returned an invalid commit", hint="check HF_ENDPOINT")
    return str(info.sha), sorted(files, key=lambda file: file.size)


def _is_wanted(name: str) -> bool:
    from ingot.interop.directory import CONFIG, OPTIONAL_FILES

    wanted = name == CONFIG or name in OPTIONAL_FILES
    return (wanted and name != lineage.NAME) or bool(_WEIGHTS.fullmatch(name))


def _remote_file(repo: str, sibling: Any) -> RemoteFile:
    sha256 = sibling.lfs.sha256 if sibling.lfs else None
    size, git_sha1 = sibling.size, None if sha256 else sibling.blob_id
    bounded = isinstance(size, int) and size >= 0
    if not bounded or not (sha256 or git_sha1):
        raise IngotError(
            f"{repo}: the hub lists {sibling.rfilename} without size or hash",
            hint="check HF_ENDPOINT: mirrors must implement the hub's API",
        )
    if size > MAX_SMALL_FILE and not _WEIGHTS.fullmatch(sibling.rfilename):
        raise IngotError(
            f"{repo}: {sibling.rfilename} has {size:,} bytes, more than {MAX_SMALL_FILE:,}",
            hint="choose another model: this file is malformed",
        )
    return RemoteFile(name=sibling.rfilename, size=size, sha256=sha256, git_sha1=git_sha1)


def _download_all(repo: str, commit: str, files: list[RemoteFile], partial: Path) -> None:
    for file in files:
        (partial / file.name).parent.mkdir(parents=True, exist_ok=True)
    present = {f.name: _present(partial / f.name) for f in files}
    missing = sum(file.size - min(present[file.name], file.size) for file in files)
    if shutil.disk_usage(partial).free < missing:
        raise IngotError(
            f"{repo} needs {missing / 1e9:.1f} GB more in {partial.parent}, which is not free",
            hint="free some space, or choose another directory",
        )
    with progress(f"downloading {repo}", sum(f.size for f in files), in_bytes=True) as bar:
        for file in files:
            _download(repo, commit, file, partial / file.name, bar)


def _present(path: Path) -> int:
    """Bytes of the file, or of the part of it that was downloaded before."""
    for candidate in (path, _incomplete(path)):
        if candidate.is_file():
            return candidate.stat().st_size
    return 0


def _incomplete(path: Path) -> Path:
    return path.with_name(f"{path.name}.incomplete")


def _download(repo: str, commit: str, file: RemoteFile, path: Path, bar: Progress) -> None:
    if path.is_file():  # it was verified before it got this name
        bar.advance(file.size)
        return
    part = _incomplete(path)
    start = part.stat().st_size if part.is_file() else 0
    if start > file.size:
        part.unlink()
        start = 0
    bar.advance(start)
    if start < file.size or not part.is_file():
        with _errors_explained(repo, commit), part.open("ab", buffering=0) as stream:
            _transfer(repo, commit, file, _BoundedFile(stream, file.size), start, bar)
    if not _matches(part, file):
        part.unlink()
        raise IngotError(
            f"{repo}: {file.name} does not have the hash that the hub lists",
            hint="run the command again; if it fails again, the mirror or the network is faulty",
        )
    part.replace(path)


class _BoundedFile:
    """A file that refuses to grow past its size, whatever the server sends."""

    def __init__(self, stream: io.FileIO, size: int) -> None:
        self._stream, self._size = stream, size
        self.seek, self.tell, self.truncate = stream.seek, stream.tell, stream.truncate

    def write(self, chunk: bytes) -> int:
        if self._stream.tell() + len(chunk) > self._size:
            raise IngotError(
                f"the server sends more than the {self._size:,} bytes that the hub lists",
                hint="check HF_ENDPOINT",
            )
        return self._stream.write(chunk)


def _transfer(
    repo: str, commit: str, file: RemoteFile, stream: Any, start: int, bar: Progress
) -> None:
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    url = hf_hub_url(repo, file.name, revision=commit)
    headers = build_hf_headers()
    location = get_hf_file_metadata(url).location
    if urlparse(location).netloc != urlparse(url).netloc:
        headers.pop("authorization", None)  # a token is for the hub, not for its storage
    http_get(
        location,
        stream,
        resume_size=start,
        headers=headers,
        expected_size=file.size,
        tqdm_class=_forwarding(bar),
    )


def _forwarding(bar: Progress) -> Any:
    """A tqdm class that forwards its updates to our progress bar and prints nothing."""
    from tqdm import tqdm

    class Forwarding(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> None:
            bar.advance(n or 0)

    return Forwarding


def _matches(path: Path, file: RemoteFile) -> bool:
    if path.stat().st_size != file.size:
        return False
    digest = hashlib.sha256() if file.sha256 else hashlib.sha1(f"blob {file.size}\0".encode())
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest() == (file.sha256 or file.git_sha1)


def _install(repo: str, commit: str, files: list[RemoteFile], partial: Path, target: Path) -> None:
    """Give the complete download its name, replacing an older revision."""
    from ingot.interop.directory import model_files

    model_files(partial)  # every tensor of the index must be in a shard
    hashes = {file.name: file.sha256 or f"git:{file.git_sha1}" for file in files}
    size = sum(file.size for file in files)
    lineage.append(partial, "pull", source=repo, commit=commit, size=size, files=hashes)
    old = target.with_name(f".{target.name}.old")
    if target.exists():
        shutil.rmtree(old, ignore_errors=True)
        target.replace(old)
    partial.replace(target)
    shutil.rmtree(old, ignore_errors=True)


def _pulled_commit(target: Path) -> tuple[str, str] | None:
    """The repository and commit that a directory was downloaded from; None for other ones."""
    for step in reversed(lineage.read(target).steps if target.is_dir() else ()):
        if step["step"] == "pull":
            return str(step.get("source")), str(step.get("commit"))
    return None


@contextmanager
def _errors_explained(repo: str, revision: str) -> Generator[None]:
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as error:
        raise IngotError(
            f"{repo} is gated: its owner has to grant you access",
            hint="accept the terms on the model's page, then set HF_TOKEN",
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise IngotError(
            f"model not found on the hub: {repo}",
            hint="check the spelling; set HF_TOKEN if it is private",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise IngotError(
            f"{repo} has no revision {revision}", hint="name a branch, a tag or a commit"
        ) from error
    except errors.EntryNotFoundError as error:
        raise IngotError(
            f"{repo}: a listed file is missing on the hub", hint="run the command again"
        ) from error
    except errors.HTTPError as error:  # pyright: ignore[reportPrivateImportUsage]
        raise IngotError(
            f"cannot download {repo}: {error}",
            hint="check the network and HF_ENDPOINT, then run the command again: it resumes",
        ) from error
