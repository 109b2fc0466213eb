"""Answers in harmony's format: what is content, what reasoning, for any tokens and any cut."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model_runner.harmony import ChannelSplitter, Piece, find_marks
from model_runner.request import FinishReason, Request, RequestOutput, SamplingParams
from model_runner.sequence_text import TextOutput
from model_runner.text import TextEngine
from model_runner.tokenizer import Tokenizer
from tests.model_runner.demo import BASE_DIR, chat
from tests.model_runner.vocabularies import HARMONY, harmony

ANALYSIS = "<|channel|>analysis<|message|>The user asks.<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>Tōkyō 🗼.<|return|>"
PREAMBLE = "<|start|>assistant<|channel|>commentary<|message|>I look it up.<|end|>"
ARGUMENTS = '<|constrain|>json<|message|>{"city": "Tokyo"}<|call|>'
CALL = f"<|start|>assistant<|channel|>commentary to=functions.find {ARGUMENTS}"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return harmony(tmp_path_factory.mktemp("harmony"))


def split(tokenizer: Tokenizer, answer: Sequence[int], prompt: Sequence[int]) -> Piece:
    marks = find_marks(tokenizer)
    assert marks is not None
    splitter = ChannelSplitter(tokenizer, marks, prompt)
    pieces = [*(splitter.push(i) for i in answer), splitter.flush()]
    return Piece("".join(p.content for p in pieces), "".join(p.reasoning for p in pieces))


def told(tokenizer: Tokenizer, answer: str, prompt: str = "<|start|>assistant") -> Piece:
    return split(tokenizer, tokenizer.encode(answer), tokenizer.encode(prompt))


@pytest.mark.parametrize(
    ("answer", "content", "reasoning"),
    [
        (ANALYSIS + FINAL, "Tōkyō 🗼.", "The user asks."),
        (ANALYSIS + "so<|end|>" + FINAL, "so\nTōkyō 🗼.", "The user asks."),
        (ANALYSIS + ANALYSIS + FINAL, "Tōkyō 🗼.", "The user asks.\nThe user asks."),
        (ANALYSIS, "", "The user asks."),
        ("<|channel|>final<|message|>Tokyo<|return|>", "Tokyo", ""),
        ("<|channel|>final <|constrain|>json<|message|>{}<|return|>", "{}", ""),
        (ANALYSIS + PREAMBLE + FINAL, "I look it up.\nTōkyō 🗼.", "The user asks."),
        (
            ANALYSIS + PREAMBLE + CALL,
            "I look it up.",
            'The user asks.\nto=functions.find {"city": "Tokyo"}',
        ),
        (
            f"<|channel|>commentary to=functions.find {ARGUMENTS}",
            "",
            'to=functions.find {"city": "Tokyo"}',
        ),
        (
            f" to=functions.find<|channel|>commentary{ARGUMENTS}",
            "",
            'to=functions.find {"city": "Tokyo"}',
        ),
        ("<|channel|>analysis to=python code<|message|>1 + 1<|call|>", "", "to=python 1 + 1"),
        # Cut off by max_tokens
        ("<|channel|>analysis<|message|>The us", "", "The us"),
        ("<|channel|>ana", "", ""),
        ("<|channel|>", "", ""),
        (ANALYSIS + "<|start|>assist", "", "The user asks."),
        (ANALYSIS + "<|start|>assistant<|channel|>final", "", "The user asks."),
        ("<|channel|>commentary to=functions.find", "", " to=functions.find"),
        # No header, or what is none
        ("", "", ""),
        ("It is Tokyo.", "It is Tokyo.", ""),
        (" to be or to=5 not", " to be or to=5 not", ""),
        (" to=5", " to=5", ""),
        (" ", " ", ""),
        ("Tokyo<|return|>", "Tokyo", ""),
        ("<|message|>Tokyo<|return|>", "Tokyo", ""),
        ("<|start|>assistant<|message|>Tokyo<|return|>", "Tokyo", ""),
        ("<|channel|>musing<|message|>Tokyo<|return|>", "Tokyo", ""),
        ("<|channel|><|message|>Tokyo<|return|>", "Tokyo", ""),
        ("<|channel|>It is a town called Tokyo<|return|>", "It is a town called Tokyo", ""),
        ("<|channel|>final It is Tokyo, I say<|return|>", " It is Tokyo, I say", ""),
        ("<|channel|>analysis The user asks me<|end|>", "", " The user asks me"),
        ("<|start|>assistant It is Tokyo<|return|>", " It is Tokyo", ""),
        ("<|channel|>Tokyo<|return|>", "Tokyo", ""),
        (ANALYSIS + "Tokyo", "Tokyo", "The user asks."),
        ("<|channel|>analysis<|message|>Hm<|channel|>final<|message|>Tokyo", "Tokyo", "Hm"),
        ("<|channel|>final<|message|>a<|message|>b<|constrain|>c<|return|>", "abc", ""),
        ("<|end|><|end|><|call|><|constrain|><|message|>a", "a", ""),
        ("<|channel|>final<|channel|>analysis<|message|>Hm", "", "Hm"),
    ],
)
def test_each_part_is_told_apart(
    tokenizer: Tokenizer, answer: str, content: str, reasoning: str
) -> None:
    assert told(tokenizer, answer) == (content, reasoning)


@pytest.mark.parametrize(
    ("prompt", "answer", "wanted"),
    [
        (
            "<|start|>assistant<|channel|>analysis<|message|>",
            "Hm<|end|>" + FINAL,
            ("Tōkyō 🗼.", "Hm"),
        ),
        ("<|start|>assistant<|channel|>final<|message|>", "Tokyo", ("Tokyo", "")),
        ("<|start|>assistant<|channel|>", "analysis<|message|>Hm", ("", "Hm")),
        ("<|start|>user<|message|>Hi<|end|>", "Tokyo", ("Tokyo", "")),
        ("<|start|>user<|message|>Hi<|end|>", FINAL, ("Tōkyō 🗼.", "")),
        ("user: Hi", "Tokyo", ("Tokyo", "")),
        ("user: Hi", ANALYSIS + FINAL, ("Tōkyō 🗼.", "The user asks.")),
        ("<|start|>assistant" + "x" * 999, "Tokyo", ("Tokyo", "")),
    ],
)
def test_an_answer_begins_where_its_prompt_leaves_off(
    tokenizer: Tokenizer, prompt: str, answer: str, wanted: tuple[str, str]
) -> None:
    assert told(tokenizer, answer, prompt) == wanted


SAME_EACH_TIME = settings(deadline=None, derandomize=True)
WORDS = ("assistant", "analysis", "final", "commentary", " to=q", " q", "q", " json", "\n", "é")
MIXED = st.lists(st.sampled_from((*HARMONY, *WORDS)), max_size=25)


@SAME_EACH_TIME
@given(parts=MIXED)
def test_text_is_left_out_in_whole_headers_alone(tokenizer: Tokenizer, parts: list[str]) -> None:
    kept, in_header = 0, 0
    is_header = False
    for part in parts:
        if part in ("<|start|>", "<|channel|>"):
            is_header = True
        elif part == "<|message|>":
            is_header, in_header = False, 0
        elif part in HARMONY and part != "<|constrain|>":
            kept, is_header, in_header = kept + in_header, False, 0
        elif is_header:
            in_header += part.count("q")
        else:
            kept += part.count("q")
    piece = told(tokenizer, "".join(parts), "Hi")
    assert (piece.content + piece.reasoning).count("q") >= kept


@SAME_EACH_TIME
@given(data=st.data())
def test_any_ids_are_read(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Broken characters, ids outside the vocabulary; without marks all of it is content."""
    marks = [tokenizer.special_ids[name] for name in HARMONY]
    some = st.lists(st.one_of(st.sampled_from(marks), st.integers(0, tokenizer.vocab_size + 3)))
    split(tokenizer, data.draw(some), data.draw(some))
    plain = [i for i in data.draw(some) if i not in marks]
    prompt = tokenizer.encode("<|start|>assistant")
    assert split(tokenizer, plain, prompt) == (tokenizer.decode(plain), "")


