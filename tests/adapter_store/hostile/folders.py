"""Adapter folders that were made to hurt: each number gives one, the same on every machine.

`make_case(number)` takes a small valid adapter and changes it by one to three of MUTATIONS, which
have names; `Case.write` puts it into a folder. Not here: what a loader may do with it (run).
"""

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from adapter_store.sources.source import OPTIONAL_FILES
from tests.adapter_store.hostile import beside, configs, places, tokens, weights
from tests.adapter_store.hostile.draft import CONFIG, WEIGHTS, Draft, Mutation, Random, valid_draft
from tests.adapter_store.hostile.good_files import add_files

MUTATIONS: dict[str, Mutation] = {
    **weights.MUTATIONS,
    **configs.MUTATIONS,
    **places.MUTATIONS,
    **beside.MUTATIONS,
    **tokens.MUTATIONS,
}


@dataclass(frozen=True)
class Case:
    """One hostile folder.

    mutations    their names;  must_refuse  a load of it would be a fault, else it may be harmless
    """

    number: int
    mutations: tuple[str, ...]
    must_refuse: bool
    draft: Draft

    def write(self, folder: Path) -> None:
        """Make the folder's files."""
        folder.mkdir()
        for name, content in (
            (CONFIG, self.draft.config_bytes),
            (WEIGHTS, self.draft.weights_bytes),
        ):
            if name not in self.draft.makers:
                (folder / name).write_bytes(content())
        for name, raw in self.draft.beside.items():
            if name not in self.draft.makers:
                (folder / name).write_bytes(raw)
        for name, make in self.draft.makers.items():
            if make is not None:
                make(folder / name)


def make_case(number: int, only: str | None = None) -> Case:
    """The case of this number. Every mutation has its turn as the first, the dear ones less often.

    only  this mutation and no other
    """
    rng = Random(f"hostile {number}")
    names = list(MUTATIONS)
    first = only or names[number % len(names)]
    if only is None and rng.random() > MUTATIONS[first].share:
        first = rng.choice([name for name in names if MUTATIONS[name].share == 1.0])
    chosen = [first]
    while only is None and len(chosen) < 3 and rng.random() < 0.3:
        chosen.append(rng.choice([name for name in names if MUTATIONS[name].share == 1.0]))
    draft = valid_draft(rng)
    MUTATIONS[first].apply(draft, rng)
    for name in chosen[1:]:
        # What one mutation spoiled, the next may not find any more.
        with suppress(LookupError, TypeError, ValueError, AttributeError, RecursionError):
            MUTATIONS[name].apply(draft, rng)
    must_refuse = len(chosen) == 1 and MUTATIONS[first].must_refuse
    return Case(number, tuple(chosen), must_refuse, draft)


def valid_case(form: str) -> Case:
    """A case without a mutation."""
    return Case(-1, (), False, valid_draft(Random(form), form))


def whole_case() -> Case:
    """A case without a mutation, with everything that an adapter may bring."""
    draft = valid_draft(Random("whole"), "linear")
    add_files(draft, Random("whole"), *OPTIONAL_FILES)
    return Case(-1, (), False, draft)


def words_of(case: Case) -> set[str]:
    """What a refusal of this case may name: files, fields, tensors."""
    if set(case.mutations) <= {*beside.MUTATIONS, *tokens.MUTATIONS}:
        return set(OPTIONAL_FILES)
    names = {CONFIG, WEIGHTS, "adapter_model.", *case.draft.config}
    names |= set(OPTIONAL_FILES) | {key for key, _ in case.draft.entries if key}
    return {ascii(name)[1:60].rstrip("'\"") for name in names} | set(_FIELDS)


_FIELDS = tuple(
    re.findall(
        r"\w+",
        "use_dora bias lora_bias modules_to_save alora_invocation_tokens layer_replication "
        "trainable_token_indices init_lora_weights rank_pattern alpha_pattern target_parameters",
    )
)
