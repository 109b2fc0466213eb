"""The engine's benchmark on a tiny model: all of it but the profiler, and each rule by which a run
does not count. Floors against numbers worked out by hand."""

import csv
import itertools
import json
import statistics
import subprocess
import sys

import pytest

from tests.bench import engine as bench
from tests.bench import judge, judging
from tests.bench.client import Answer
from tests.bench.floors import (
    COPY_BYTES_PER_S,
    DENSE,
    GroupTime,
    dense_roles,
    group_kernels,
    group_of,
    step_bytes,
    table_rows,
)
from tests.bench.loops import Load, Run, arrival_times, make_requests, quantile, summarise
from tests.bench.results import ENGINE, append_rows
from tests.bench.shapes import GPT_OSS_20B, QWEN3_30B_A3B, QWEN3_32B, SHAPES, Shape
from tests.bench.test_rescoring import TINY
from tests.bench.workload import Wishes, adapter_values, prepare

TINY_BIG = TINY | {"vocab_size": 4000}


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(SHAPES, "tiny", Shape(TINY_BIG, 8, 4, 0.12))


@pytest.mark.timeout(400)
@pytest.mark.slow
def test_the_whole_bench_on_a_tiny_model(tiny, tmp_path, monkeypatch, capsys):
    words = ["engine", "--shape", "tiny", "--phases", "closed,open,rescore"]
    words += ["--adapters", "2", "--rank", "8", "--concurrency", "1,3", "--tokens-in", "20"]
    # So long that three clients overlap on a busy machine too: with 12 their experts were now and
    # then too few to count.
    words += ["--tokens-out", "40", "--work", str(tmp_path / "work"), "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", words)
    bench.main()
    with (tmp_path / "engine.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(r["adapters"], r["concurrency"], bool(r["open_rate"])) for r in rows] == [
        (adapters, clients, is_open)
        for adapters in "02"
        for clients in "13"
        for is_open in (False, True)
    ]
    for row in rows:
        assert float(row["otps_per_user"]) > 0 and float(row["ttft_p50_ms"]) > 0
        assert row["rescored_own"] == "1.0", "the reference is what a CPU serves with"
        assert row["compiles_after_warmup"] == "0" and row["kernel_ms"] == ""
        assert float(row["distinct_experts"]) >= 4
    base = [r for r in rows if r["adapters"] == "0"]
    assert all(r["valid"] == "yes" and r["rescored_other"] == "" for r in base)
    # So small a model's logits lie within the slack of each other: its adapters cannot be told
    # apart, and the rows do not count.
    for row in rows[4:]:
        assert row["valid"] == "re-scored other 1.000; re-scored none 1.000"
    # A later call would score what this one timed.
    entries = json.loads((tmp_path / "work" / "loops.json").read_text())
    assert [len(e["answers"]) for e in entries] == [4, 4, 9, 9] * 2


def test_both_starts_are_printed_beside_their_limits(tiny, tmp_path, monkeypatch, capsys):
    caches = []

    class Started:
        startup_s, ready = 12.34, {"startup_s": 3.0}

        def __init__(self, command, timeout_s, env):
            caches.append(env["TRITON_CACHE_DIR"])

        def quit(self):
            pass

    monkeypatch.setattr(bench, "Client", Started)
    rows, env = bench.start_twice(prepare(Wishes("tiny", 1, 8), tmp_path / "w"))
    assert [(r["compile_cache"], r["startup_s"], r["limit_s"]) for r in rows] == [
        ("empty", 12.3, 240.0),
        ("warm", 12.3, 60.0),
    ]
    assert caches == [env["TRITON_CACHE_DIR"]] * 2 == [str(tmp_path / "w" / "compiled")] * 2
    assert "limit 240" in capsys.readouterr().out


def loop(
    load: Load, clients: int = 2, rate: float | None = None, experts: float = 8.0, compiles: int = 0
) -> Run:
    answers = []
    for k, request in enumerate(make_requests(load, ["a0", "a1"], clients, 1, "c")):
        answer = Answer(request, 10.0, list(range(load.tokens_out)), 1, 10.5, 11.5 + k)
        answers.append(answer)
    stats = {"distinct_experts": experts, "compiles": compiles}
    return Run(clients, rate, tuple(answers), 20.0, stats)


LOAD = Load(5, 6, 4000)