def test_plain_text_comes_with_its_tokens(tokenizer: Tokenizer) -> None:
    marks = find_marks(tokenizer)
    assert marks is not None
    splitter = ChannelSplitter(tokenizer, marks, tokenizer.encode("<|start|>assistant"))
    ids = tokenizer.encode("Arr, matey! Tokyo it be!")
    assert len(ids) > 3 and all(splitter.push(i).content for i in ids)


def test_other_vocabularies_have_no_channels(tokenizer: Tokenizer) -> None:
    assert find_marks(Tokenizer(BASE_DIR)) is None and find_marks(tokenizer) is not None


# Behind the text engine


def run(
    tokenizer: Tokenizer,
    answer: str,
    cuts: Sequence[int] = (),
    stop: Sequence[str] = (),
    delivered: int = 0,
    is_chat: bool = True,
) -> TextOutput:
    """All of its outputs joined. cuts  sizes of the messages in which the tokens come"""
    ids = tokenizer.encode(answer)

    async def outputs(_: Request) -> AsyncIterator[RequestOutput]:
        at = delivered
        for size in (*cuts, len(ids)):
            piece, at = tuple(ids[at : at + size]), min(at + size, len(ids))
            reason = FinishReason.STOP if at == len(ids) else None
            yield RequestOutput("r", 0, piece, finish_reason=reason, num_output_tokens=at)
            if reason:
                return

    async def joined() -> TextOutput:
        resumed = (tuple(ids[:delivered]),) if delivered else ()
        prompt = tuple(tokenizer.encode_chat(chat("Hi")))
        request = Request("r", prompt, SamplingParams(), resumed=resumed)
        texts = TextEngine(tokenizer, outputs)
        parts = [output async for output in texts.stream(request, stop, is_chat=is_chat)]
        return TextOutput(
            "r",
            text="".join(part.text for part in parts),
            reasoning="".join(part.reasoning for part in parts),
            token_ids=tuple(i for part in parts for i in part.token_ids),
            finish_reason=parts[-1].finish_reason,
            stop_reason=parts[-1].stop_reason,
            num_output_tokens=parts[-1].num_output_tokens,
        )

    return asyncio.run(joined())


