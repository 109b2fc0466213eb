"""`python -m tests.adapter_store.fuzz_atheris --runs N`: libFuzzer looks for ways into the reader.

Coverage of adapter_store guides it. Where it begins is made anew from the numbers of
hostile.folders, and from the inputs of hostile.kept. It ends with libFuzzer's own exit code: 0, or
not 0 with the input that broke the reader, packed for KEPT_INPUTS there. Needs the package atheris,
which is for Linux alone (DEPENDENCIES.md). Not here: what may come of an input (inputs.load_bytes).
"""

import argparse
import subprocess
import sys
import tempfile
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

NUM_SEEDS = 400
NUM_FILES = 5  # that come before the weights
MAX_INPUT_BYTES = 16 << 10
LIMIT_S, LIMIT_MIB = 5, 2048


def main() -> int:
    """The command line. The search itself is a child, which libFuzzer ends without a clean-up."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--seconds", type=int, default=0, help="no longer than this; 0 = no limit")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if find_spec("atheris") is None:
        parser.error("needs atheris: pip install atheris")
    if args.folder:
        search(Path(args.folder), args.runs, args.seconds, args.seed)
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=_memory()) as folder:
        name = "tests.adapter_store.fuzz_atheris"
        command = [sys.executable, "-m", name, *sys.argv[1:], "--folder", folder]
        return subprocess.run(command).returncode


def search(root: Path, runs: int, seconds: int, seed: int) -> NoReturn:
    """Let libFuzzer search, in an empty folder; ends the process."""
    import atheris

    # Imported here: what is loaded before is not instrumented.
    with atheris.instrument_imports(include=["adapter_store"]):
        import_module("adapter_store.formats.peft")  # which is else imported late
        from tests.adapter_store.hostile import inputs, kept
        from tests.adapter_store.hostile.folders import make_case
        from tests.adapter_store.hostile.good_files import write_base

    for part in ("corpus", "folder"):
        (root / part).mkdir()
    base = write_base(root / "base")
    for number in range(NUM_SEEDS):
        draft = make_case(number).draft
        if not draft.makers and len(data := inputs.as_bytes(draft)) <= MAX_INPUT_BYTES:
            (root / "corpus" / str(number)).write_bytes(data)
    for number, known in enumerate(kept.KEPT_INPUTS):
        (root / "corpus" / f"kept-{number}").write_bytes(known.unpack())

    def test_one(data: bytes) -> None:
        try:
            inputs.load_bytes(root / "folder", data, base)
        except BaseException:
            print("input:", kept.pack(data), file=sys.stderr, flush=True)
            raise

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        # Mostly one part alone, with the lengths as they must be: a file that is wrong there is not
        # read any further.
        parts = split(data)
        chosen = seed % (len(parts) + 1)
        if chosen == len(parts):
            return bytes(atheris.Mutate(data, max_size))
        parts[chosen] = bytes(atheris.Mutate(parts[chosen], len(parts[chosen]) + 64))
        return join(parts)[:max_size]

    options = [
        f"-runs={runs}", f"-max_total_time={seconds}", f"-seed={seed}",
        f"-max_len={MAX_INPUT_BYTES}", f"-timeout={LIMIT_S}", f"-rss_limit_mb={LIMIT_MIB}",
        f"-artifact_prefix={root}/", "-print_final_stats=1",
    ]  # fmt: skip
    atheris.Setup([sys.argv[0], *options, str(root / "corpus")], test_one, custom_mutator=mutate)
    atheris.Fuzz()
    raise AssertionError("libFuzzer came back")


def split(data: bytes) -> list[bytes]:
    """[config, what lies beside ..., header, tensors] of an input of `load_bytes`."""
    parts = []
    for _ in range(NUM_FILES):
        end = 4 + int.from_bytes(data[:4], "little")
        parts.append(data[4:end])
        data = data[end:]
    end = 8 + int.from_bytes(data[:8], "little")
    return [*parts, data[8:end], data[end:]]


def join(parts: list[bytes]) -> bytes:
    """The other way round."""
    *files, header, tensors = parts
    heads = (len(part).to_bytes(4, "little") + part for part in files)
    return b"".join(heads) + len(header).to_bytes(8, "little") + header + tensors


def _memory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


if __name__ == "__main__":
    sys.exit(main())
