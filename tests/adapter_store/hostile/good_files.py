"""What an adapter may bring besides its weights, as it should be: a base model, files of it.

Not here: how they are spoilt (beside, tokens).
"""

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from adapter_store.sources.source import (
    GENERATION_FILE,
    TEMPLATE_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
)
from tests.adapter_store.hostile.draft import Draft, Random
from tests.model_runner.demo import BASE_DIR

NUM_TOKENS = 64
"""Of the base: the demo's first."""


def good_files() -> dict[str, Any]:
    """As an adapter of this base may bring them: name -> text, or what JSON says."""
    return {
        TOKENIZER_FILE: base_tokenizer(),
        TOKENIZER_CONFIG_FILE: {
            "eos_token": "<|im_end|>",
            "pad_token": {"content": "<|endoftext|>", "lstrip": False},
            "additional_special_tokens": ["<|im_start|>"],
            "added_tokens_decoder": {"1": {"content": "<|im_start|>", "special": True}},
            "chat_template": "{{ messages[0].content }}{{ eos_token }}",
            "model_max_length": 10**30,
        },
        TEMPLATE_FILE: "own: {% for m in messages %}{{ m.content }}{% endfor %}{{ pad_token }}",
        GENERATION_FILE: {"temperature": 0.6, "top_k": 20, "eos_token_id": [2, 0], "max_length": 9},
    }


def add_files(draft: Draft, rng: Random, *names: str) -> None:
    """These files, and maybe others; those that are there stay."""
    for name, said in good_files().items():
        if name in names or rng.random() < 0.3:
            if name == TOKENIZER_FILE:  # other bytes than the base's, or nothing is read
                said = said | {"version": rng.choice(["1.0", "2.0"])}
            draft.beside.setdefault(name, file_bytes(said))


def file_bytes(said: Any) -> bytes:
    """A file's content."""
    text = said if isinstance(said, str) else json.dumps(said)
    return text.encode("utf-8", "surrogatepass")


def write_base(folder: Path) -> Path:
    """The base model that adapters are held against."""
    folder.mkdir()
    for name in (TOKENIZER_CONFIG_FILE, TEMPLATE_FILE, GENERATION_FILE):
        shutil.copy(BASE_DIR / name, folder)
    (folder / TOKENIZER_FILE).write_bytes(file_bytes(base_tokenizer()))
    return folder


def base_tokenizer() -> dict[str, Any]:
    made: dict[str, Any] = json.loads(_demo_text())
    vocab, merges = made["model"]["vocab"], made["model"]["merges"]
    few = {token: token_id for token, token_id in vocab.items() if token_id < NUM_TOKENS}
    made["model"] |= {"vocab": few, "merges": merges[:3]}
    return made


@cache
def _demo_text() -> str:
    return (BASE_DIR / TOKENIZER_FILE).read_text(encoding="utf-8")


def say(draft: Draft, rng: Random, name: str, change: Callable[[Any], object]) -> None:
    """A good JSON file with a change."""
    add_files(draft, rng, name)
    said = json.loads(draft.beside[name])
    change(said)
    draft.beside[name] = file_bytes(said)


def set_fields(draft: Draft, rng: Random, name: str, **fields: Any) -> None:
    say(draft, rng, name, lambda said: said.update(fields))
