"""The path's benchmark: what its client reads off the wire, and what its tables say."""

import asyncio
import json

from tests.bench.path_client import Order, Sample, _run, find_error
from tests.bench.path_report import report, summarise

EVENT = b'data: {"choices":[{"text":" a"}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":3}}\n\n'
DONE = b"data: [DONE]\n\n"


async def ask(*parts: bytes) -> Sample:
    """The sample of a request that a server answers with these writes."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        assert json.loads(await reader.readexactly(length)) == {"model": "m"}
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.01)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        (sample,) = await _run(Order("127.0.0.1", port, "key", ({"model": "m"},), 1))
    return sample


async def test_messages_are_counted_however_they_are_cut() -> None:
    cut = len(EVENT) - 1  # between the two line ends
    sample = await ask(EVENT, EVENT[:cut], EVENT[cut:] + EVENT, USAGE + DONE)
    assert not find_error([sample], 3)
    assert len(sample.times) == 3 and sample.num_tokens == 3
    assert sample.sent < sample.times[0] < sample.times[1] == sample.times[2]


async def test_an_answer_without_an_end_is_an_error() -> None:
    assert "no end" in find_error([await ask(EVENT, EVENT)], 2)
    assert find_error([await ask(EVENT, USAGE + DONE)], 4) == "3 tokens, not 4"


def test_tables_compare_within_pairs() -> None:
    rows = []
    for pair, slower in enumerate((1.0, 2.0, 4.0)):
        for leg, share in (("bare", 1.0), ("thread", 0.9)):
            times = [0.1 * slower, 0.1 * slower + 0.9 * slower / share]
            row = summarise([Sample(0.0, times, 10)])
            rows.append({"leg": leg, "concurrency": 1, "pair": pair} | row)
    lines = report(rows).splitlines()
    assert lines[2].startswith("| 1 | bare | 5.0 (2.5, 10.0) | 200.0 (100.0, 400.0) |")
    # A tenth less while tokens come, the first one as fast: 1 / (0.1 + 1) of what 1 / 1 was.
    assert lines[-1] == (
        "| 1 | thread - bare | -9.1 (-9.1, -9.1) | +0.0 (+0.0, +0.0) | +22.2 (+11.1, +44.4) |"
    )
