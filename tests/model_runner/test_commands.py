"""Both commands from outside, over pipes, on the demo: several requests in flight, scores that
agree with what was generated."""

import json
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from model_runner.__main__ import main
from model_runner.stdio_command import SAMPLING_FIELDS
from tests.model_runner.demo import ADAPTER_DIRS, BASE_DIR, PADDING_IDS

ROOT = Path(__file__).parents[2]
ADAPTERS = ",".join(f"{name}={folder}" for name, folder in ADAPTER_DIRS.items())
COMMAND = [sys.executable, "-m", "model_runner"]


class Stdio:
    """A serve-stdio child; `lines` gathers what it says by request id."""

    def __init__(self, *options: str) -> None:
        words = [
            *COMMAND,
            "serve-stdio",
            "--model",
            str(BASE_DIR),
            "--adapters",
            ADAPTERS,
            *options,
        ]
        self.child = subprocess.Popen(
            words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.by_id: dict = {}
        self.stats: list[dict] = []
        self.changed = threading.Condition()
        self.ready = json.loads(self.child.stdout.readline())
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, line) -> None:
        self.child.stdin.write((line if isinstance(line, str) else json.dumps(line)) + "\n")
        self.child.stdin.flush()

    def wait(self, condition, timeout_s: float = 60) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, timeout_s)

    def ended(self, name) -> bool:
        return any(m["finish_reason"] for m in self.by_id.get(name, ()))

    def ids(self, name) -> list[int]:
        return [i for m in self.by_id[name] for i in m["token_ids"]]

    def _read(self) -> None:
        for line in self.child.stdout:
            message = json.loads(line)
            with self.changed:
                if "stats" in message:
                    self.stats.append(message["stats"])
                else:
                    self.by_id.setdefault(message["id"], []).append(message)
                self.changed.notify_all()


@pytest.fixture(scope="module")
def stdio():
    child = Stdio()
    yield child
    child.send({"cmd": "quit"})
    assert child.child.wait(30) == 0


@pytest.mark.parametrize(
    ("prompt_ids", "most_shared"),
    [(range(3, 600), 1.0), (PADDING_IDS, 0.5)],
    ids=("text", "padding"),
)
def test_requests_in_flight_stream_and_are_scored_as_drawn(
    stdio, tmp_path, prompt_ids, most_shared
):
    """Padding as prompts: what the demo's adapters say to it was trained to be unlikely to others,
    so that who compares engines by random prompts sees whose adapter was at work."""
    rng = random.Random(3)
    names = [None, *ADAPTER_DIRS]
    asked = {
        f"{prompt_ids.start}.{i}": {
            "id": f"{prompt_ids.start}.{i}",
            "adapter": names[i % 4],
            "input_ids": [rng.choice(prompt_ids) for _ in range(20 + i)],
            "max_tokens": 24,
            "temperature": float(i % 2),
            "seed": i,
            "ignore_eos": True,
        }
        for i in range(8)
    }
    num_stats = len(stdio.stats)
    stdio.send({"cmd": "stats"})
    for message in asked.values():
        stdio.send(message)
    stdio.wait(lambda: all(stdio.ended(name) for name in asked))
    assert stdio.ready["ready"] is True
    for name in asked:
        assert len(stdio.ids(name)) == 24 and len(stdio.by_id[name]) >= 24
        assert (
            stdio.by_id[name][-1]["finish_reason"] == "length"
            and stdio.by_id[name][-1]["error"] is None
        )
    stdio.send({"cmd": "stats"})
    stdio.wait(lambda: len(stdio.stats) == num_stats + 2)
    assert 2 <= stdio.stats[-1]["distinct_experts"] <= 8 and stdio.stats[-1]["compiles"] == 0

    greedy = [m for m in asked.values() if m["temperature"] == 0]
    jobs = [
        {
            "id": f"{m['id']}.{kind}",
            "adapter": adapter,
            "input_ids": m["input_ids"] + stdio.ids(m["id"]),
            "score_from": len(m["input_ids"]) - 1,
        }
        for m in greedy
        for kind, adapter in (
            ("own", m["adapter"]),
            ("other", "pirate" if m["adapter"] != "pirate" else None),
        )
    ]
    (tmp_path / "jobs.jsonl").write_text("".join(json.dumps(j) + "\n" for j in jobs))
    words = [
        *COMMAND,
        "logits",
        "--model",
        str(BASE_DIR),
        "--adapters",
        ADAPTERS,
        "--kernels",
        "reference",
    ]
    subprocess.run(
        [*words, "--jobs", str(tmp_path / "jobs.jsonl"), "--out", str(tmp_path / "out")],
        cwd=ROOT,
        check=True,
    )

    def share(name: str) -> float:
        scores = json.loads((tmp_path / "out" / f"{name}.score.json").read_text())
        assert len(scores["chosen"]) == len(scores["best"]) == 24
        return (
            sum(
                best - chosen < 1e-3
                for chosen, best in zip(scores["chosen"], scores["best"], strict=True)
            )
            / 24
        )

    for m in greedy:
        assert share(f"{m['id']}.own") == 1.0
        assert share(f"{m['id']}.other") < most_shared


