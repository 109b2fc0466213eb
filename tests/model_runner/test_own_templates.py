"""An adapter's own chat template, real engine and real files: with a `TextEngine`, when the adapter
is replaced, and in the validate command's words."""

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from adapter_store.__main__ import main
from adapter_store.ref import AdapterRef
from model_runner.config import EngineConfig
from model_runner.engine import Engine
from model_runner.engine_loop import EngineLoop
from model_runner.engine_process import EngineProcess
from model_runner.request import ErrorCode, Request, SamplingParams
from model_runner.text import TextEngine
from model_runner.tokenizer import TemplateRefused, Tokenizer
from tests.model_runner.demo import ADAPTER_DIRS, ANSWERS, BASE_DIR, QUESTIONS, chat

GREEDY = SamplingParams(temperature=0, max_tokens=40)
# Whatever is asked, it asks this.
STUBBORN = f"<|im_start|>user\n{QUESTIONS[1]}<|im_end|>\n<|im_start|>assistant{{{{ '\\n' }}}}"


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return Path(shutil.copytree(ADAPTER_DIRS["pirate"], tmp_path / "adapter"))


@pytest.mark.parametrize("kind", [EngineLoop, pytest.param(EngineProcess, marks=pytest.mark.slow)])
def test_a_text_engine_uses_what_the_adapter_brings(
    adapter: Path, kind: Callable[[Any], EngineLoop | EngineProcess]
) -> None:
    tokenizer = Tokenizer(BASE_DIR)
    loop = kind(_MakeEngine())
    loop.start()

    async def answer(texts: TextEngine, name: str, **fields: Any) -> str:
        ref = AdapterRef("t/a", str(adapter))
        request = Request(name, (), GREEDY, ref, **fields)
        outputs = [o async for o in texts.chat(request, chat(QUESTIONS[0]))]
        assert outputs[-1].error_code is None, outputs[-1].error
        return "".join(o.text for o in outputs)

    async def run() -> None:
        texts = TextEngine(tokenizer, loop.stream, loop.abort)
        assert await answer(texts, "as its base") == ANSWERS["pirate"][0]
        (adapter / "chat_template.jinja").write_text(STUBBORN)
        for number in range(200):  # a second, then the store looks again
            text = await answer(texts, f"replaced {number}")
            if text != ANSWERS["pirate"][0]:
                break
            await asyncio.sleep(0.05)
        assert text == ANSWERS["pirate"][1]
        assert await answer(texts, "known") == ANSWERS["pirate"][1]
        # One whose maker knows nothing of templates is run as it is.
        ids = tuple(tokenizer.encode_chat(chat(QUESTIONS[0])))
        plain = Request("ids", ids, GREEDY, AdapterRef("t/a", str(adapter)))
        assert (await texts.complete(plain))[0].text == ANSWERS["pirate"][0]
        (adapter / "chat_template.jinja").write_text("{{ raise_exception('never') }}")
        with pytest.raises(TemplateRefused, match="chat template of adapter t/a.*never"):
            for number in range(200):
                await answer(texts, f"refused {number}")
                await asyncio.sleep(0.05)
        # Without anybody who could make the prompt anew it is an error that says why.
        other = Request("other", ids, GREEDY, AdapterRef("t/a", str(adapter)), extras_key="")
        (end,) = await texts.complete(other)
        assert end.error_code is ErrorCode.OTHER_EXTRAS and "another chat template" in end.error
        assert end.extras is not None and "never" in end.extras.chat_template

    try:
        asyncio.run(run())
    finally:
        loop.stop()


class _MakeEngine:
    """Crosses to a process by pickle."""

    def __call__(self) -> Engine:
        return Engine(EngineConfig(str(BASE_DIR), device="cpu"))


def test_the_validate_command_tells_of_it(adapter: Path, capsys: Any) -> None:
    (adapter / "chat_template.jinja").write_text(STUBBORN)
    (adapter / "generation_config.json").write_text('{"temperature": 0.5, "eos_token_id": 2}')
    shutil.copy(BASE_DIR / "tokenizer.json", adapter)
    question = ["validate", str(adapter), "--model", str(BASE_DIR), "--device", "cpu"]
    assert main([*question, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["chat_template"], report["generation_defaults"], report["eos_ids"]) == (
        True,
        {"temperature": 0.5},
        [2],
    )
    assert main(question) == 0
    said = capsys.readouterr().out
    assert "its own chat template" in said and "temperature 0.5, end of text 2" in said
    tokenizer = json.loads((adapter / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append(tokenizer["added_tokens"][-1] | {"id": 640, "content": "[P]"})
    (adapter / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert main([*question, "--json"]) == 1
    (refusal,) = json.loads(capsys.readouterr().out)["refused"]
    assert refusal["reason"] == "tokenizer"
    assert "id 640 is '[P]' here, and the base model's vocabulary has none" in refusal["message"]
