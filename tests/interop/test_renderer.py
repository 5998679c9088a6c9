"""The program itself, within this process; `test_chat` runs it as it is used."""

from __future__ import annotations

import json
from multiprocessing import Pipe
from typing import Any

import pytest

from ingot.interop import renderer


def answers(*requests: Any) -> list[dict[str, Any]]:
    ours, theirs = Pipe()
    with ours, theirs:
        for request in requests:
            ours.send_bytes(json.dumps(request).encode())
        ours_closed = Once(theirs, len(requests))
        renderer.serve(ours_closed, seconds=5, max_characters=100)  # pyright: ignore
        return [json.loads(ours.recv_bytes()) for _ in requests]


class Once:
    """A connection whose other side closes after `count` messages."""

    def __init__(self, inner: Any, count: int) -> None:
        self.inner, self.left = inner, count

    def recv_bytes(self) -> bytes:
        if self.left == 0:
            raise EOFError
        self.left -= 1
        return self.inner.recv_bytes()

    def send_bytes(self, content: bytes) -> None:
        self.inner.send_bytes(content)


def test_the_first_message_is_the_template() -> None:
    assert answers("Hello {{ name }}", {"name": "you"}, {"name": "<é>"}) == [
        {"text": ""},
        {"text": "Hello you", "spans": []},
        {"text": "Hello <é>", "spans": []},
    ]


def test_errors_are_answered() -> None:
    source = "{{ raise_exception('no') if refuse else 1 / 0 }}"
    ready, refused, broken = answers(source, {"refuse": True}, {})
    assert ready == {"text": ""}
    assert refused == {"error": "no", "rejected": True}
    assert broken == {"error": "ZeroDivisionError: division by zero", "rejected": False}


def test_output_is_bounded() -> None:
    _, within, beyond = answers("{{ 'a' * n }}", {"n": 100}, {"n": 101})
    assert within["text"] == "a" * 100
    assert "more than 100 characters" in beyond["error"]


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% generation %}a{% endgeneration %}b", "ab"),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "1"),
        ("{{ {'b': 'é', 'a': [1]} | tojson(separators=(',', ':'), sort_keys=true) }}", None),
        ("{{ ['é'] | tojson(ensure_ascii=true) }}", '["\\u00e9"]'),
        ("  {% if true %}\nx\n  {% endif %}\n", "x\n"),
    ],
)
def test_templates_have_the_functions_of_transformers(source: str, text: str | None) -> None:
    expected = '{"a":[1],"b":"é"}' if text is None else text
    assert answers(source, {})[1]["text"] == expected


@pytest.mark.parametrize(
    ("source", "spans"),
    [
        ("one {% generation %}two{% endgeneration %} three", [[4, 7]]),
        (
            "{% for x in 'ab' %}---{% generation %}{{ x }}{% endgeneration %}{% endfor %}",
            [[3, 4], [7, 8]],
        ),
        ("{% macro f() %}a{% generation %}b{% endgeneration %}{% endmacro %}a{{ f() }}", None),
    ],
)
def test_what_is_generated_is_located(source: str, spans: list[list[int]] | None) -> None:
    assert answers(source, {})[1]["spans"] == spans
