"""Tenants' chat templates: what they may do, and that no one of them holds the others up.

Times are bounds far above what is asserted elsewhere: a busy machine fails nobody here.
"""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from model_runner.template_sandbox import TemplateFailure, TemplateSandbox
from model_runner.tokenizer import Tokenizer
from tests.model_runner.demo import BASE_DIR

MESSAGES = [
    {"role": "user", "content": 'Hi "é" <b>'},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye"},
]
KNOWN = {"messages": MESSAGES, "add_generation_prompt": True, "bos_token": "<s>"}
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture(scope="module")
def shared() -> Iterator[TemplateSandbox]:
    sandbox = TemplateSandbox()
    yield sandbox
    sandbox.close()


@pytest.fixture
async def sandbox() -> AsyncIterator[TemplateSandbox]:
    made = TemplateSandbox()
    yield made
    made.close()


# transformers' own words for these are the truth.
FAIR = [
    (BASE_DIR / "chat_template.jinja").read_text(),
    "{{ bos_token }}{% for m in messages %}{{ loop.index0 }}{{ m.content | trim }}\n{% endfor %}",
    "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% continue %}"
    "{% endif %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}{{ tools is none }}",
    "{% macro f(x) %}[{{ x }}]{% endmacro %}{{ f(messages[-1].content) }}{{ absent }}",
]


@pytest.mark.parametrize("template", FAIR, ids=range(len(FAIR)))
async def test_it_writes_what_transformers_writes(shared: TemplateSandbox, template: str) -> None:
    front = Tokenizer(BASE_DIR)._front
    want = front.apply_chat_template(
        MESSAGES,
        chat_template=template,
        tokenize=False,
        add_generation_prompt=True,
        bos_token="<s>",
    )
    for _ in range(2):  # compiled, then known
        assert (
            await shared.render("t", template, KNOWN | {"tools": None, "documents": None}) == want
        )


HOSTILE = {
    "loop": (LOOP, "more than 50 ms"),
    "a range": ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
    "a power": ("{% set n = namespace(x=9**9) %}{{ n.x ** n.x }}", "more than 50 ms|exceeds"),
    "a constant power": ("{{ 7 ** (9 ** 9) }}", "to compile|exceeds"),
    "a constant text": ("{{ 'a' * 10**9 }}", "memory"),
    "memory": ("{% set n = 10**9 %}{{ messages[2].content * n }}", "memory"),
    "many texts": (
        "{% set n = namespace(x='12345678') %}"
        "{% for i in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "memory|more than 50 ms",
    ),
    "output": ("{% for i in range(2000) %}{{ bos_token * 1000 }}{% endfor %}", "writes more than"),
    "recursion": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "too deep"),
    "nesting": ("{{" + "(" * 9000 + "1" + ")" * 9000 + "}}", "too deep"),
    "include": ("{% include 'other' %}", "another template"),
    "import": ("{% import '/etc/passwd' as p %}", "another template"),
    "extends": ("{% extends messages[0].content %}", "another template"),
    "syntax": ("{% if %}", "TemplateSyntaxError.*line 1"),
    "escape": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
    "a filter's escape": ("{{ ''|attr('__class__')|attr('mro') }}", "Undefined|Security"),
    "mutation": ("{{ messages.append(1) }}", "SecurityError"),
    "its own refusal": ("{{ raise_exception('no\tuser') }}", r"TemplateError: no\\tuser"),
    "words for a terminal": ("{{ raise_exception('\\x1b[31m\\ud800') }}", r": \\x1b\[31m\\ud800$"),
    "half a character": ("{{ '\\ud800' }}", "writes half a character"),
    "a large constant": ("{{ 'x' * 10**7 }}", "compiles to more than"),
    "size": ("{% if a %}x{% endif %}" * 11_000, "ms to compile"),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_what_it_may_not_do(shared: TemplateSandbox, name: str) -> None:
    template, words = HOSTILE[name]
    begun = time.monotonic()
    for _ in range(2):  # as new, and as known
        with pytest.raises(TemplateFailure, match=words):
            await shared.render("hostile", template, KNOWN)
    assert time.monotonic() - begun < 15
    assert await shared.render("fair", "{{ messages[2].content }}", KNOWN) == "Bye"


async def test_a_megabyte_is_allowed(shared: TemplateSandbox) -> None:
    template = "{% for i in range(1024) %}{{ '0123456789abcdef' * 64 }}{% endfor %}"
    assert len(await shared.render("t", template, KNOWN)) == 1 << 20


async def test_loops_of_one_owner_keep_no_other(sandbox: TemplateSandbox) -> None:
    both = (sandbox.render(owner, LOOP, KNOWN) for owner in ("one", "other"))
    await asyncio.gather(*both, return_exceptions=True)  # both workers are there now
    loops = [asyncio.ensure_future(sandbox.render("hostile", LOOP, KNOWN)) for _ in range(20)]
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.005)
            ticks += 1

    ticking = asyncio.ensure_future(tick())
    for _ in range(5):
        assert await sandbox.render("fair", "{{ bos_token }}", KNOWN) == "<s>"
    assert sum(loop.done() for loop in loops) < 15, "it waited for the loops"
    assert ticks, "the event loop stood still"
    results = await asyncio.gather(*loops, return_exceptions=True)
    ticking.cancel()
    assert all(isinstance(result, TemplateFailure) for result in results)


async def test_who_leaves_keeps_no_worker_twice(sandbox: TemplateSandbox) -> None:
    """A cancelled caller's rendering ends before the owner's next one begins."""
    for _ in range(3):
        task = asyncio.ensure_future(sandbox.render("hostile", LOOP, KNOWN))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert await sandbox.render("hostile", "x", KNOWN) == "x"


async def test_a_worker_that_died_is_started_again(sandbox: TemplateSandbox) -> None:
    before = _children()
    assert await sandbox.render("t", "{{ bos_token }}", KNOWN) == "<s>"
    (first,) = _children() - before
    os.kill(first, signal.SIGKILL)
    assert await sandbox.render("t", "{{ bos_token }}", KNOWN) == "<s>"
    (second,) = _children() - before - {first}
    sandbox.close()
    assert not Path(f"/proc/{second}").exists()


async def test_nothing_of_this_process_is_there(
    sandbox: TemplateSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret")
    before = _children()
    await sandbox.render("t", "x", KNOWN)
    (worker,) = _children() - before
    assert b"a-secret" not in Path(f"/proc/{worker}/environ").read_bytes()


async def test_whoever_starts_it_may_block_the_signals(sandbox: TemplateSandbox) -> None:
    """A thread's mask goes to the processes that it starts."""
    clocks = {signal.SIGPROF, signal.SIGALRM}
    blocked = sandbox._threads.submit(signal.pthread_sigmask, signal.SIG_BLOCK, clocks)
    blocked.result()
    with pytest.raises(TemplateFailure, match="more than 50 ms"):
        await sandbox.render("t", LOOP, KNOWN)


def _children() -> set[int]:
    """Of this process: template workers alone."""
    found = set()
    for path in Path("/proc/self/task").glob("*/children"):
        for pid in path.read_text().split():
            line = Path(f"/proc/{pid}/cmdline")
            if line.exists() and b"template_worker" in line.read_bytes():
                found.add(int(pid))
    return found
