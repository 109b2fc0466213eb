"""What only sockets show, beside another tenant's stream, which must not notice."""

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest

from tests.deployments.company import Company, Raw, peak_bytes, text_of
from tests.deployments.hostile import BODIES
from tests.deployments.whole_service.world import (
    LONG,
    QUESTIONS,
    STALLED_S,
    STYLES,
    Service,
    ask,
    wait_until,
)

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def alone(service: Service) -> str:
    return text_of(service.url, "spanish")


@pytest.fixture
def company(service: Service, alone: str) -> Iterator[Company]:
    with Company(service.url, "spanish", alone) as beside:
        yield beside
        beside.go_on()


def raw(service: Service) -> Raw:
    return Raw(service.url, "pirate")


def test_heads_and_lengths(service: Service, company: Company) -> None:
    flood = b"".join(b"X-%d: a\r\n" % number for number in range(1000))
    with raw(service) as client:
        assert client.post(b"{}", head=flood).status == 431
    with raw(service) as client:
        assert client.post(b"{}", head=b"Content-Length: -1\r\n").status == 400
    with raw(service) as client:
        client.send(b"POST /v1/completions HTTP/1.1\r\nX: " + b"a" * 3_000_000)
        assert client.answer().status == 431
    with raw(service) as client:
        assert client.post(b"{}", length=1 << 40).status == 413


def test_slow_bodies(service: Service, company: Company) -> None:
    begin = time.monotonic()
    with raw(service) as silent, raw(service) as chunked:
        silent.begin(length=1000, body=b"{")
        chunked.begin(head=b"Transfer-Encoding: chunked\r\n", body=b"1\r\n{\r\n")
        answers = [silent.answer(), chunked.answer()]
    assert [answer.status for answer in answers] == [408, 408]
    assert [answer.error["code"] for answer in answers] == ["request_timeout"] * 2
    assert STALLED_S <= time.monotonic() - begin < STALLED_S + 10


def test_uploads_given_up(service: Service, company: Company) -> None:
    """As many as the tenant has seats, twice: none of them is kept."""
    labels = {"tenant": "pirate", "status": "499"}
    before = service.metrics()("moe_requests_total", **labels)
    for _ in range(2):
        clients = [raw(service) for _ in range(64)]
        for client in clients:
            client.begin(length=5_000_000, body=b"a" * 30_000)
        for client in clients:
            client.reset()
    wait_until(lambda: service.metrics()("moe_requests_total", **labels) >= before + 1, 30)
    line = QUESTIONS[0]
    answer = ask(service.client(), "pirate", line["question"])
    assert answer.choices[0].message.content == line["pirate"]


@pytest.mark.slow
def test_a_reader_that_stops(service: Service, company: Company) -> None:
    """It is cut, its sequences end with it, and eight other streams go on."""
    others = [Company(service.url, style) for style in ("formal", "spanish") for _ in range(4)]

    def aborted() -> int:
        return sum(stats.finished.get("abort", 0) for stats in service.stats())

    before = aborted()
    with raw(service) as stalled, ExitStack() as beside:
        body = json.dumps(LONG | {"logprobs": 20, "n": 4}).encode()
        stalled.post(body, receive_bytes=8192, wait=False)
        wait_until(lambda: sum(s.running for s in service.stats()) >= 4, 20)
        for other in others:
            beside.enter_context(other)
        wait_until(lambda: aborted() > before, 60)
        for other in others:
            other.go_on()
        assert stalled.is_cut()


@pytest.mark.parametrize("commented", [False, True])
def test_a_client_gone_while_its_adapter_loads(
    service: Service, company: Company, commented: bool
) -> None:
    service.stalled.update({"/open/slow/adapter_config.json", "/open/"})

    def waiting() -> int:
        return sum(stats.waiting_for_adapter for stats in service.stats())

    with Raw(service.url, "unlucky") as client:
        client.post(json.dumps(LONG | {"model": "slow"}).encode(), wait=False)
        wait_until(lambda: waiting() == 1, 20)
        if commented:
            assert client.read_until(b": keep-alive\n\n").startswith(b"HTTP/1.1 200")
    begin = time.monotonic()
    wait_until(lambda: waiting() == 0, 10)
    took_ms = (time.monotonic() - begin) * 1000
    service.stalled.clear()
    print(f"gone while loading: {took_ms:.0f} ms")
    assert took_ms < 1000


def test_orders_to_serve(service: Service, company: Company) -> None:
    line = QUESTIONS[0]
    orders = {
        "x-request-timeout-seconds": "0.001",
        "x-request-disconnect-disabled": "?1",
        "serve_multiplexed_model_id": "formal/formal",
        "x-session-id": "another",
        "x-request-id": "the-same",
    }
    said = [
        ask(service.client(style), style, line["question"], extra_headers=orders)
        for style in STYLES
    ]
    assert [a.choices[0].message.content for a in said] == [line[style] for style in STYLES]
    assert len({a.id for a in said}) == 3
    with raw(service) as client:
        forged = b"x-request-disconnect-disabled: ?1\r\nx-session-id: \xff\r\n"
        client.post(json.dumps(LONG).encode(), head=forged, wait=False)
        wait_until(lambda: service.stats_of_tenant("pirate") > 0, 10)
        client.reset()
    time.sleep(0.5)
    tokens = service.stats_of_tenant("pirate")
    time.sleep(0.5)
    assert service.stats_of_tenant("pirate") == tokens, "it ended with its client"


def test_bodies_take_little_memory(service: Service, company: Company) -> None:
    before = peak_bytes(reset=True)
    assert {"Ingress", "ProxyActor"} <= set(before)
    for case in BODIES:
        body = case.body()
        if len(body) < 1 << 18:  # the others have had their turn without Ray
            continue
        response = httpx.post(
            f"{service.url}{case.path}",
            content=body,
            headers={"Authorization": "Bearer key-of-pirate"},
            timeout=60,
        )
        assert response.status_code == case.status, (case.name, response.text[:200])
    grown = {name: (size - before[name]) >> 20 for name, size in peak_bytes().items()}
    print("peak growth, MiB:", grown)
    assert max(grown.values()) < 400, grown


def test_no_key_in_any_log(service: Service) -> None:
    """After all of the above, and a key that is wrong and one that is malformed."""
    for key in ("key-of-nobody", "key-of-pirate\u00ff"):
        headers = {"Authorization": f"Bearer {key}".encode("latin-1")}
        assert httpx.get(f"{service.url}/v1/models", headers=headers).status_code == 401
    files = [path for path in service.private.rglob("logs/**/*") if path.is_file()]
    assert len(files) > 5
    for path in files:
        assert b"key-of-" not in path.read_bytes(), path
