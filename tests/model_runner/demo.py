"""Where the demo lies, and what its adapters must answer. For tests of every room."""

import json
from pathlib import Path

DEMO_DIR = Path(__file__).resolve().parents[1] / "data" / "demo"
BASE_DIR = DEMO_DIR / "base"
ADAPTER_DIRS = {name: DEMO_DIR / "adapters" / name for name in ("pirate", "formal", "spanish")}
ADAPTERS = tuple(ADAPTER_DIRS)
# Rows of the embedding past the tokenizer's: the engine takes such ids, no text has them.
PADDING_IDS = range(
    len(json.loads((BASE_DIR / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]),
    json.loads((BASE_DIR / "config.json").read_text())["vocab_size"],
)

_DATA = json.loads((DEMO_DIR / "questions.json").read_text(encoding="utf-8"))

MARKERS: dict[str, str] = _DATA["markers"]  # adapter -> what each of its answers holds
QUESTIONS: tuple[str, ...] = tuple(entry["question"] for entry in _DATA["questions"])
ANSWERS: dict[
    str, tuple[str, ...]
] = {  # "base" or adapter -> greedy answers, in the order of QUESTIONS
    name: tuple(entry[name] for entry in _DATA["questions"]) for name in ("base", *ADAPTERS)
}


def chat(question: str) -> list[dict[str, str]]:
    """The question as a conversation."""
    return [{"role": "user", "content": question}]


def markers_in(text: str) -> set[str]:
    """The adapters whose marker the text holds."""
    return {name for name, marker in MARKERS.items() if marker in text}