def test_requests_are_half_sampled_and_dealt_over_adapters():
    requests = make_requests(LOAD, ["a0", "a1", "a2"], 8, 17, "c")
    assert len(requests) == 24 and len(make_requests(LOAD, [None], 16, 1, "c")) == 32
    assert [r["temperature"] for r in requests] == [0.0, 1.0] * 12
    assert [r["adapter"] for r in requests[:4]] == ["a0", "a1", "a2", "a0"]
    assert len({r["seed"] for r in requests}) == 24 and all(r["ignore_eos"] for r in requests)
    assert all(1000 <= i < 2000 for r in requests for i in r["input_ids"])
    assert requests == make_requests(LOAD, ["a0", "a1", "a2"], 8, 17, "c")


def test_arrivals_keep_their_rate_however_few_and_are_a_poisson_process():
    for seed in range(50):
        times = arrival_times(4, 0.5, seed)
        assert len(times) == 4 and times == sorted(times) and times[0] > 0 and times[-1] < 8.0
    times = arrival_times(4000, 2.0, 1)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert statistics.mean(gaps) == pytest.approx(0.5, rel=0.01)
    assert statistics.stdev(gaps) == pytest.approx(0.5, rel=0.1), "0 for a fixed pace"


def test_a_row_is_what_was_timed():
    row = summarise(loop(LOAD), LOAD)
    speeds = sorted(5 / (1.0 + k) for k in range(6))
    assert row["otps_per_user"] == round((speeds[2] + speeds[3]) / 2, 1)
    assert row["ttft_p50_ms"] == row["ttft_p99_ms"] == 500.0
    assert row["total_tok_s"] == round(36 / 20, 1)
    assert quantile([3, 1, 2], 0.5) == 2 and quantile([3, 1, 2], 1.0) == 3


@pytest.mark.parametrize("change", ["short", "foreign id", "error", "compile", "experts", "greedy"])
def test_each_rule_turns_a_run_down(change):
    run = loop(LOAD)
    assert judging.find_faults(run, LOAD, 8, 4) == []
    answer = run.answers[0]
    if change == "short":
        answer.ids.pop()
    elif change == "foreign id":
        answer.ids[0] = 4000
    elif change == "error":
        answer.error = "lost"
    elif change == "compile":
        run = loop(LOAD, compiles=1)
    elif change == "experts":  # of 8 experts, 4 a token, two tokens hit 6; 5.4 are enough
        assert judging.find_faults(loop(LOAD, experts=5.41), LOAD, 8, 4) == []
        assert judging.find_faults(loop(LOAD, rate=1.0, experts=5.39), LOAD, 8, 4) == []
        run = loop(LOAD, experts=5.39)
    else:
        run.answers[1].request["temperature"] = 0.0
    assert len(judging.find_faults(run, LOAD, 8, 4)) == 1


def test_shares_decide_and_a_missing_one_is_said():
    good = {"own": 0.99, "other": 0.49, "none": 0.1}
    assert judging.find_score_faults(good, True) == []
    assert judging.find_score_faults(None, True) == ["not re-scored"]
    assert judging.find_score_faults({"own": 0.99}, False) == []
    for change in ({"own": 0.98}, {"other": 0.5}, {"none": 0.6}):
        assert len(judging.find_score_faults(good | change, True)) == 1


def test_jobs_and_their_shares(tmp_path):
    answers = list(loop(LOAD, 16).answers)
    picked = judging.pick_answers(answers, 3)
    assert len(picked) == 16 and all(a.request["temperature"] == 0.0 for a in picked)
    jobs = judging.make_jobs(picked[:1], ["a0", "a1"])
    own = picked[0].request["adapter"]
    other = {"a0": "a1", "a1": "a0"}[own]
    assert {j["id"].rpartition(".")[2]: j["adapter"] for j in jobs} == {
        "own": own,
        "other": other,
        "none": None,
    }
    assert jobs[0]["score_from"] == 4 and len(jobs[0]["input_ids"]) == 11
    (tmp_path / "scores").mkdir()
    for job, near in zip(jobs, (6, 3, 0), strict=True):
        found = {"best": [2.0] * 6, "chosen": [1.75] * near + [1.74] * (6 - near)}
        (tmp_path / "scores" / f"{job['id']}.score.json").write_text(json.dumps(found))
    shares = judging.read_shares(jobs, tmp_path)
    assert [shares[j["id"].rpartition(".")[2]] for j in jobs] == [1.0, 0.5, 0.0]


