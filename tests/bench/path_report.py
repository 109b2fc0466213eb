"""The numbers of one leg of the path's benchmark, and the tables of a run."""

import statistics
from collections.abc import Sequence
from typing import Any

from tests.bench.loops import quantile
from tests.bench.path_client import Sample

VALUES = ("tok_s", "ttft_p50_ms", "ttft_p99_ms", "token_p50_ms", "gap_p50_ms", "gap_p99_ms")
DIFFERENCES = (
    ("null", "bare"),
    ("thread", "bare"),
    ("process", "bare"),
    ("thread", "null"),
    ("process", "null"),
    ("process", "thread"),
)


def summarise(samples: Sequence[Sample]) -> dict[str, float]:
    """The measured columns of one leg."""
    gaps = [b - a for s in samples for a, b in zip(s.times, s.times[1:], strict=False)] or [0.0]
    wall = max(s.times[-1] for s in samples) - min(s.sent for s in samples)
    ttft = [s.ttft_s for s in samples]
    values = (
        sum(s.num_tokens for s in samples) / wall,
        1e3 * statistics.median(ttft),
        1e3 * quantile(ttft, 0.99),
        1e3 * statistics.median(s.token_s for s in samples),
        1e3 * statistics.median(gaps),
        1e3 * quantile(gaps, 0.99),
    )
    return dict(zip(VALUES, (round(value, 3) for value in values), strict=True))


def spread(values: Sequence[float], sign: str = "") -> str:
    """Median and quartiles."""
    low, high = quantile(values, 0.25), quantile(values, 0.75)
    return f"{statistics.median(values):{sign}.1f} ({low:{sign}.1f}, {high:{sign}.1f})"


def report(rows: Sequence[dict[str, Any]]) -> str:
    """Tables in Markdown: medians and quartiles of the pairs, then differences within pairs."""
    lines = [f"| c | leg | {' | '.join(VALUES)} |", "|---" * (2 + len(VALUES)) + "|"]
    for clients, leg in dict.fromkeys((r["concurrency"], r["leg"]) for r in rows):
        mine = [r for r in rows if (r["concurrency"], r["leg"]) == (clients, leg)]
        cells = [spread([r[value] for r in mine]) for value in VALUES]
        lines.append(f"| {clients} | {leg} | {' | '.join(cells)} |")
    lines += [
        "",
        "| c | within pairs | tok/s, % | TTFT p50, ms | token p50, ms |",
        "|---" * 5 + "|",
    ]
    by = {(r["concurrency"], r["leg"], r["pair"]): r for r in rows}
    pairs = sorted({r["pair"] for r in rows})
    for clients in dict.fromkeys(r["concurrency"] for r in rows):
        for one, other in DIFFERENCES:
            if (clients, one, pairs[0]) not in by or (clients, other, pairs[0]) not in by:
                continue
            both = [(by[clients, one, p], by[clients, other, p]) for p in pairs]
            share = [100 * (a["tok_s"] / b["tok_s"] - 1) for a, b in both]
            ttft = [a["ttft_p50_ms"] - b["ttft_p50_ms"] for a, b in both]
            token = [a["token_p50_ms"] - b["token_p50_ms"] for a, b in both]
            cells = " | ".join(spread(values, "+") for values in (share, ttft, token))
            lines.append(f"| {clients} | {one} - {other} | {cells} |")
    return "\n".join(lines)
