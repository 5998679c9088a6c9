"""Requests made of the schema of a server, and of what its schema forbids (schemathesis)."""

from __future__ import annotations

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode

from tests.serving.conftest import Served

HARMLESS = {200, 400, 404, 405, 413, 415, 422, 429, 504}


def send_strange(served: Served, count: int, prefix: str = "/", name: str | None = None) -> int:
    """Send requests to each endpoint whose path has a prefix; `name` is that of the model."""
    schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
    sent = 0
    for found in schema.get_all_operations():
        operation = found.ok()  # pyright: ignore[reportAttributeAccessIssue]
        if not operation.path.startswith(prefix):
            continue
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):

            @settings(
                max_examples=count,
                deadline=None,
                database=None,
                suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
                phases=[Phase.generate],
            )
            @given(operation.as_strategy(generation_mode=mode))
            def send(case: schemathesis.Case) -> None:
                nonlocal sent
                if name is not None and "name" in case.path_parameters:
                    case.path_parameters["name"] = name
                response = case.call(timeout=30)
                sent += 1
                assert response.status_code in HARMLESS, response.text
                if response.status_code != 200:
                    error = response.json()["error"]  # text in the Open Inference Protocol
                    assert error if isinstance(error, str) else error["message"]

            try:
                send()
            except Unsatisfiable:  # there is nothing to forbid
                assert not operation.body
    return sent
