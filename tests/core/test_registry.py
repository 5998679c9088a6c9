"""Names resolve late, once, and from any thread."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from ingot.core.errors import UnknownName
from ingot.core.registry import Registry


def test_a_target_is_imported_on_get_and_not_before() -> None:
    script = """
import sys
from ingot.core.registry import Registry
registry = Registry("parser")
registry.register("page", "html.parser:HTMLParser")
assert list(registry) == ["page"] and "page" in registry and len(registry) == 1
assert "html.parser" not in sys.modules
assert registry.get("page") is sys.modules["html.parser"].HTMLParser
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_factory_runs_once_even_if_it_makes_none() -> None:
    calls: list[int] = []
    registry: Registry[None] = Registry("thing")
    registry.register("a", factory=lambda: calls.append(1))
    assert registry.get("a") is None
    assert registry.get("a") is None
    assert calls == [1]


def test_many_threads_get_one_object() -> None:
    made: list[object] = []
    second = threading.Barrier(2)

    def make() -> object:
        # Were another thread let in here too, the two would meet.
        with contextlib.suppress(threading.BrokenBarrierError):
            second.wait(timeout=0.2)
        made.append(object())
        return made[-1]

    registry: Registry[object] = Registry("thing")
    registry.register("a", factory=make)
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(registry.get, ["a"] * 8))
    assert len(made) == 1
    assert all(thing is made[0] for thing in got)


def test_a_slow_factory_does_not_hold_up_another_name() -> None:
    inside, finish = threading.Event(), threading.Event()

    def slow() -> str:
        inside.set()
        finish.wait()
        return "slow"

    registry: Registry[str] = Registry("thing")
    registry.register("slow", factory=slow)
    registry.register("fast", factory=lambda: "fast")
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(registry.get, "slow")
        inside.wait()
        try:
            assert pool.submit(registry.get, "fast").result(timeout=10) == "fast"
        finally:
            finish.set()
        assert waiting.result() == "slow"


def test_a_factory_may_get_another_name() -> None:
    registry: Registry[str] = Registry("thing")
    registry.register("a", factory=lambda: "a")
    registry.register("b", factory=lambda: registry.get("a") + "b")
    assert registry.get("b") == "ab"


def test_a_factory_that_failed_is_tried_again() -> None:
    outcomes = iter([ZeroDivisionError(), "fine"])

    def make() -> str:
        outcome = next(outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    registry: Registry[str] = Registry("thing")
    registry.register("a", factory=make)
    with pytest.raises(ZeroDivisionError):
        registry.get("a")
    assert registry.get("a") == "fine"


def test_an_unknown_name_says_its_kind_and_the_nearest() -> None:
    registry: Registry[str] = Registry("decoder")
    registry.register("json", factory=str)
    assert "jsno" not in registry
    with pytest.raises(UnknownName, match=r"unknown decoder 'jsno'\n.*did you mean 'json'"):
        registry.get("jsno")


def test_a_name_is_given_once() -> None:
    registry: Registry[str] = Registry("decoder")
    registry.register("json", factory=lambda: "first")
    with pytest.raises(ValueError, match="decoder 'json' is registered already"):
        registry.register("json", factory=lambda: "second")
    assert registry.get("json") == "first"


def test_registering_needs_one_well_formed_source() -> None:
    registry: Registry[type] = Registry("decoder")
    with pytest.raises(ValueError, match="either a target or a factory"):
        registry.register("json")
    with pytest.raises(ValueError, match="either a target or a factory"):
        registry.register("json", "json:JSONDecoder", factory=lambda: dict)
    with pytest.raises(ValueError, match=r"not of the form 'package\.module:attribute'"):
        registry.register("json", "json.JSONDecoder")
    assert len(registry) == 0