@pytest.mark.parametrize(
    ("line", "name", "word"),
    [
        ("not json", None, "JSONDecodeError"),
        ("[1, 2]", None, "object"),
        ({"id": "e1", "adapter": "unknown", "input_ids": [5]}, "e1", "unknown"),
        ({"id": "e2", "input_ids": [5], "temprature": 1}, "e2", "temprature"),
        ({"id": "e3", "input_ids": [5], "temperature": -1}, "e3", "temperature"),
        ({"id": "e4"}, "e4", "input_ids"),
        ({"id": "e5", "input_ids": [10**9]}, "e5", "token id"),
        ({"id": "e6", "cmd": "dance"}, "e6", "dance"),
        ({"id": "e7", "input_ids": [5], "min_p": 2}, "e7", "min_p"),
        ({"id": "e8", "input_ids": [5], "logit_bias": {"9999": 1}}, "e8", "logit_bias"),
    ],
)
def test_a_bad_line_is_answered_and_the_engine_goes_on(stdio, line, name, word):
    stdio.by_id.pop(name, None)
    stdio.send(line)
    stdio.wait(lambda: name in stdio.by_id)
    assert word in stdio.by_id[name][0]["error"]
    good = f"after-{name}-{word}"
    stdio.send({"id": good, "input_ids": [5, 6, 7], "max_tokens": 3, "ignore_eos": True})
    stdio.wait(lambda: stdio.ended(good))
    assert len(stdio.ids(good)) == 3


# Of each field, values of every JSON type that it must not have.
_NUMBER = (True, "1", [], {})
_INTEGER = (*_NUMBER, 1.5)
WRONG_TYPES: dict[str, tuple[object, ...]] = {
    "id": (None, True, 1.5, [], {}),
    "cmd": (True, 1, 1.5, "", [], {}),
    "adapter": (True, 0, 1.5, [], ["pirate"], {}),
    "input_ids": (None, True, 1, 1.5, "12", {}, {"1": 2}, ["1"], [True], [1.5], [None], [[1]]),
    "logit_bias": (True, 0, 1.5, "", [], [[5, 1.0]], {"x": 1}, {"5": "1"}, {"5": None}, {"5": []}),
    "stop_ids": (True, 0, 1.5, "", "5", {}, ["5"], [True], [5.0], [None], [[]]),
    "ignore_eos": (0, 1.5, "true", [], {}),
    **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty"), _NUMBER),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), _NUMBER),
    **dict.fromkeys(("top_k", "seed", "max_tokens", "min_tokens"), _INTEGER),
    **dict.fromkeys(("logprobs", "prompt_logprobs"), _INTEGER),
}


@pytest.mark.parametrize("field", [*WRONG_TYPES, "abort"])
def test_a_wrong_type_is_answered_by_name_and_harms_no_other(stdio, field):
    good, wrong = f"beside-{field}", WRONG_TYPES["id" if field == "abort" else field]
    asked = {"input_ids": [5, 6, 7], "ignore_eos": True}
    stdio.send({"id": good, **asked, "max_tokens": 40})
    for number, value in enumerate(wrong):
        line = {"id": f"wrong-{field}-{number}", **asked, field: value}
        if field == "abort":
            line = {"cmd": "abort", "id": value}
        name = None if field in ("id", "abort") else line["id"]
        stdio.by_id.pop(name, None)
        stdio.send(line)
        stdio.wait(lambda name=name: stdio.ended(name))
        (answer,) = stdio.by_id[name]
        assert answer["finish_reason"] == "error" and not answer["token_ids"]
        assert ("id" if field == "abort" else field) in answer["error"].split(), (value, answer)
    stdio.wait(lambda: stdio.ended(good))
    assert len(stdio.ids(good)) == 40


def test_every_field_of_the_protocol_is_asked_wrongly():
    assert {*WRONG_TYPES} == {"id", "cmd", "adapter", "input_ids", "logit_bias", "stop_ids"} | {
        *SAMPLING_FIELDS
    }


