"""What a loader may do with a hostile folder, held for one case or for many.

`python -m tests.adapter_store.hostile.run --count N` runs cases one after the other in this
process and prints one JSON object; exit code 1 if the loader did what it may not. `Bench.run`
is one case: through the source, the format and the host tier as a store would, and the format alone
once more. Allowed is a refusal that names what is at fault, or a load that is right; within time
and memory, with nothing left behind and no file read or written elsewhere.
Not here: what the folders are (folders).
"""

import argparse
import faulthandler
import json
import logging
import os
import shutil
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from adapter_store.contents import KnownContents
from adapter_store.errors import AdapterError, AdapterUnavailable
from adapter_store.extras import NO_EXTRAS
from adapter_store.formats.extras_files import BaseTokens, read_extras
from adapter_store.formats.extras_process import MAX_MEMORY_BYTES
from adapter_store.formats.registry import load_adapter
from adapter_store.loader import AdapterLoader
from adapter_store.ref import AdapterRef
from adapter_store.sources.source import S3Options
from adapter_store.weights import AdapterWeights, LoraTarget
from tests.adapter_store.hostile.archives import CANARY
from tests.adapter_store.hostile.draft import WEIGHTS
from tests.adapter_store.hostile.folders import Case, make_case, valid_case, whole_case, words_of
from tests.adapter_store.hostile.good_files import file_bytes, good_files, write_base
from tests.adapter_store.hostile.inputs import MAX_MESSAGE_CHARS, MAX_RANK, check_values
from tests.adapter_store.hostile.oracle import ExtrasOracle
from tests.adapter_store.hostile.watch import MeteredCache, num_open_files, status_bytes, the_eyes
from tests.adapter_store.scripted_s3 import ScriptedS3, start_scripted_s3
from tests.adapter_store.tiny_adapters import TARGETS, write_peft_folder

MAX_BYTES = 4 << 30  # the host tier's default
MAX_PEAK_BYTES = 256 << 20
MAX_SECONDS = 5.0
HANG_S = 120.0
S3_SHARE = 10  # one of so many goes through S3 too
_ROOM = str(Path(__file__).parents[3] / "adapter_store")
_AWS = str(Path.home() / ".aws")  # boto looks there
_PLACES = tuple(
    {
        _ROOM,
        sys.prefix,
        sys.base_prefix,
        sysconfig.get_path("stdlib"),
        "/proc",
        "/sys",
        "/dev/null",
        _AWS,
    }
)


@dataclass(frozen=True)
class Outcome:
    """refusal: the reason, empty = it was loaded; peak_bytes: memory over what was there before,
    copies on disk or tmpfs included; seconds: of the process' CPU, by the slowest of the ways."""

    refusal: str
    message: str
    peak_bytes: int
    seconds: float


class Fault(AssertionError):
    """The loader did what it may not."""


