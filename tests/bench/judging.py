"""Whether a run of the engine's benchmark counts: what must hold of every loop, and the re-scoring
of what was timed by the reference kernels.

A wrong or stale adapter, a skipped expert or a short answer can look fast; here it does not count.
"""

import json
import random
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.bench.client import ROOT, Answer
from tests.bench.loops import Load, Run, find_bad

EXPERT_SHARE = 0.9
# A token counts if its logit is within SLACK of the reference's best.
SLACK = 0.25
MIN_OWN, MAX_FOREIGN = 0.99, 0.5
NUM_RESCORED = 16


def expected_experts(experts: int, top_k: int, tokens: int) -> float:
    """Distinct experts that `tokens` tokens of near-uniform routing hit in a layer."""
    return experts * (1 - (1 - top_k / experts) ** tokens) if experts else 0.0


def find_faults(run: Run, load: Load, experts: int, top_k: int) -> list[str]:
    """Why a loop does not count, but for its re-scoring. Open loops run at changing concurrency, so
    their experts are not judged."""
    faults = []
    bad = find_bad(run, load)
    if bad:
        faults.append(f"{len(bad)} of {len(run.answers)} answers not whole")
    sampled = [a for a in run.answers if a.request["temperature"] == 1.0]
    if abs(2 * len(sampled) - len(run.answers)) > 1:  # half, of an odd number too
        faults.append(f"{len(sampled)} of {len(run.answers)} requests sampled")
    if run.stats.get("compiles") != 0:
        faults.append(f"{run.stats.get('compiles')} compiles after ready")
    wanted = EXPERT_SHARE * expected_experts(experts, top_k, run.concurrency)
    if run.rate is None and run.stats.get("distinct_experts", 0.0) < wanted:
        faults.append(f"{run.stats.get('distinct_experts')} distinct experts, not {wanted:.2f}")
    return faults


def find_score_faults(shares: dict[str, float] | None, has_adapters: bool) -> list[str]:
    """What is wrong with the shares of re-scored tokens; None = not re-scored."""
    if not shares:
        return ["not re-scored"]
    faults = []
    if shares["own"] < MIN_OWN:
        faults.append(f"re-scored own {shares['own']:.3f}")
    for kind in ("other", "none") if has_adapters else ():
        if kind in shares and shares[kind] >= MAX_FOREIGN:
            faults.append(f"re-scored {kind} {shares[kind]:.3f}")
    return faults


def pick_answers(answers: Sequence[Answer], seed: int) -> list[Answer]:
    """The greedy answers that are re-scored: up to NUM_RESCORED, at random over all loops."""
    ordered = list(answers)
    random.Random(seed).shuffle(ordered)
    return [a for a in ordered if a.request["temperature"] == 0.0][:NUM_RESCORED]


def make_jobs(picked: Sequence[Answer], names: Sequence[str]) -> list[dict[str, Any]]:
    """Scoring jobs: each answer under its own adapter, the next one, and none."""
    jobs = []
    for answer in picked:
        own = answer.request["adapter"]
        kinds = {"own": own}
        if own is not None:
            kinds["none"] = None
            if len(names) > 1:
                kinds["other"] = names[(names.index(own) + 1) % len(names)]
        ids = answer.request["input_ids"]
        for kind, adapter in kinds.items():
            jobs.append(
                {
                    "id": f"{answer.request['id']}.{kind}",
                    "adapter": adapter,
                    "input_ids": ids + answer.ids,
                    "score_from": len(ids) - 1,
                }
            )
    return jobs


def score(command: list[str], jobs: Sequence[dict[str, Any]], work: Path) -> None:
    """Run the `logits` command over the jobs; results go to work/scores. Errors:
    CalledProcessError."""
    work.mkdir(parents=True, exist_ok=True)
    (work / "jobs.jsonl").write_text("".join(json.dumps(job) + "\n" for job in jobs))
    files = ["--jobs", str(work / "jobs.jsonl"), "--out", str(work / "scores")]
    subprocess.run([*command, "--kernels", "reference", *files], cwd=ROOT, check=True)


def read_shares(jobs: Sequence[dict[str, Any]], work: Path) -> dict[str, float]:
    """Kind -> share of tokens near the reference's best. Errors: FileNotFoundError if a job was
    refused."""
    near: dict[str, list[bool]] = {}
    for job in jobs:
        found = json.loads((work / "scores" / f"{job['id']}.score.json").read_text())
        pairs = zip(found["chosen"], found["best"], strict=True)
        kind = job["id"].rpartition(".")[2]
        near.setdefault(kind, []).extend(best - chosen <= SLACK for chosen, best in pairs)
    return {kind: sum(flags) / len(flags) for kind, flags in near.items()}
