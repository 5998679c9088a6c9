"""The page at `/`, in a real browser on a real server."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ingot.serving.server.keys import format_line
from ingot.serving.server.page import PATHS
from tests import models
from tests.browser import Browser, browsing, needs_browser
from tests.serving.conftest import Served, serving
from tests.serving.server.tool_use import TOOLS, check_call

KEY = "a"
HOSTILE = '<img src=x onerror="window.hacked=1"> & ünïcode 😀 <script>hacked=2</script>'
REPLY = "#conversation > li:last-child"
FIGURES = f"document.querySelector('{REPLY} .figures')?.textContent"
ENTER, ESCAPE, RIGHT = ("Enter", 13), ("Escape", 27), ("ArrowRight", 39)


@pytest.fixture(scope="module")
def reasoning_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = models.small(tmp_path_factory.mktemp("models") / "small", max_seq_len=4096)
    template = models.TEMPLATE + "{# </think> #}"
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return directory


@pytest.fixture(scope="module")
def keyed(reasoning_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("keyed")
    (folder / "keys").write_text(format_line("alice", KEY))
    with serving(reasoning_model, folder, "--api-key-file", str(folder / "keys")) as served:
        yield served


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsing(tmp_path_factory.mktemp("browser")) as made:
        yield made


@pytest.fixture
def page(browser: Browser, keyed: Served) -> Iterator[Browser]:
    """The page, with a key; nothing it does may break its security policy."""
    browser.open(f"{keyed.url}/")
    browser.run(f"sessionStorage.clear(); sessionStorage.setItem('ingot-api-key', '{KEY}')")
    browser.open(f"{keyed.url}/")
    browser.wait("document.querySelector('#status').className === 'ready'")
    browser.added = {"temperature": 0}
    browser.bodies.clear()
    yield browser
    assert browser.errors() == []
    assert all(url.startswith(f"{keyed.url}/") for url in browser.urls())
    browser.run("sessionStorage.clear()")


def send(page: Browser, text: str, tokens: int | None = None, **added: Any) -> None:
    """Send a message and wait for the end of the reply."""
    page.added |= added
    if tokens is not None:
        page.type("[name=max_tokens]", str(tokens))
    page.type("#input", text)
    page.press(*ENTER)
    page.wait(f"document.querySelector('{REPLY}').className.startsWith('assistant')")
    page.wait(FIGURES)


def forced(text: str) -> dict[str, Any]:
    """The field with which the model writes this text."""
    return {"response_format": {"type": "regex", "regex": re.escape(text)}}


def test_files_are_public_and_refer_to_nothing_outside(keyed: Served) -> None:
    for path in PATHS:
        with urllib.request.urlopen(keyed.url + path) as response:
            assert response.status == 200
            assert "default-src 'self'" in response.headers["content-security-policy"]
            assert response.headers["x-content-type-options"] == "nosniff"
            text = response.read().decode().replace("http://www.w3.org/2000/svg", "")
        assert "://" not in text
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write", text)
        for name in re.findall(r'(?:href|src)="(/[^"]+)"', text):
            assert name in PATHS
    assert keyed.call("/assets/page.py", key=KEY)[0] == 404


def test_statistics_need_the_key_and_count(keyed: Served) -> None:
    assert keyed.call("/v1/stats")[0] == 401
    assert keyed.call("/v1/completions", {"prompt": "a", "max_tokens": 5}, KEY)[0] == 200
    status, found, _ = keyed.call("/v1/stats", key=KEY)
    (entry,) = found["data"]
    assert (status, entry["model"], entry["status"]) == (200, "small", "ready")
    assert entry["generated_tokens"] == keyed.metric("vllm:generation_tokens_total") >= 5
    assert entry["num_requests_running"] == entry["num_requests_waiting"] == 0
    assert 0 <= entry["kv_cache_usage"] <= 1
    assert 0 <= entry["prefix_cache_hit_rate"] <= 1


@needs_browser
def test_the_key_is_asked_for_and_a_wrong_one_refused(browser: Browser, keyed: Served) -> None:
    browser.open(f"{keyed.url}/")
    browser.wait("document.querySelector('#key-dialog').open")
    assert browser.text("#key-error") == ""
    browser.press(*ESCAPE)
    browser.wait("document.querySelector('#status').textContent.includes('wrong API key')")
    assert not browser.run("document.querySelector('#key-dialog').open"), "not asked again"
    browser.click("#change-key")
    browser.type("#key", "wrong")
    browser.press(*ENTER)
    browser.wait("document.querySelector('#key-error').textContent")
    browser.type("#key", KEY)
    browser.press(*ENTER)
    browser.wait("document.querySelector('#status').className === 'ready'")
    assert browser.text("#model") == "small"
    assert browser.run("document.cookie + JSON.stringify(localStorage)") == "{}"
    assert browser.errors() == []


@needs_browser
def test_a_reply_is_streamed_and_measured(page: Browser) -> None:
    page.run(
        "window.lengths = new Set();"
        "new MutationObserver(() => lengths.add(conversation.textContent.length)).observe("
        "conversation, {childList: true, characterData: true, subtree: true})"
    )
    send(page, "Hello", 40)
    assert page.run("lengths.size") > 5
    figures = page.text(f"{REPLY} .figures")
    assert re.match(
        r"\d+ prompt tokens · 40 tokens · [\d.]+ tokens/s · first token after \d+ ms · length",
        figures,
    )
    assert page.bodies[0]["messages"] == [{"role": "user", "content": "Hello"}]
    assert "logprobs" not in page.bodies[0]
    reply = page.text(f"{REPLY} .text")
    send(page, "More")
    assert [m["role"] for m in page.bodies[1]["messages"]] == ["user", "assistant", "user"]
    assert page.bodies[1]["messages"][1]["content"] == reply
    page.wait("Number(throughput.textContent) >= 0")
    page.click(f"{REPLY} .figures button")
    page.wait(f"document.querySelectorAll('.assistant').length === 2 && {FIGURES}")
    assert page.bodies[2] == page.bodies[1], "retried"


@needs_browser
def test_hostile_text_stays_text_with_the_probability_of_each_token(
    page: Browser, keyed: Served
) -> None:
    page.click("#probabilities")
    send(page, HOSTILE, **forced(HOSTILE))
    assert page.text(f"{REPLY} .text") == HOSTILE
    assert page.text(".user .text") == HOSTILE
    spans = page.run(
        f"[...document.querySelectorAll('{REPLY} .token')].map(e => "
        "[e.textContent, Number(e.style.getPropertyValue('--surprise'))])"
    )
    assert [text for text, _ in spans] == list(HOSTILE), "one span for a character"
    assert page.run("document.querySelectorAll('#conversation :is(img, script)').length") == 0
    assert page.run("window.hacked") is None

    body = {"model": "small", "logprobs": True, "max_tokens": 200, "temperature": 0}
    body["messages"] = [{"role": "user", "content": HOSTILE}]
    found = keyed.call("/v1/chat/completions", {**body, **forced(HOSTILE)}, KEY)[1]
    tokens = iter(found["choices"][0]["logprobs"]["content"])
    for text, surprise in spans:
        logprob = sum(next(tokens)["logprob"] for _ in text.encode())
        assert surprise == pytest.approx(1 - 2.718281828**logprob, abs=1e-3)

    page.hover(f"{REPLY} .token:nth-of-type(3)")
    assert not page.run("alternatives.hidden")
    rows = page.run("[...alternatives.querySelectorAll('tr')].map(e => e.innerText)")
    assert len(rows) in (5, 6)
    assert page.run("alternatives.querySelector('.chosen').textContent").startswith("m")
    page.run(f"document.querySelector('{REPLY} .text').focus()")
    page.press(*RIGHT)
    assert page.text(".token.current") == "g", "the token after the one under the pointer"
    colour = f"getComputedStyle(document.querySelector('{REPLY} .token')).backgroundColor"
    shown = page.run(colour)
    page.click("#probabilities")
    assert page.run(colour) != shown, "the colours can be turned off"
    send(page, "Again")
    assert page.text(f"{REPLY} .text") == HOSTILE
    assert page.run(f"document.querySelectorAll('{REPLY} .text *').length") == 0
    assert page.run("window.hacked") is None


@needs_browser
def test_the_policy_refuses_what_the_page_never_does(page: Browser) -> None:
    """A planted fault: without the policy, this handler would run."""
    page.run(f"conversation.innerHTML = {json.dumps(HOSTILE)}")
    page.wait("violations.length")
    assert page.run("window.hacked") is None
    assert "script-src" in page.errors()[0]
    page.run("window.violations = []")


@needs_browser
def test_a_reply_can_be_stopped(page: Browser, keyed: Served) -> None:
    page.added |= {"ignore_eos": True}
    for stop in (lambda: page.click("#stop"), lambda: page.press(*ESCAPE)):
        page.type("#input", "Hello")
        page.click("#send")
        page.wait(f"document.querySelector('{REPLY} .text')?.textContent.length > 5")
        stop()
        assert page.wait(FIGURES).startswith("first token after")
        assert page.text(f"{REPLY} .figures").endswith("stoppedRetry")
        keyed.wait(lambda: keyed.metric("ingot:requests_in_flight") == 0)
        shown = "[...composer.querySelectorAll('button')].map(e => !e.hidden && e.id)"
        assert page.run(shown) == ["clear", "send", False]


@needs_browser
def test_tools_are_called_and_given_results(page: Browser) -> None:
    page.click("#example")
    assert json.loads(page.run("document.querySelector('[name=tools]').value"))
    page.type("[name=tools]", "[{")
    page.type("#input", "Weather?")
    page.press(*ENTER)
    assert "JSON" in page.text("#tools-error")
    page.type("[name=tools]", json.dumps([tool["function"] for tool in TOOLS[:1]]))
    page.run("document.querySelector('[name=tool_choice]').value = 'required'")
    send(page, "Weather?", parallel_tool_calls=False)
    assert page.bodies[0]["tools"] == TOOLS[:1]
    assert page.text(f"{REPLY} .call h3") == "weather"
    arguments = page.text(f"{REPLY} .call pre")
    check_call("weather", arguments)

    page.run("document.querySelector('[name=tool_choice]').value = 'none'")
    page.type("[name=max_tokens]", "20")
    page.type(f"{REPLY} .call textarea", "Sunny")
    page.click(f"{REPLY} > button")
    page.wait("document.querySelectorAll('.assistant').length === 2")
    page.wait(FIGURES)
    call, result = page.bodies[1]["messages"][1:]
    assert json.loads(call["tool_calls"][0]["function"]["arguments"]) == json.loads(arguments)
    assert (result["role"], result["content"]) == ("tool", "Sunny")
    assert result["tool_call_id"] == call["tool_calls"][0]["id"]


@needs_browser
def test_reasoning_is_folded(page: Browser) -> None:
    page.click("#probabilities")
    send(page, "Hello", **forced("<think>Hm</think>Yes"))
    assert page.run(f"document.querySelector('{REPLY} .reasoning').open") is False
    assert page.text(f"{REPLY} .reasoning .text") == "Hm"
    assert page.text(f"{REPLY} > .text") == "Yes"
    for selector, count in ((".reasoning .token", 2), ("> .text .token", 3)):
        assert page.run(f"document.querySelectorAll('{REPLY} {selector}').length") == count


@needs_browser
def test_errors_are_shown_and_settings_kept(page: Browser, keyed: Served) -> None:
    page.type("[name=system]", "Be brief")
    page.run("document.querySelector('#input').focus()")  # the field has changed
    send(page, "Hello", 5000)
    assert "the model's context is 4,096" in page.text(f"{REPLY} .error")
    assert page.bodies[0]["messages"][0] == {"role": "system", "content": "Be brief"}
    page.click("#clear")
    assert page.run("conversation.children.length") == 0
    page.open(f"{keyed.url}/")
    assert page.run("document.querySelector('[name=system]').value") == "Be brief"
    page.resize(380, 700)
    page.open(f"{keyed.url}/")
    assert page.run("document.documentElement.scrollWidth") <= 380, "nothing is cut off"
    assert not page.run("settings.open")
    page.resize(1200, 800)