class Bench:
    """A loader with a host tier of its own below `root`, and the folders that it is given."""

    def __init__(self, root: Path, s3: ScriptedS3 | None = None) -> None:
        self._root, self._s3 = root.resolve(), s3
        self._cache = MeteredCache(self._root / "tier", MAX_BYTES)
        options = S3Options(
            endpoint_url=s3.endpoint_url if s3 else "", region="us-east-1", access_key="key",
            secret_key="secret", attempts=1,
        )  # fmt: skip
        base = write_base(self._root / "base")
        self._loader = AdapterLoader(
            TARGETS, torch.float32, self._cache, MAX_RANK, options, self._load, KnownContents(),
            base,
        )  # fmt: skip
        self._base, self._oracle = BaseTokens(base), ExtrasOracle(base)
        assert MAX_MEMORY_BYTES <= MAX_PEAK_BYTES  # of the process that reads what lies beside
        outside = write_peft_folder(self._root / "outside", 1)
        for name, said in good_files().items():
            (outside / name).write_bytes(file_bytes(said))
        whole = self.run(whole_case())
        assert not whole.refusal and self._extras.chat_template, whole.message
        for form in ("linear", "flat", "3-D", "per expert"):  # imports, and what is kept for ever
            self.run(valid_case(form))

    def close(self) -> None:
        self._cache.close()
        self._oracle.close()

    def run(self, case: Case) -> Outcome:
        """Load it in all ways. Errors: Fault."""
        folder = self._root / f"case-{case.number}"
        try:
            case.write(folder)
            outcome = self._watched(case, folder)
        except Fault:
            raise
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            raise Fault(f"{_title(case)}: {type(error).__name__}: {str(error)[:500]}") from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            for path in (self._cache.folder / "packed").iterdir():
                path.unlink()
        self._judge(case, outcome)
        return outcome

    def _watched(self, case: Case, folder: Path) -> Outcome:
        eyes = the_eyes()
        eyes.strange.clear()
        before, self._cache.copied_bytes = num_open_files(), 0
        Path("/proc/self/clear_refs").write_text("5")  # the peak from here on
        self._extras = NO_EXTRAS
        self._idle, self._seconds = status_bytes("VmRSS"), 0.0
        # The cache looks at its own folder; a packed file is mapped from there.
        own = (folder, self._cache.folder, self._root / "base")
        eyes.folder, eyes.allowed = folder, (*(str(path) + os.sep for path in own), *_PLACES)
        if case.draft.meanwhile is not None:
            eyes.trigger = (str(folder / WEIGHTS), lambda: case.draft.meanwhile(folder))
        try:
            refusal = self._through_all(case, folder)
        finally:
            eyes.allowed = eyes.trigger = None
        peak = status_bytes("VmHWM") - self._idle + self._cache.copied_bytes
        if not refusal[0] and case.draft.meanwhile is None:
            self._oracle.check(folder, self._extras)
            self._oracle.render(self._extras)
        if eyes.strange:
            raise Fault(f"{_title(case)}: opened {eyes.strange[:3]}")
        if num_open_files() != before:
            raise Fault(f"{_title(case)}: {before} became {num_open_files()}")
        left = [p for n in ("scratch", "lock") for p in (self._cache.folder / n).iterdir()]
        if left:
            raise Fault(f"{_title(case)}: left {left}")
        if Path(CANARY).exists():
            raise Fault(f"{_title(case)}: code of a pickle ran")
        return Outcome(*refusal, peak, self._seconds)

    def _through_all(self, case: Case, folder: Path) -> tuple[str, str]:
        """(reason, message) of the first of the ways, empty if it is loaded; all must come to the
        same."""
        ways = [self._timed(lambda: self._through_loader(AdapterRef("hostile", str(folder))))]
        if case.draft.meanwhile is not None:
            return ways[0]
        # The format by itself; pickles, which an operator may allow, as if one had.
        allow_pickle = case.draft.makers.get(WEIGHTS, _nothing) is None
        options = {"max_rank": MAX_RANK, "allow_pickle": allow_pickle}
        ways.append(self._timed(lambda: self._through_formats(folder, options)))
        if self._s3 is not None and case.number % S3_SHARE == 0 and not case.draft.makers:
            bucket = {f"b/{case.number}/{p.name}": p.read_bytes() for p in folder.iterdir()}
            self._s3.objects = bucket
            ref = AdapterRef("hostile", f"s3://b/{case.number}")
            ways.append(self._timed(lambda: self._through_loader(ref)))
        if len({reason == "" for reason, _ in ways}) > 1:
            raise Fault(f"{_title(case)}: the ways differ: {ways}")
        return ways[0]

    def _timed(self, load: Callable[[], object]) -> tuple[str, str]:
        start = _processor_s()
        try:
            load()
        except AdapterError as error:
            return getattr(error, "reason", type(error).__name__), str(error)
        finally:
            self._seconds = max(self._seconds, _processor_s() - start)
        return "", ""

    def _through_loader(self, ref: AdapterRef) -> None:
        found = self._loader.load(ref)
        packed = self._loader.open(found.digest)
        assert packed is not None
        with packed:
            packed.check_data()
            assert packed.extras == found.extras
        self._extras = found.extras

    def _through_formats(self, folder: Path, options: dict[str, Any]) -> None:
        """What lies beside first, as the loader does, which reads that in a process of its own."""
        extras = read_extras(folder, self._base)
        self._load(folder, TARGETS, **options)
        assert extras == self._extras

    def _load(self, folder: Path, targets: Sequence[LoraTarget], **options: Any) -> AdapterWeights:
        """`load_adapter`, and what it gives against another reader of the same bytes."""
        weights = load_adapter(folder, targets, **options)
        check_values(folder, weights)
        return weights

    def _judge(self, case: Case, outcome: Outcome) -> None:
        title = _title(case)
        if outcome.refusal:
            words = words_of(case)
            folder = f"case-{case.number}"
            if "failed: " in outcome.message or outcome.refusal == AdapterUnavailable.__name__:
                raise Fault(f"{title}: not judged: {outcome.message[:500]}")
            if not outcome.message.isprintable() or len(outcome.message) > MAX_MESSAGE_CHARS:
                raise Fault(f"{title}: no message for a log: {outcome.message[:500]!r}")
            if not any(word in outcome.message for word in words) and folder not in outcome.message:
                raise Fault(f"{title}: names nothing: {outcome.message[:500]}")
        elif case.must_refuse:
            raise Fault(f"{title}: was loaded")
        if outcome.peak_bytes > MAX_PEAK_BYTES:
            raise Fault(f"{title}: took {outcome.peak_bytes >> 20} MiB, {outcome.message[:200]}")
        if outcome.seconds > MAX_SECONDS:
            raise Fault(f"{title}: took {outcome.seconds:.1f} s, {outcome.message[:200]}")


