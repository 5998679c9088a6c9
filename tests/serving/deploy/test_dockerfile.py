"""The Dockerfile, checked by hadolint: there may be no Docker where tests run."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
DOCKERFILE = ROOT / "deploy/Dockerfile"


def hadolint(text: str) -> list[dict[str, Any]]:
    """What hadolint finds in a Dockerfile."""
    command = ["hadolint", "--no-fail", "--format", "json", "-"]
    run = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    return json.loads(run.stdout)


def test_hadolint_finds_nothing() -> None:
    text = DOCKERFILE.read_text()
    assert hadolint(text) == []
    planted = text.replace("torch==2.13.0", "torch").replace("USER 1000", "USER root")
    assert {"DL3013", "DL3002"} <= {found["code"] for found in hadolint(planted)}


def test_what_is_copied_exists_and_is_not_ignored() -> None:
    text = DOCKERFILE.read_text()
    copied = {
        name
        for line in re.findall(r"^COPY (.*)$", text, re.MULTILINE)
        for name in line.split()[:-1]
    }
    ignore = (ROOT / "deploy/Dockerfile.dockerignore").read_text().split()
    assert copied == {line[1:] for line in ignore if line.startswith("!")}
    assert all((ROOT / name).exists() for name in copied)


def test_the_versions_are_those_of_the_project() -> None:
    text, project = DOCKERFILE.read_text(), (ROOT / "pyproject.toml").read_text()
    extras = re.search(r"/src\[(.*)\]", text)
    assert extras
    for extra in extras[1].split(","):
        assert f"\n{extra} = [" in project
    assert 'requires-python = ">=3.11"' in project
    assert "FROM python:3.11-" in text
