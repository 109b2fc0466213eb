"""Adds usage records up: tokens by tenant, each attempt of each request once.

    python -m deployments.usage_report --config FILE [--day 2026-01-31]

prints one line of JSON a tenant. Not here: prices.
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
_FIELDS = {field.name for field in fields(UsageRecord)}


def read_records(store: UsageStore, day: str = "") -> Iterator[UsageRecord]:
    """All records, or those of requests that started on a day (UTC).

    Records lie under the day of their writing: of one day, the next one's are read too, for what
    ran over midnight. Errors: StoreError, also for an object that is no list of records.
    """
    days = [day, str(date.fromisoformat(day) + timedelta(days=1))] if day else [""]
    for prefix in days:
        for name in store.names(prefix):
            for record in _parse(name, store.read(name)):
                if record.started.startswith(day):
                    yield record


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
    parser.add_argument("--day", default="", help="requests that started on this day, UTC")
    given = parser.parse_args(arguments)
    try:
        config = load_config(given.config)
        if not config.usage.root:
            raise ConfigError(f"{given.config}: usage.root is empty: there are no records")
        store = open_store(config.usage.root, config.usage_s3().options())
        totals = sum_by_tenant(read_records(store, given.day))
    except (ConfigError, StoreError, ValueError) as exc:
        print(exc, file=sys.stderr)
        return 1
    for tenant, sums in sorted(totals.items()):
        print(json.dumps({"tenant": tenant} | sums))
    return 0


if __name__ == "__main__":
    sys.exit(main())
