"""What was measured, and what it comes to: a log of times, and from it a file of tiles.

The log has a line a measurement, so that a run that was cut off goes on where it stopped; times of
other sources or other compilers are not believed. Not here: measuring (command.py), reading a file
of tiles (kernels/tiling.py).
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kernels.tiling import KEYS, MEASURED, OPS, Tiles, parse_tiles, read_json
from kernels.tune.problems import Key

# Tiles this close to the fastest count as fast, and those that most keys share are taken.
SLACK = 0.02
Entries = dict[Key, Tiles]


@dataclass(frozen=True)
class Run:
    """Where times come from. source: a digest of the kernels' files."""

    gpu: str
    torch: str
    triton: str
    source: str
    commit: str = "unknown"
    utc: str = ""

    def alike(self, other: "Run") -> bool:
        """Whether times of the other are times of this."""
        mine, theirs = ((run.gpu, run.torch, run.triton, run.source) for run in (self, other))
        return mine == theirs


@dataclass(frozen=True)
class Measured:
    """One candidate at one problem: microseconds a call, infinite if `wrong` says why not."""

    op: str
    problem: str
    key: Key
    tiles: Tiles
    us: float
    wrong: str = ""


@dataclass
class Log:
    """Everything measured under runs alike, and a file that each new line goes to at once."""

    path: Path
    run: Run
    lines: list[Measured] = field(default_factory=list)

    def __post_init__(self) -> None:
        alike = False
        for number, text in enumerate(self.path.read_text().splitlines() if self._is() else ()):
            try:
                line = json.loads(text)
                if "run" in line:
                    alike = Run(**line["run"]).alike(self.run)
                elif alike:
                    key, tiles = tuple(line.pop("key")), Tiles(**line.pop("tiles"))
                    us = math.inf if line["us"] is None else line["us"]
                    self.lines.append(Measured(**{**line, "key": key, "tiles": tiles, "us": us}))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{self.path.name}, line {number + 1}: {error}") from error
        self._known = {(m.op, m.problem, m.tiles): m for m in self.lines}
        self._append({"run": asdict(self.run)})

    def find(self, op: str, problem: str, tiles: Tiles) -> Measured | None:
        return self._known.get((op, problem, tiles))

    def add(self, measured: Measured) -> None:
        self.lines.append(measured)
        self._known[measured.op, measured.problem, measured.tiles] = measured
        us = None if math.isinf(measured.us) else round(measured.us, 3)
        self._append({**asdict(measured), "us": us})

    def _is(self) -> bool:
        return self.path.is_file()

    def _append(self, line: dict[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def choose(measured: Iterable[Measured]) -> Entries:
    """The tiles of one op for every key.

    Where several problems have one key, the least mean slowdown against each one's fastest counts.
    """
    times: dict[Key, dict[str, dict[Tiles, float]]] = {}
    for m in measured:
        if not m.wrong:
            times.setdefault(m.key, {}).setdefault(m.problem, {})[m.tiles] = m.us
    slowdown = {key: _slowdown(list(by_problem.values())) for key, by_problem in times.items()}
    fast = {
        key: [t for t, slow in of.items() if slow <= (1 + SLACK) * min(of.values())]
        for key, of in slowdown.items()
    }
    votes = Counter(tiles for some in fast.values() for tiles in some)
    return {
        key: max(some, key=lambda t: (votes[t], -slowdown[key][t]))  # noqa: B023
        for key, some in fast.items()
    }


def _slowdown(problems: list[dict[Tiles, float]]) -> dict[Tiles, float]:
    common = [tiles for tiles in problems[0] if all(tiles in of for of in problems)]
    if not common:
        problems = problems[:1]
    return {
        tiles: sum(of[tiles] / min(of.values()) for of in problems) / len(problems)
        for tiles in common or problems[0]
    }


def prune(entries: Entries) -> Entries:
    """Without the entries that change no look-up at any of the keys."""
    keys = sorted(entries)
    logs = {key: tuple(math.log2(n) for n in key) for key in keys}
    order = {
        key: sorted(
            keys,
            key=lambda other: (
                sum(abs(a - b) for a, b in zip(logs[key], logs[other], strict=True)),  # noqa: B023
                other,
            ),
        )
        for key in keys
    }
    kept = set(keys)
    for gone in keys:
        kept.discard(gone)
        for key in keys:
            near = next((other for other in order[key] if other in kept), None)
            if near is None or entries[near] != entries[key]:
                kept.add(gone)
                break
    return {key: entries[key] for key in keys if key in kept}


def merge(old: Mapping[str, Any], log: Log, complete: Iterable[str]) -> dict[str, Any]:
    """The old file's content with what was measured in place of it.

    complete  ops of which all was measured: entries that nobody measured go. Others stay beside.
    """
    done, parsed = set(complete), parse_tiles(old, "the file so far")
    stamps: dict[str, list[dict[str, Any]]] = dict(old.get(MEASURED, {}))
    new: dict[str, Any] = {MEASURED: stamps}
    for op in OPS:
        chosen = choose(m for m in log.lines if m.op == op)
        if not chosen:
            new[op] = old[op]
            continue
        keep = op not in done or op in stamps
        others: Entries = {(key[0], key[1], key[2]): tiles for key, tiles in parsed[op]}
        kept = {key: tiles for key, tiles in others.items() if keep and key not in chosen}
        stamp = {name: value for name, value in asdict(log.run).items() if name != "gpu"}
        stamps[op] = [s for s in stamps.get(op, ()) if kept and s["source"] != stamp["source"]]
        stamps[op].append({**stamp, "keys": len(chosen)})
        tried = [*kept.values(), *(m.tiles for m in log.lines if m.op == op)]
        new[op] = _as_json(prune({**kept, **chosen}), tried)
    return new


def _as_json(entries: Entries, tried: Iterable[Tiles]) -> list[dict[str, int]]:
    """With those fields alone that any of the tiles tried has otherwise than by default."""
    plain = asdict(Tiles())
    used = {
        name for tiles in tried for name, value in asdict(tiles).items() if value != plain[name]
    }
    return [
        dict(zip(KEYS, key, strict=True)) | {n: v for n, v in asdict(tiles).items() if n in used}
        for key, tiles in entries.items()
    ]


def write_tiles(path: Path, content: Mapping[str, Any]) -> None:
    """A line an entry. Errors: ValueError if `tiles_for` could not read it (nothing is written)."""
    parse_tiles(content, path.name)
    parts = []
    for name, value in content.items():
        if name == MEASURED:
            lines, ends = [f'"{op}": {json.dumps(runs)}' for op, runs in value.items()], "{}"
        else:
            lines, ends = [json.dumps(entry) for entry in value], "[]"
        inner = ",\n".join(f"    {line}" for line in lines)
        parts.append(f'  "{name}": {ends[0]}\n{inner}\n  {ends[1]}')
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_text("{\n" + ",\n".join(parts) + "\n}\n")
    assert read_json(fresh) == dict(content), "the written file does not say what was meant"
    fresh.replace(path)