def test_bias_penalties_and_logprobs(stdio):
    asked = {"input_ids": [5, 6, 7], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    bias = {"40": 100, "41": 99.5}
    stdio.send({"id": "biased", **asked, "logit_bias": bias, "logprobs": 2, "prompt_logprobs": 1})
    stdio.send({"id": "penalized", **asked, "logit_bias": bias, "presence_penalty": 2})
    stdio.wait(lambda: stdio.ended("biased") and stdio.ended("penalized"))
    assert stdio.ids("biased") == [40] * 4
    assert stdio.ids("penalized") == [40, 41, 40, 40]  # each once less 2: as far apart as before
    first = stdio.by_id["biased"][0]
    assert len(first["prompt_logprobs"]) == 2
    assert all("prompt_logprobs" not in m for m in stdio.by_id["biased"][1:])
    chosen, rank, top = first["logprobs"][0]
    assert chosen < 0 and rank > 2 and len(top) == 2 and top[0][1] >= top[1][1]
    assert "logprobs" not in stdio.by_id["penalized"][0]


def test_bytes_that_are_no_text_are_a_bad_line(stdio):
    stdio.by_id.pop(None, None)
    stdio.child.stdin.buffer.write(b"\xff\xfe\n")
    stdio.child.stdin.flush()
    stdio.wait(lambda: None in stdio.by_id)
    assert "JSONDecodeError" in stdio.by_id[None][0]["error"]


def test_abort_ends_a_request(stdio):
    stdio.send({"id": "long", "input_ids": [5, 6], "max_tokens": 3000, "ignore_eos": True})
    stdio.wait(lambda: "long" in stdio.by_id)
    stdio.send({"cmd": "abort", "id": "long"})
    stdio.wait(lambda: stdio.ended("long"))
    assert stdio.by_id["long"][-1]["finish_reason"] == "abort"


def test_logits_writes_one_file_a_job_and_refusals_beside_them(tmp_path):
    jobs = [
        {"id": "base", "adapter": None, "input_ids": [5, 6, 7, 8]},
        {"id": "named", "adapter": "pirate", "input_ids": [5, 6, 7, 8]},
        {"id": "folder", "adapter": str(ADAPTER_DIRS["pirate"]), "input_ids": [5, 6, 7, 8]},
        {"id": "own-model", "model": str(BASE_DIR), "adapter": None, "input_ids": [5, 6, 7, 8]},
        {"id": "missing", "adapter": str(tmp_path / "none"), "input_ids": [5, 6, 7, 8]},
        {"id": "empty", "adapter": None, "input_ids": []},
        {"id": "no-model", "model": str(tmp_path / "none"), "adapter": None, "input_ids": [5]},
    ]
    (tmp_path / "jobs.jsonl").write_text("".join(json.dumps(j) + "\n" for j in jobs))
    words = [*COMMAND, "logits", "--model", str(BASE_DIR), "--adapters", ADAPTERS]
    done = subprocess.run(
        [*words, "--jobs", str(tmp_path / "jobs.jsonl"), "--out", str(tmp_path / "out")],
        cwd=ROOT,
        check=True,
        stderr=subprocess.PIPE,
        text=True,
    )
    told = [line.split(" is refused: ")[0] for line in done.stderr.splitlines()]
    assert {"empty", "missing", "no-model"} == set(told) & {job["id"] for job in jobs}
    files = sorted(p.name for p in (tmp_path / "out").iterdir())
    refused = [f"{name}.error.txt" for name in ("empty", "missing", "no-model")]
    assert files == sorted(
        [*refused, *(f"{n}.safetensors" for n in ("base", "named", "folder", "own-model"))]
    )
    base, named, folder, own_model = (
        load_file(tmp_path / "out" / f"{n}.safetensors")["logits"]
        for n in ("base", "named", "folder", "own-model")
    )
    vocab = json.loads((BASE_DIR / "config.json").read_text())["vocab_size"]
    assert all(x.shape == (4, vocab) and x.dtype == torch.float32 for x in (base, named, folder))
    assert torch.equal(own_model, base)
    assert (named - folder).abs().max() < 1e-4 < (named - base).abs().max()
    said = (tmp_path / "out" / "missing.error.txt").read_text()
    assert "none' is neither a name of --adapters nor a folder" in said


def test_a_wrong_type_in_a_job_is_answered_by_name_and_harms_no_other(tmp_path):
    wrong = {
        "model": (True, 1, 1.5, [], {}),
        "adapter": WRONG_TYPES["adapter"],
        "input_ids": WRONG_TYPES["input_ids"],
        "score_from": (*_INTEGER, -1),
    }
    asked = {"input_ids": [5, 6, 7, 8]}
    lines = [{"id": "first", **asked, "score_from": 0}]
    lines += [
        {"id": f"{field}.{number}", **asked, field: value}
        for field, values in wrong.items()
        for number, value in enumerate(values)
    ]
    lines.append({"id": "last", **asked, "score_from": 9})
    (tmp_path / "jobs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "out"
    words = ["--model", str(BASE_DIR), "--jobs", str(tmp_path / "jobs.jsonl"), "--out", str(out)]
    subprocess.run([*COMMAND, "logits", *words], cwd=ROOT, check=True)
    for line in lines[1:-1]:
        said = (out / f"{line['id']}.error.txt").read_text()
        assert said.startswith(f"{line['id'].split('.')[0]} must be "), said
    scores = [json.loads((out / f"{name}.score.json").read_text()) for name in ("first", "last")]
    assert [len(score["chosen"]) for score in scores] == [3, 0]
    assert len(list(out.iterdir())) == len(lines)


def test_what_was_asked_before_the_end_of_stdin_is_answered() -> None:
    asked = [{"id": n, "input_ids": [1, 292, 201 + n], "max_tokens": 12, "ignore_eos": True}
             for n in range(5)]  # fmt: skip
    asked[3]["adapter"] = "pirate"
    words = [*COMMAND, "serve-stdio", "--model", str(BASE_DIR), "--adapters", ADAPTERS]
    text = "".join(json.dumps(line) + "\n" for line in asked)
    done = subprocess.run(words, cwd=ROOT, input=text, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    ready, *answers = map(json.loads, done.stdout.splitlines())
    assert ready["ready"]
    counts = dict.fromkeys(range(5), 0)
    for answer in answers:
        counts[int(answer["id"])] += len(answer["token_ids"])
    assert counts == dict.fromkeys(range(5), 12), answers[-1]


def refusal_of(capfd: pytest.CaptureFixture[str], *words: str) -> str:
    """What a command says that cannot begin: one line on stderr, exit code 2."""
    switch_s = sys.getswitchinterval()
    with pytest.raises(SystemExit) as end:
        main(words)
    sys.setswitchinterval(switch_s)  # the command had a process of its own in mind
    said = capfd.readouterr()
    assert end.value.code == 2 and not said.out
    assert said.err.count("\n") == 1, "no traceback"
    assert said.err.startswith(f"python -m model_runner {words[0]}: ")
    return said.err


@pytest.mark.parametrize(
    "line", ["{}", '{"id": "a"}', "[1]", "{nope}", '{"id": [], "input_ids": [1]}', "[" * 100_000]
)
def test_a_job_that_is_none_is_named(
    line: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    jobs = tmp_path / "jobs.jsonl"
    jobs.write_text('{"id": "b", "input_ids": [1]}\n' + line + "\n")
    words = ("logits", "--model", str(BASE_DIR), "--jobs", str(jobs), "--out", str(tmp_path))
    said = refusal_of(capfd, *words)
    assert f"{jobs}:2: a job is a JSON object with id and input_ids at least" in said


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--adapters", "pirate"], "--adapters wants NAME=FOLDER,... with distinct names"),
        (["--adapters", "pirate=/nowhere"], "/nowhere"),
        (["--model", "/nowhere"], "/nowhere/config.json"),
        (["--config", "/nowhere.yaml"], "/nowhere.yaml"),
        (["--config", "{tmp}/list.yaml"], "list.yaml is no table of fields"),
        (["--config", "{tmp}/unknown.yaml"], "unknown.yaml: unknown fields ['max_lora']"),
        (["--config", "{tmp}/low.yaml"], "low.yaml: max_num_seqs must be at least 1, not 0"),
        (["--config", "{tmp}/word.yaml"], "word.yaml: "),
        (["--dtype", "float8"], "dtype must be bfloat16 or float32, not 'float8'"),
    ],
)
@pytest.mark.parametrize("command", ["serve-stdio", "logits"])
def test_a_command_that_cannot_begin_says_why(
    command: str,
    options: list[str],
    named: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    texts = {
        "list": "[1]",
        "unknown": "max_lora: 4",
        "low": "max_num_seqs: 0",
        "word": "max_loras: many",
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    words = [word.format(tmp=tmp_path) for word in options]
    if command == "logits":
        if words[1] in ("/nowhere", "pirate=/nowhere"):
            pytest.skip("a job's error file names what its model or its adapter lacks")
        (tmp_path / "jobs").write_text('{"id": "a", "input_ids": [1]}\n')
        words += ["--jobs", str(tmp_path / "jobs"), "--out", str(tmp_path / "out")]
    assert named in refusal_of(capfd, command, "--model", str(BASE_DIR), *words)


def test_jobs_that_are_not_there_are_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ("logits", "--model", str(BASE_DIR), "--out", str(tmp_path), "--jobs", "/nowhere")
    assert "--jobs /nowhere: " in refusal_of(capfd, *words)
