"""The README's tables of what is served, made from the tests that prove it.

    python -m tests.readme_table      prints them as they must stand there

A cell names the strongest test that there is: files that PEFT wrote over files that we wrote. Not
here: the tests themselves.
"""

import functools

from adapter_store.formats.registry import load_adapter
from tests.golden import GoldenCase, golden_targets, load_cases
from tests.model_runner import (
    test_against_transformers,
    test_checkpoint_formats,
    test_every_target,
    test_golden,
    test_peft_live,
    test_peft_versions,
)
from tests.model_runner.peft_cases import LAYOUTS, cases_of
from tests.model_runner.test_every_target import FAMILIES, LACKS, PARTS

# Family of test_every_target -> (its name for readers, its name in the golden cases).
NAMES = {
    "gpt-oss": ("GPT-OSS", "gpt_oss"),
    "qwen3-moe": ("Qwen3-MoE", "qwen3_moe"),
    "deepseek v2": ("DeepSeek V2", ""),
    "deepseek v3": ("DeepSeek V3", "deepseek_v3"),
    "llama4": ("Llama 4", "llama4_text"),
    "mixtral": ("Mixtral", "mixtral"),
    "olmoe": ("OLMoE", ""),
    "llama": ("Llama 3", "llama"),
    "qwen3": ("Qwen3", "qwen3"),
}
# Part -> what a reader calls it.
PART_WORDS = {
    "attention": "attention",
    "latent": "latent projections (kv_a, kv_b)",
    "experts, natural": "experts, 2-D natural",
    "experts, swapped": "experts, 2-D swapped",
    "experts, 3-D": "experts, 3-D",
    "experts, one by one": "experts, one by one",
    "shared expert": "shared expert",
    "dense MLP": "dense MLP",
    "router": "router",
    "embedding": "embedding",
    "lm_head": "lm_head",
}
FORMAT_WORDS = {
    "saved": "one file, fp32, as transformers 5 saves it",
    "shards": "several files, bf16",
    "fused": "experts fused",
    "one by one": "experts one by one",
    "fp8": "fp8 in blocks of 128",
    "mxfp4": "MXFP4",
}
# What cells call a test -> where it stands.
TESTS = {
    "golden": test_golden.test_logits_match_and_refusals_are_refused,
    "peft": test_peft_live.test_logits_are_those_of_peft,
    "written": test_peft_versions.test_logits_are_those_of_the_writer,
    "merged": test_every_target.test_an_adapter_is_its_merged_weights,
    "refused: unbound_tensor": test_every_target.test_what_a_family_lacks_is_refused,
    "saved": test_against_transformers.test_logits_are_those_of_transformers,
    "loads": test_checkpoint_formats.test_a_checkpoint_loads_as_its_values_say,
    "several": test_checkpoint_formats.test_each_of_several_fp8_blocks_has_its_own_scale,
}


@functools.cache
def adapter_table() -> str:
    """Parts that an adapter may change, by family."""
    golden = golden_cells()
    live = peft_cells()
    written = written_cells()
    rows = []
    for part in PARTS:
        cells = []
        for family in FAMILIES:
            key = family, part
            if part in LACKS[family]:
                cells.append("refused: unbound_tensor")
            elif key in golden and not golden[key].startswith("synth"):
                cells.append(f"golden `{golden[key]}`")
            elif key in live:
                cells.append(f"peft `{live[key]}`")
            elif key in written:
                cells.append(f"written `{written[key]}`")
            elif key in golden:
                cells.append(f"golden `{golden[key]}`")
            else:
                cells.append("merged")
        rows.append([PART_WORDS[part], *cells])
    return _markdown("an adapter on", rows)


def format_table() -> str:
    """Kinds of checkpoints, by family."""
    t = test_checkpoint_formats
    rows = []
    for kind, words in FORMAT_WORDS.items():
        cells = []
        for family in FAMILIES:
            if kind == "saved":
                cells.append(f"saved `{FAMILIES[family]}`")
            elif (family, kind) in t.REFUSED:
                cells.append(f"refused: `{t.REFUSED[family, kind]}`")
            elif kind == "fp8" and family in t.SEVERAL_BLOCKS:
                cells.append("several")
            elif (family, kind) in t.CELLS:
                cells.append("loads")
            elif kind == "mxfp4":
                (case,) = (c for c in load_cases() if c.id == "gpt_oss_mxfp4-base")
                cells.append(f"golden `{case.id}`")
            else:
                assert family in t.DENSE, (family, kind)
                cells.append("no experts")
        rows.append([words, *cells])
    return _markdown("a checkpoint", rows)


def golden_cells() -> dict[tuple[str, str], str]:
    """(family, part) -> the first golden case with such tensors, without its family's name."""
    family_of = {golden: family for family, (_, golden) in NAMES.items() if golden}
    found: dict[tuple[str, str], str] = {}
    for case in load_cases("logits"):
        if case.adapter and case.family in family_of:
            for part in _parts(case):
                name = case.id.removeprefix(f"{case.family}-")
                found.setdefault((family_of[case.family], part), name)
    return found


def peft_cells() -> dict[tuple[str, str], str]:
    """(family, part) -> the first case of test_peft_live that adapts it."""
    found: dict[tuple[str, str], str] = {}
    for name, case in test_peft_live.CASES.items():
        for part in case.parts:
            found.setdefault((case.model.partition(",")[0], part), name)
    return found


def written_cells() -> dict[tuple[str, str], str]:
    """(family, part) -> the newest releases of PEFT and transformers that write it."""
    found: dict[tuple[str, str], str] = {}
    for writer in reversed(LAYOUTS):
        for family in FAMILIES:
            for case in cases_of(family, writer).values():
                for part in () if case.reason else case.parts:
                    found.setdefault((family, part), " over ".join(map(str, writer)))
    return found


def _parts(case: GoldenCase) -> set[str]:
    """The parts of which this case's file has tensors, by what the loader made of them."""
    assert case.adapter is not None
    targets = golden_targets(case.model)
    names = {target.name for target in targets}
    routers = (".mlp.gate", ".router")
    gate = next((end for end in routers if any(name.endswith(end) for name in names)), "")
    manifest = load_adapter(case.adapter, targets).manifest
    found = test_every_target.parts_of(manifest, targets, gate)
    if not any(pair.target.endswith(".kv_b_proj") for pair in manifest.pairs):
        found.discard("latent")  # kv_b is the harder of the two
    return found


def _markdown(corner: str, rows: list[list[str]]) -> str:
    head = [corner, *(NAMES[family][0] for family in FAMILIES)]
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    print(adapter_table(), format_table(), sep="\n\n")