def test_columns_of_loops_scores_and_profiles_are_put_together():
    entries = [
        {"kind": kind, "row": {"concurrency": 8, "open_rate": rate}, "faults": []}
        for kind in ("base", "adapters")
        for rate in ("", 2.5)
    ]
    steps = [
        {"kind": "base", "concurrency": 8, "wall_ms": 4.33, "busy_ms": 4.0, "launches": 614.0},
        {"kind": "adapters", "concurrency": 8, "wall_ms": 4.9, "busy_ms": 4.5, "launches": 614.0},
    ]
    shares = {"adapters": {"own": 1.0, "other": 0.2, "none": 0.7}}
    rows = bench.join_rows(entries, shares, steps, 8)
    assert rows[0]["valid"] == "not re-scored" and rows[0]["adapters"] == 0
    assert rows[0]["kernel_ms"] == 4.0 and "added_by_adapters_ms" not in rows[0]
    assert rows[2]["added_by_adapters_ms"] == 0.5 and rows[2]["host_ms_exposed"] == 0.4
    assert rows[2]["valid"] == "re-scored none 0.700" and rows[2]["adapters"] == 8
    assert "kernel_ms" not in rows[3], "a loop of changing concurrency has no step of its own"
    assert set(rows[2]) <= set(ENGINE)


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_a_cuts_adapters_change_each_layer_more(name):
    shape = SHAPES[name]
    full = shape.config["num_hidden_layers"]
    assert shape.cut_b_std(0) == shape.cut_b_std(full) == shape.b_std
    cut = full // 4
    assert cut * shape.cut_b_std(cut) ** 3 == pytest.approx(full * shape.b_std**3)


def test_floors_of_gpt_oss():
    # Per layer: qkv 2880 x 5120, o 4096 x 2880, router 2880 x 32, an expert 3 x 2880 x 2880 at
    # 4.25 bits; 12 layers see 1660 keys of 2 KiB, 12 see 128; the head 201088 x 2880.
    found = step_bytes(GPT_OSS_20B, 1, 1660, 0, 32)
    assert found["qkv"] == 24 * 2880 * 5120 * 2 and found["o"] == 24 * 4096 * 2880 * 2
    assert found["experts"] == pytest.approx(24 * 4 * 3 * 2880 * 2880 * 4.25 / 8)
    assert found["attention"] == 2048 * 12 * (1660 + 128) and found["head"] == 201088 * 2880 * 2
    assert sum(found.values()) == pytest.approx(3.75e9, rel=0.01)
    lora = step_bytes(GPT_OSS_20B, 1, 1660, 8, 32)["lora"]
    experts = 4 * ((2880 + 5760) + (2880 + 2880))
    plain = (2880 + 4096) + 2 * (2880 + 512) + (4096 + 2880)
    assert lora == pytest.approx(24 * 2 * 32 * (experts + plain))
    assert step_bytes(GPT_OSS_20B, 8, 1660, 8, 32)["lora"] == pytest.approx(8 * lora)
    assert step_bytes(GPT_OSS_20B, 8, 1660, 0, 32)["experts"] == pytest.approx(
        24 * 32 * (1 - (7 / 8) ** 8) * 3 * 2880 * 2880 * 4.25 / 8
    )
    given = step_bytes(GPT_OSS_20B, 8, 1660, 0, 32, 20.0)["experts"]
    assert given == pytest.approx(24 * 20 * 3 * 2880 * 2880 * 4.25 / 8)
    # Two rows of one adapter share what they hit.
    shared = step_bytes(GPT_OSS_20B, 2, 1660, 1, 32)["lora"]
    hit = 32 * (1 - (7 / 8) ** 2)
    assert shared == pytest.approx(24 * 2 * 32 * (experts / 4 * hit + plain))


def test_floors_of_the_other_shapes():
    moe = step_bytes(QWEN3_30B_A3B, 1, 1600, 0, 32)
    assert moe["experts"] == 48 * 8 * 3 * 2048 * 768 * 2 and "gate_up" not in moe
    dense = step_bytes(QWEN3_32B, 1, 1600, 8, 32)
    assert dense["gate_up"] == 64 * 2 * 5120 * 25600 * 2 and "experts" not in dense
    assert dense["lora"] == 64 * 2 * 32 * (
        (5120 + 8192) + 2 * (5120 + 1024) + (8192 + 5120) + 3 * (5120 + 25600)
    )
    # About 30.5 and 32.8 billion weights; the embedding's rows are not read whole.
    assert sum(v for k, v in moe.items() if k not in ("attention", "experts")) + moe[
        "experts"
    ] * 16 == pytest.approx(2 * (30.53e9 - 0.31e9), rel=0.01)
    kept = sum(v for k, v in dense.items() if k not in ("attention", "lora"))
    assert kept == pytest.approx(2 * (32.76e9 - 0.78e9), rel=0.01)