def _nothing(at: Path) -> None: ...


def _processor_s() -> float:
    """Of this process and of those that it started and that are over."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def _title(case: Case) -> str:
    return f"case {case.number} ({' + '.join(case.mutations) or 'valid'})"


def run_cases(bench: Bench, numbers: Sequence[int], seconds: float) -> dict[str, Any]:
    """Many cases; a summary in plain values. seconds: no new case begins after so long."""
    refusals: Counter[str] = Counter()
    by_mutation: Counter[str] = Counter()
    faults: list[str] = []
    most, slowest = (0, ""), (0.0, "")
    idle = status_bytes("VmRSS")
    begin, done, loaded = time.monotonic(), 0, 0
    for number in numbers:
        if time.monotonic() - begin > seconds:
            break
        case = make_case(number)
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        done += 1
        by_mutation.update(case.mutations)
        try:
            outcome = bench.run(case)
        except Fault as fault:
            faults.append(str(fault))
            continue
        finally:
            faulthandler.cancel_dump_traceback_later()
        refusals[outcome.refusal] += bool(outcome.refusal)
        loaded += not outcome.refusal
        most = max(most, (outcome.peak_bytes, _title(case)))
        slowest = max(slowest, (outcome.seconds, _title(case)))
    return {
        "cases": done,
        "loaded": loaded,
        "refused": dict(refusals.most_common()),
        "peak_mib_over_idle": round(most[0] / (1 << 20), 1),
        "peak_at": most[1],
        "kept_mib_at_the_end": round((status_bytes("VmRSS") - idle) / (1 << 20), 1),
        "slowest_s": round(slowest[0], 2),
        "slowest_at": slowest[1],
        "wall_s": round(time.monotonic() - begin, 1),
        "mutations": len(by_mutation),
        "num_faults": len(faults),
        "faults": faults[:30],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; see the head of the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin no case after so long")
    args = parser.parse_args(argv)
    logging.getLogger("adapter_store").addHandler(logging.NullHandler())
    logging.getLogger("adapter_store").propagate = False
    with tempfile.TemporaryDirectory(prefix="hostile-") as root, start_scripted_s3() as s3:
        bench = Bench(Path(root), s3)
        try:
            numbers = range(args.first, args.first + args.count)
            summary = run_cases(bench, numbers, args.seconds)
        finally:
            bench.close()
    print(json.dumps(summary, indent=1))
    return 1 if summary["num_faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
