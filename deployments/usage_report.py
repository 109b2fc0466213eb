"""Adds usage records up: tokens by tenant, each attempt of each request once.

    python -m deployments.usage_report --config FILE [--day 2026-01-31]

prints one line of JSON a tenant. A request counts to the day (UTC) that it began on, whole, over
all its connections, so days add up to what all records come to; but an answer that was asked for
again days later counts to both. Not here: prices.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import fields
from datetime import date, timedelta

from deployments.config import DEFAULT_CONFIG, ConfigError, load_config
from deployments.usage import RUNNING, UsageRecord
from deployments.usage_store import StoreError, UsageStore, open_store

SUMS = ("prompt", "cached", "billed", "delivered", "discarded", "recomputed")
_MAX_GAP_DAYS = 2
"""A request that writes nothing for so many days is over: while it runs it writes all the time."""

_FIELDS = {field.name for field in fields(UsageRecord)}


def read_records(store: UsageStore, day: str = "") -> Iterator[UsageRecord]:
    """All records, or those of requests that began on a day (UTC).

    Errors: StoreError, also for an object that is no list of records; ValueError for no day.
    """
    yield from _records_under(store, "") if not day else _begun_on(store, date.fromisoformat(day))


def _begun_on(store: UsageStore, day: date) -> list[UsageRecord]:
    """Records lie under the day of their writing, so those of other days are read too: of the day
    before, when what was asked for again had begun; and of later ones, for as long as there is
    something of that day's requests in them, with a gap at most.

    Cost:  memory for the last record of each attempt, and for the day before its requests' names.
    """
    began: dict[str, str] = {}  # request -> when its first record says
    last: dict[tuple[str, str, int], UsageRecord] = {}
    offset, gap = -1, 0
    while gap < _MAX_GAP_DAYS:
        has_ours = False
        for record in _records_under(store, _name(day, offset)):
            if record.request not in began and record.started >= _name(day, 1):
                continue  # it began later
            first = began.get(record.request, record.started)
            began[record.request] = min(first, record.started)
            if began[record.request].startswith(str(day)):
                has_ours = True
                key = record.request, record.connection, record.attempt
                if key not in last or _rank(record) > _rank(last[key]):
                    last[key] = record
        gap = gap + 1 if offset > 0 and not has_ours else 0
        offset += 1
    return [record for record in last.values() if began[record.request].startswith(str(day))]


def _records_under(store: UsageStore, prefix: str) -> Iterator[UsageRecord]:
    for name in store.names(prefix):
        yield from _parse(name, store.read(name))


def _name(day: date, later: int) -> str:
    return str(day + timedelta(days=later))


def settle(records: Iterable[UsageRecord]) -> list[UsageRecord]:
    """One record for each (request, attempt): the last, or the newest of one that never ended.

    Of an answer that was asked for again over another connection, those of the one that came
    furthest: it holds the tokens of the other as well.
    """
    answers: dict[str, dict[str, dict[int, UsageRecord]]] = {}
    for record in records:
        attempts = answers.setdefault(record.request, {}).setdefault(record.connection, {})
        known = attempts.get(record.attempt)
        if known is None or _rank(record) > _rank(known):
            attempts[record.attempt] = record
    return [
        record
        for connections in answers.values()
        for record in max((list(a.values()) for a in connections.values()), key=_reach)
    ]


def sum_by_tenant(records: Iterable[UsageRecord]) -> dict[str, dict[str, int]]:
    """Tenant -> tokens of each kind, and the number of requests. Doubles are passed over."""
    totals: dict[str, dict[str, int]] = {}
    seen: set[str] = set()
    for record in settle(records):
        sums = totals.setdefault(record.tenant, dict.fromkeys(("requests", *SUMS), 0))
        sums["requests"] += record.request not in seen
        seen.add(record.request)
        for name in SUMS:
            sums[name] += getattr(record, name)
    return totals


def _reach(attempts: list[UsageRecord]) -> tuple[int, str]:
    return sum(record.delivered for record in attempts), max(record.ended for record in attempts)


def _rank(record: UsageRecord) -> tuple[bool, str]:
    return record.status != RUNNING, record.ended


def _parse(name: str, body: bytes) -> Iterator[UsageRecord]:
    for number, line in enumerate(body.splitlines(), 1):
        try:
            values = json.loads(line)
            yield UsageRecord(**{key: values[key] for key in _FIELDS})
        except (ValueError, TypeError, KeyError) as exc:
            raise StoreError(f"{name}, line {number}: no usage record ({exc!r})") from exc


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m deployments.usage_report", description=__doc__)
    parser.add_argument("--config", default=str(DEFAULT_CONFIG), help="the service's file")
    parser.add_argument("--day", default="", help="requests that began on this day, UTC")
    given = parser.parse_args(arguments)
    try:
        config = load_config(given.config)
        if not config.usage.root:
            raise ConfigError(f"{given.config}: usage.root is empty: there are no records")
        store = open_store(config.usage.root, config.usage_s3().options())
        totals = sum_by_tenant(read_records(store, given.day))
    except (ConfigError, StoreError, ValueError, OverflowError) as exc:
        print(exc, file=sys.stderr)
        return 1
    for tenant, sums in sorted(totals.items()):
        print(json.dumps({"tenant": tenant} | sums))
    return 0


if __name__ == "__main__":
    sys.exit(main())
