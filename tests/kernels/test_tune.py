"""The tuner without a GPU: candidates that can run, kernels compiled ahead, what a log comes to.

Not here: reading a file of tiles (test_tiling.py), real times (they need the GPU).
"""

import dataclasses
import json
import math
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

import kernels.tiling as tiling
import kernels.tune.command as command
import kernels.tune.inputs  # noqa: F401  (before h200_host looks for it)
from kernels.lora_decode import MAX_PAIRS, MAX_TOKENS
from kernels.op import interpreting
from kernels.tiling import FOLDER, OPS, SHARED_BYTES, Tiles, load_tiles, parse_tiles, tiles_for
from kernels.tune.command import Job, Tuner, complete_ops, main, plan, summarize
from kernels.tune.compiling import compile_all, compile_recorded, no_device, record_kernels
from kernels.tune.files import Log, Measured, Run, choose, merge, prune, write_tiles
from kernels.tune.inputs import Batch, make_lora
from kernels.tune.ops import TUNED
from kernels.tune.problems import (
    REACH,
    SHAPES,
    ModelShape,
    Problem,
    as_shape,
    lora_products,
)
from tests.kernels.aot import SHARED_LIMIT_BYTES, _read_usage

RUN = Run("a GPU", "2.0", "3.0", "abc", "c0ffee", "2026-01-01T00:00:00Z")
CPU = torch.device("cpu")
RANKS = (8, 16, 32, 64)
SMALL_MOE = ModelShape(64, 32, 16, 32, 4, 2, "packed")
NAMES = [op.name for op in TUNED]
compiled_alone = pytest.mark.skipif(interpreting(), reason="interpreted functions do not compile")


@pytest.mark.parametrize("op", TUNED, ids=NAMES)
def test_what_ships_for_the_h200_was_measured_at_every_shape_and_rank(op: command.TunedOp) -> None:
    wanted = {op.key(p) for shape in SHAPES.values() for p in op.problems(shape, RANKS)}
    file = json.loads((FOLDER / "NVIDIA_H200.json").read_text())
    assert sum(run["keys"] for run in file[tiling.MEASURED][op.name]) == len(wanted) > 0


@pytest.mark.parametrize("op", TUNED, ids=NAMES)
def test_every_problem_has_candidates_that_fit(op: command.TunedOp) -> None:
    assert op.name in OPS
    seen = 0
    for name, shape in SHAPES.items():
        for problem in op.problems(shape, RANKS):
            seen += 1
            some = list(op.candidates(problem))
            assert 3 <= len(some) == len(set(some)), (name, str(problem))
            for tiles in some:
                if "lora" in op.name or "decode" in op.name or op.name == "linear_sum":
                    continue  # a rank wide, or in registers: compiled below
                rows = 64 if op.name == "linear_dot" else 128
                assert tiles.shared_bytes(rows) <= SHARED_BYTES, (str(problem), tiles)
    assert seen


def test_the_plan_covers_every_width_of_the_models() -> None:
    jobs = plan(list(SHAPES), RANKS, NAMES)
    assert len({(job.ops[0].make, job.problem) for job in jobs}) == len(jobs)
    for name, shape in SHAPES.items():
        mine = plan([name], (32,), NAMES)
        ops = {op.name for job in mine for op in job.ops}
        want = {"lora_shrink", "lora_expand", "decode_shrink", "decode_expand", "linear_dot",
                "linear_sum"}  # fmt: skip
        kind = {"packed": "moe_gemm_packed", "dense": "moe_gemm"}[shape.experts]
        assert ops == (want | {kind} if shape.num_experts else want)
        widths = {job.problem.in_ for job in mine if job.problem.lora_rank}
        assert widths == {shape.hidden, shape.q_out, shape.inner}
    # An expand is measured after its shrink, in one job with it.
    pairs = [[op.name for op in job.ops] for job in jobs if job.problem.lora_rank]
    assert all(p in (["decode_shrink", "decode_expand"], ["lora_shrink", "lora_expand"])
               for p in pairs)  # fmt: skip
    # Each path is asked for what it serves, and beyond the limit between them no further than said.
    for job in jobs:
        limits = MAX_PAIRS if job.problem.of_experts else MAX_TOKENS
        if job.ops[0].name == "decode_shrink":
            assert job.problem.rows <= REACH * limits[max(16, job.problem.lora_rank)]
        elif job.ops[0].name == "lora_shrink":
            assert REACH * job.problem.rows > limits[max(16, job.problem.lora_rank)]