WHOLE = ANALYSIS + PREAMBLE + FINAL


@SAME_EACH_TIME
@given(
    cuts=st.lists(st.integers(1, 6)), stop=st.sampled_from(["", "look", "it up.\nT", "user", "🗼"])
)
def test_streamed_in_any_cut_it_is_the_same(
    tokenizer: Tokenizer, cuts: list[int], stop: str
) -> None:
    stops = [stop] if stop else []
    assert run(tokenizer, WHOLE, cuts, stops) == run(tokenizer, WHOLE, stop=stops)


def test_stop_strings_look_at_content_alone(tokenizer: Tokenizer) -> None:
    all_of_it = run(tokenizer, WHOLE, stop=["user", "analysis", "assistant"])
    assert all_of_it.text == "I look it up.\nTōkyō 🗼." and all_of_it.stop_reason is None
    assert all_of_it.num_output_tokens == len(tokenizer.encode(WHOLE))
    cut = run(tokenizer, WHOLE, stop=["look"])
    assert (cut.text, cut.reasoning, cut.stop_reason) == ("I ", "The user asks.", "look")
    needed = tokenizer.encode(WHOLE[: WHOLE.index(" it up")])
    assert list(cut.token_ids) == needed and cut.num_output_tokens == len(needed)


def test_a_completion_is_raw(tokenizer: Tokenizer) -> None:
    raw = run(tokenizer, WHOLE, is_chat=False)
    assert raw.text == tokenizer.decode(tokenizer.encode(WHOLE)) and not raw.reasoning


def test_a_resumed_chat_goes_on_in_its_channel(tokenizer: Tokenizer) -> None:
    whole = run(tokenizer, WHOLE)
    for delivered in range(1, len(tokenizer.encode(WHOLE))):
        rest = run(tokenizer, WHOLE, delivered=delivered)
        assert whole.text.endswith(rest.text) and whole.reasoning.endswith(rest.reasoning)
        ids = tokenizer.encode(WHOLE)[:delivered]
        given_text = split(tokenizer, ids, tokenizer.encode("<|start|>assistant"))
        assert given_text.content.rstrip("\ufffd") + rest.text == whole.text
        assert given_text.reasoning + rest.reasoning == whole.reasoning
