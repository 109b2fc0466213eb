"""Whether what a hostile folder was found to bring is right, by another reader of the same files.

Templates are rendered as a service would: text or words come back, and the renderer goes on.
Not here: weights (run), how folders are made (beside).
"""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

from adapter_store.extras import AdapterExtras
from adapter_store.sources.source import (
    GENERATION_FILE,
    TEMPLATE_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
)
from model_runner.request import SamplingParams
from model_runner.template_sandbox import TemplateFailure, TemplateSandbox
from model_runner.template_worker import MAX_OUTPUT_BYTES

MAX_RENDER_S = 30.0  # on the clock, of a busy machine
MAX_REASON_CHARS = 400
_KNOWN = {
    "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "\xe9\n"}],
    "add_generation_prompt": True,
    "tools": None,
    "documents": None,
}


class ExtrasOracle:
    """base  folder of the base model that they are held against"""

    def __init__(self, base: Path) -> None:
        self._ids = _ids_of(json.loads((base / TOKENIZER_FILE).read_text()))
        self._template = (base / TEMPLATE_FILE).read_text()
        self._sandbox = TemplateSandbox(1)

    def close(self) -> None:
        self._sandbox.close()

    def check(self, folder: Path, extras: AdapterExtras) -> None:
        """Errors: AssertionError if it should have been refused, or is not what stands there."""
        config = _said(folder, TOKENIZER_CONFIG_FILE)
        if (folder / TOKENIZER_FILE).is_file():
            assert _ids_of(_said(folder, TOKENIZER_FILE)) == self._ids
        for token_id, token in (config.get("added_tokens_decoder") or {}).items():
            assert self._ids[token["content"]] == int(token_id)
        assert all(token in self._ids for _, token in extras.special_tokens)
        for name, token in extras.special_tokens:
            said = config[name]
            assert token == (said["content"] if isinstance(said, dict) else said)
        assert extras.chat_template == self._template_of(folder, config)
        self._check_sampling(_said(folder, GENERATION_FILE), extras)

    def _template_of(self, folder: Path, config: dict[str, Any]) -> str:
        path = folder / TEMPLATE_FILE
        said = path.read_bytes().decode() if path.is_file() else ""
        if not said and isinstance(said := config.get("chat_template") or "", list):
            tables = [t for t in said if isinstance(t, dict)]
            (said,) = [t["template"] for t in tables if t.get("name") == "default"]
        assert isinstance(said, str)
        return "" if said == self._template else said

    def _check_sampling(self, said: dict[str, Any], extras: AdapterExtras) -> None:
        sampling = dict(extras.sampling)
        assert SamplingParams(**sampling).problem() is None, sampling  # type: ignore[arg-type]
        if said.get("do_sample") is False:
            assert sampling.pop("temperature") == 0
        for key, value in sampling.items():
            assert type(value) is not bool and value == max(said[key], 0)
        ends = said.get("eos_token_id")
        ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
        assert sorted(set(ends)) == list(extras.eos_ids) and len(ends) <= 64
        assert all(type(i) is int for i in ends) and {*ends} <= {*self._ids.values()}

    def render(self, extras: AdapterExtras) -> None:
        """Errors: AssertionError if its template gives neither a text nor fair words."""
        if not extras.chat_template:
            return
        known = _KNOWN | dict(extras.special_tokens)
        begin = time.monotonic()
        try:
            text = asyncio.run(self._sandbox.render("hostile", extras.chat_template, known))
            assert len(text.encode()) <= MAX_OUTPUT_BYTES
        except TemplateFailure as failure:
            assert str(failure).isprintable() and 0 < len(str(failure)) <= MAX_REASON_CHARS, failure
            assert "ends its process" not in str(failure), failure
        assert time.monotonic() - begin < MAX_RENDER_S
        fair = asyncio.run(self._sandbox.render("fair", "{{ messages[0].content }}", _KNOWN))
        assert fair == "Hi"


def _said(folder: Path, name: str) -> dict[str, Any]:
    """What a JSON file says; {} if it is not there."""
    said = json.loads((folder / name).read_text()) if (folder / name).is_file() else {}
    assert isinstance(said, dict), name
    return said


def _ids_of(tokenizer: dict[str, Any]) -> dict[str, int]:
    vocab = (tokenizer.get("model") or {}).get("vocab") or {}
    if isinstance(vocab, list):
        vocab = {pair[0]: token_id for token_id, pair in enumerate(vocab)}
    added = tokenizer.get("added_tokens") or []
    return vocab | {token["content"]: token["id"] for token in added}