@pytest.mark.parametrize("reach", [1, 4])
def test_both_paths_of_lora_are_tuned_on_either_side_of_their_limit(
    reach: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kernels.tune.problems.REACH", reach)
    decode, four = (
        {p for p in lora_products(SHAPES["gpt-oss-20b"], (32,), decode) if p.product == "down"}
        for decode in (True, False)
    )
    limit = MAX_PAIRS[32]
    assert max(p.rows for p in decode) == reach * limit
    assert min(p.rows for p in four) == (2 * limit if reach == 1 else limit // 2)


def recorded_candidates(problem: Problem, op: command.TunedOp, tiles: Tiles) -> list[object]:
    made: list[Batch] = []
    first = record_kernels(lambda: made.append(op.make(problem, CPU, False)))
    with command.force_tiles({op.name: tiles}):
        return [*record_kernels(made[0].calls[0]), *first][:2]


@compiled_alone
@pytest.mark.parametrize("op", TUNED, ids=NAMES)
@pytest.mark.usefixtures("h200_host")
def test_a_sample_of_candidates_compiles_for_the_h200(op: command.TunedOp) -> None:
    """Of each op the candidates with the largest tiles, at the largest rank."""
    shape = next(s for s in SHAPES.values() if list(op.problems(s, (64,))))
    problems = list(op.problems(shape, (64,)))
    for problem in (problems[0], problems[-1]):
        some = sorted(op.candidates(problem), key=lambda t: t.block_n * t.block_k / t.num_warps)
        kernels = recorded_candidates(problem, op, some[-1])
        kernel = kernels[1 if op.name.endswith("expand") else 0]
        compiled = compile_recorded(kernel)  # type: ignore[arg-type]
        usage = _read_usage(compiled.asm["cubin"], int(compiled.metadata.shared))
        assert usage.shared_bytes <= SHARED_LIMIT_BYTES, (str(problem), some[-1], usage)
        threads = 32 * compiled.metadata.num_warps
        assert usage.registers * threads <= 65536, (str(problem), some[-1], usage)


@compiled_alone
@pytest.mark.usefixtures("h200_host")
def test_what_is_compiled_ahead_is_what_a_launch_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    problem = Problem("o", 128, (64,), 2, 8)
    made: list[Batch] = []
    kernels = record_kernels(lambda: made.append(make_lora(problem, CPU, False, True)))
    assert not kernels  # no worklist
    kernels = record_kernels(made[0].calls[0])
    assert [k.function for k in kernels] == ["_shrink_kernel", "_expand_kernel"]
    compile_recorded(kernels[0])
    assert record_kernels(made[0].calls[0]) == kernels  # whatever this process has compiled
    assert set(compile_all(kernels, command.NO_TARGET, 1, time.monotonic() + 100)) == set(kernels)
    before = sorted(p.name for p in tmp_path.iterdir())
    assert before
    with no_device(name="launching"), pytest.raises(AttributeError, match="launcher_cls"):
        made[0].calls[0]()  # reaches the launch of the first kernel
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def fake_jobs() -> list[Job]:
    """A job of every kind, small enough for the interpreter."""
    experts = {"num_experts": 4, "top_k": 2}
    jobs = []
    for op in TUNED:
        if op.name.startswith("moe_gemm"):
            kind = "packed" if "packed" in op.name else "dense"
            for product, out in (("gate_up", 48), ("down", 32)):
                jobs.append(Job(Problem(product, 64, (out,), 3, 0, **experts, experts=kind), [op]))
        elif op.name == "linear_dot":
            jobs.append(Job(Problem("o", 64, (520,), 5), [op]))
        elif op.name == "linear_sum":
            jobs.append(Job(Problem("router", 64, (24,), 3), [op]))
        elif op.name.endswith("shrink"):
            expand = next(o for o in TUNED if o.name == op.name.replace("shrink", "expand"))
            for product, outs in (("gate_up", (48,)), ("down", (32,)), ("qkv", (32, 16, 16))):
                of_experts = experts if product != "qkv" else {}
                jobs.append(Job(Problem(product, 64, outs, 3, 8, **of_experts), [op, expand]))
    return jobs


SLOW, FAST = Tiles(16, 32, num_stages=1), Tiles(32, 32, num_stages=1)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every op has two candidates and no others, every batch one layer."""
    monkeypatch.setattr(Tuner, "candidates", lambda self, op, problem: [SLOW, FAST])
    monkeypatch.setattr("kernels.tune.inputs.num_layers", lambda problem, layer_bytes: 1)


def forced_fast() -> set[str]:
    """Ops that have the fast tiles at the moment."""
    return {op for op, tiles in tiling._forced.items() if tiles == FAST}


def run_all(tuner: Tuner, jobs: list[Job]) -> None:
    """Both rounds, as if all kernels were there: the interpreter needs none."""
    for job in jobs:
        job.needs.update({(op.name, tiles): [] for op in job.ops for tiles in (SLOW, FAST)})
    for round_idx in (0, 1):
        tuner.measure_round(jobs, round_idx, {})


@pytest.mark.interp
@pytest.mark.slow
@pytest.mark.usefixtures("few")
def test_a_dry_run_writes_the_fastest_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    jobs, timed = fake_jobs(), list[set[str]]()

    def measure(batch: Batch) -> float:
        timed.append(forced_fast())
        return 10.0 / (1 + len(timed[-1]))

    tuner = Tuner(Log(tmp_path / "log.jsonl", RUN), measure, CPU, time.monotonic() + 100)
    run_all(tuner, jobs)
    assert not [m for m in tuner.log.lines if m.wrong], tuner.log.lines
    assert len(tuner.log.lines) == len(timed) == sum(2 * len(job.ops) for job in jobs)
    # While an expand is measured, its shrink has the best tiles.
    assert {"decode_shrink", "decode_expand"} in timed and {"decode_expand"} not in timed
    assert complete_ops(tuner, jobs) == sorted(NAMES)
    old = json.loads((FOLDER / "default.json").read_text())
    write_tiles(tmp_path / "a_GPU.json", merge(old, tuner.log, complete_ops(tuner, jobs)))
    got = parse_tiles(json.loads((tmp_path / "a_GPU.json").read_text()), "a_GPU.json")
    for op in NAMES:
        assert {tiles.block_n for _, tiles in got[op]} == {32}, op
    assert all("x2.00 at most" in line for line in summarize(tuner, jobs) if "shrink" in line)

    again = Tuner(Log(tmp_path / "log.jsonl", RUN), measure, CPU, time.monotonic() + 100)
    before = len(timed)
    run_all(again, fake_jobs())
    assert len(timed) == before and len(again.log.lines) == before
    other = dataclasses.replace(RUN, source="def")
    fresh = Tuner(Log(tmp_path / "log.jsonl", other), measure, CPU, time.monotonic() - 1)
    run_all(fresh, fake_jobs())
    assert len(timed) == before and not fresh.log.lines  # neither believed nor measured: no time


@pytest.mark.interp
@pytest.mark.usefixtures("few")
def test_a_candidate_that_computes_wrong_is_never_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wide one is fastest, and its values are off."""
    honest = Batch.error

    def error(self: Batch, got: torch.Tensor, want: torch.Tensor) -> float:
        return honest(self, got + 0.1 if forced_fast() else got, want)

    monkeypatch.setattr(Batch, "error", error)
    jobs = [job for job in fake_jobs() if job.ops[0].name == "moe_gemm"]
    log = Log(tmp_path / "log.jsonl", RUN)
    tuner = Tuner(log, lambda batch: 5.0 if forced_fast() else 10.0, CPU, time.monotonic() + 100)
    run_all(tuner, jobs)
    assert {m.tiles.block_n for m in tuner.log.lines if "off by" in m.wrong} == {32}
    assert {t.block_n for t in choose(tuner.log.lines).values()} == {16}


@compiled_alone
@pytest.mark.usefixtures("h200_host", "few")
def test_only_what_is_compiled_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what the compiler refused is written down with its words."""
    jobs = [job for job in fake_jobs() if job.ops[0].name == "decode_shrink"]
    tuner = Tuner(Log(tmp_path / "log.jsonl", RUN), lambda batch: 1.0, CPU, time.monotonic() + 100)
    first = list(tuner.record(jobs, 0))
    assert len(first) == len(set(first)) and {k.function for k in first} == {
        "_shrink_kernel", "_expand_kernel", "_expand_act_kernel",
    }  # fmt: skip
    for job in jobs:
        assert set(job.needs) == {("decode_shrink", SLOW), ("decode_shrink", FAST)}
        assert all(set(needs) <= set(first) for needs in job.needs.values())
    monkeypatch.setattr(Tuner, "_try", lambda self, batch, want: ("", 1.0))
    for job in jobs:
        make = partial(no_reference, job.ops[0].make)
        job.ops[0] = dataclasses.replace(job.ops[0], make=make)
    tuner.measure_round(jobs, 0, {})
    assert not tuner.log.lines  # nothing was compiled
    broken = jobs[0].needs["decode_shrink", SLOW][0]
    tuner.measure_round(jobs, 0, dict.fromkeys(first, "") | {broken: "no registers left"})
    wrong = {m.wrong for m in tuner.log.lines if m.tiles == SLOW}
    assert len(tuner.log.lines) == 2 * len(jobs) and "no registers left" in wrong
    tuner.end = time.monotonic() - 1
    assert not list(tuner.record(jobs, 1))


def no_reference(
    make: Callable[..., Batch], problem: Problem, device: torch.device, filled: bool
) -> Batch:
    """A batch whose reference is not computed: nothing is launched that it could judge."""
    made: list[Batch] = []
    record_kernels(lambda: made.append(make(problem, device, False)))
    return dataclasses.replace(made[0], reference=lambda: torch.zeros(1))


def measured(key: tuple[int, int, int], times: dict[int, float], problem: str = "p") -> list:
    """Lines of one op by block_n; infinite times are failures."""
    return [
        Measured("lora_expand", problem, key, Tiles(n), us, "" if math.isfinite(us) else "no")
        for n, us in times.items()
    ]


def test_what_is_chosen() -> None:
    inf = math.inf
    lines = measured((8, 64, 8), {32: 10.0, 64: 5.0, 128: inf})
    assert choose(lines) == {(8, 64, 8): Tiles(64)}
    # Within the noise of the fastest, what other keys share is taken.
    lines += measured((16, 64, 8), {32: 4.0, 64: 4.04, 128: inf})
    assert choose(lines)[16, 64, 8] == Tiles(64)
    lines += measured((32, 64, 8), {32: 4.0, 64: 4.2})
    assert choose(lines)[32, 64, 8] == Tiles(32)
    # Two problems under one key: the least mean slowdown (1.25 against 1.5).
    lines = measured((8, 64, 8), {32: 10.0, 64: 20.0}, "a")
    lines += measured((8, 64, 8), {32: 3.0, 64: 2.0}, "b")
    assert choose(lines) == {(8, 64, 8): Tiles(32)}
    assert choose(measured((8, 64, 8), {32: inf})) == {}


@pytest.mark.parametrize("seed", range(4))
def test_pruning_changes_no_look_up(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    entries = {
        (1 << rng.randrange(12), 1 << rng.randrange(6, 13), 1 << rng.randrange(3, 7)): Tiles(
            rng.choice((32, 64))
        )
        for _ in range(60)
    }
    kept = prune(entries)
    assert set(kept) < set(entries)
    monkeypatch.setattr("kernels.tiling.load_tiles", lambda gpu: {"lora_expand": [*kept.items()]})
    for key, tiles in entries.items():
        assert tiles_for("lora_expand", as_shape(key), f"seed {seed}") == tiles


def test_a_file_says_how_it_was_measured_and_keeps_what_was_not(tmp_path: Path) -> None:
    old = json.loads((FOLDER / "default.json").read_text())
    log = Log(tmp_path / "log.jsonl", RUN)
    for line in measured((7, 64, 8), {32: 10.0, 64: 5.0}):
        log.add(line)
    new = merge(old, log, [])
    assert new["moe_gemm"] == old["moe_gemm"]
    assert len(new["lora_expand"]) == 1 + len(old["lora_expand"])  # part of it measured: all stay
    new = merge(old, log, ["lora_expand"])
    assert [e["block_n"] for e in new["lora_expand"]] == [64]
    stamp = {"torch": "2.0", "triton": "3.0", "source": "abc", "commit": "c0ffee", "keys": 1}
    assert new["measured"] == {"lora_expand": [stamp | {"utc": "2026-01-01T00:00:00Z"}]}
    path = tmp_path / "GPU.json"
    write_tiles(path, new)
    assert json.loads(path.read_text()) == new and "\n    {" in path.read_text()
    # Another source adds to what was measured before, and says so.
    second = Log(tmp_path / "log2.jsonl", dataclasses.replace(RUN, source="def"))
    for line in measured((4096, 64, 8), {32: 1.0, 64: 5.0}):
        second.add(line)
    both = merge(new, second, ["lora_expand"])
    assert [s["source"] for s in both["measured"]["lora_expand"]] == ["abc", "def"]
    assert [e["block_n"] for e in both["lora_expand"]] == [64, 32]


def test_an_invalid_file_is_not_written(tmp_path: Path) -> None:
    path, good = tmp_path / "GPU.json", json.loads((FOLDER / "default.json").read_text())
    write_tiles(path, good)
    bad = good | {"lora_expand": [{"rows": 1, "out": 1, "in": 1, "block_n": 48}]}
    with pytest.raises(ValueError, match=r"GPU.json: lora_expand\[0\]: block_n"):
        write_tiles(path, bad)
    assert json.loads(path.read_text()) == good


def test_a_damaged_log_is_refused_by_line(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    Log(path, RUN).add(measured((8, 64, 8), {32: 1.0})[0])
    assert len(Log(path, RUN).lines) == 1
    path.write_text(path.read_text() + '{"op": "lora\n')
    with pytest.raises(ValueError, match=r"log.jsonl, line 4"):
        Log(path, RUN)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--shape", "gpt-5"], "no such name: gpt-5; there are gpt-oss-20b"),
        (["--ops", "conv"], "no such name: conv"),
        (["--ranks", "12"], "multiple of 8 in 8..256, not 12"),
        (["--ranks", "512"], "multiple of 8 in 8..256, not 512"),
        (["--ranks", "x"], "--ranks are numbers"),
    ],
)
def test_the_command_refuses_by_name(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2 and words in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(SystemExit, match="torch sees none here"):
        main([])


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_a_small_tune_on_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command as a whole, on a model of small widths."""
    monkeypatch.setitem(SHAPES, "gpt-oss-20b", SMALL_MOE)
    monkeypatch.setattr("kernels.tune.problems.DECODE_TOKENS", (1, 64))
    monkeypatch.setattr("kernels.tune.problems.PREFILL_TOKENS", (128,))
    main(["--shape", "gpt-oss-20b", "--ranks", "8", "--out", str(tmp_path), "--seconds", "200"])
    (path,) = tmp_path.glob("*.json")
    content = json.loads(path.read_text())
    parse_tiles(content, path.name)
    (log,) = tmp_path.glob("*.jsonl")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    times = [line for line in lines if "us" in line]
    # The small model's experts are MXFP4; what the shipped file says of others stays.
    assert {line["op"] for line in times} == set(NAMES) - {"moe_gemm"} <= set(content["measured"])
    assert times and sum(line["us"] is None for line in times) < len(times) / 2
    load_tiles.cache_clear()