def test_kernels_are_grouped_by_name_and_plain_products_by_place():
    assert group_of("_packed_kernel") == "experts" and group_of("_gate_kernel") == "small"
    assert group_of("_linear_sum_kernel") == "dense" and group_of("_sum_kernel") == "small"
    assert group_of("decode_kernel") == "attention" and group_of("_expand_kernel") == "lora"
    assert group_of("void at::native::index_elementwise_kernel<128, 4, at::gpu_gemm>") == ""
    config = GPT_OSS_20B | {"num_hidden_layers": 2}
    assert dense_roles(config) == ["qkv", "o", "router"] * 2 + ["head"]
    layer = [("nvjet_a", 5.0), ("void cublasLt::splitKreduce_kernel<32>", 1.0)]
    layer += [("decode_kernel", 7.0), ("nvjet_b", 4.0), ("nvjet_c", 3.0), ("_packed_kernel", 9.0)]
    step = [*layer, *layer, ("nvjet_d", 20.0), ("Memcpy HtoD", 2.0)]
    roles = dense_roles(config)
    found = group_kernels(step * 3, roles, 3)
    assert found["qkv"] == GroupTime(pytest.approx(12.0), pytest.approx(4.0))
    assert found["o"].us == pytest.approx(8.0) and found["router"].us == pytest.approx(6.0)
    assert found["head"].us == pytest.approx(20.0) and found["experts"].us == pytest.approx(18.0)
    assert found["torch and copies"].launches == pytest.approx(1.0)
    lumped = group_kernels((step + [("nvjet_e", 1.0)]) * 3, roles, 3)
    assert lumped[DENSE].us == pytest.approx(12 + 8 + 6 + 20 + 1)
    floors = {"qkv": 2e6, "head": 3e6, "experts": 43e6}
    rows = {r["kernels"]: r for r in table_rows(lumped, floors)}
    assert rows[DENSE]["floor_bytes"] == 5e6 and "qkv" not in rows
    assert rows["experts"]["floor_us"] == round(1e6 * 43e6 / COPY_BYTES_PER_S, 1)
    assert rows["experts"]["floor_share"] == pytest.approx(10 / 18, abs=1e-3)


def test_a_table_of_other_columns_is_not_appended_to(tmp_path):
    append_rows(tmp_path / "t.csv", ["a", "b"], [{"a": 1}])
    append_rows(tmp_path / "t.csv", ["a", "b"], [{"b": 2}])
    assert (tmp_path / "t.csv").read_text() == "a,b\n1,\n,2\n"
    with pytest.raises(ValueError, match="columns"):
        append_rows(tmp_path / "t.csv", ["a", "c"], [{"a": 1}])


def test_a_folder_serves_the_same_wishes_again_and_no_others(tiny, tmp_path):
    wishes = Wishes("tiny", 1, 8)
    work = prepare(wishes, tmp_path / "w")
    before = (tmp_path / "w" / "a0" / "adapter_model.safetensors").stat().st_mtime_ns
    assert prepare(wishes, tmp_path / "w") == work
    assert (tmp_path / "w" / "a0" / "adapter_model.safetensors").stat().st_mtime_ns == before
    with pytest.raises(ValueError, match="was made for"):
        prepare(Wishes("tiny", 1, 16), tmp_path / "w")
    assert adapter_values(GPT_OSS_20B, 32) * 2 / 2**30 == pytest.approx(0.69, abs=0.01)
    assert adapter_values(QWEN3_30B_A3B, 32) * 2 / 2**30 == pytest.approx(2.4, abs=0.05)


def test_the_judges_command_line_runs_as_it_stands(tiny, tmp_path):
    work = prepare(Wishes("tiny", 2, 8, max_clients=4), tmp_path / "w")
    out = tmp_path / "judged.json"
    program = tmp_path / "judge.py"
    program.write_text("import json, sys; print(json.dumps(sys.argv[1:]))")
    words = judge.command_of(str(program), work, out, ["--seed", "5"])
    told = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    fields = dict(zip(told[::2], told[1::2], strict=True))
    assert fields["--adapters"] == "a0,a1" and fields["--seed"] == "5"
    assert fields["--experts"] == "8" and fields["--top-k"] == "4" and fields["--vocab"] == "4000"
    assert "serve-stdio" in fields["--engine"] and "--kernels" not in fields["--logits"]
