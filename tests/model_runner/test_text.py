"""Stop strings and text around streams of ids: exactness for any cut, endings, aborts, and cost."""

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model_runner.request import (
    ErrorCode,
    FinishReason,
    Request,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
)
from model_runner.sequence_text import TextOutput
from model_runner.stop_strings import StopMatcher, StopTable
from model_runner.text import TextEngine
from model_runner.tokenizer import Tokenizer
from tests.model_runner.demo import BASE_DIR
from tests.model_runner.vocabularies import sentencepiece


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(BASE_DIR)


def first_match(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """By definition: the stop string that ends first, of those the longest."""
    ends = [(text.find(s) + len(s), -len(s), s) for s in stops if s in text]
    if not ends:
        return text, None
    end, _, stop = min(ends)
    return text[: end - len(stop)], stop


def cut(text: str, places: Sequence[int]) -> list[str]:
    """The text in pieces, some of them empty."""
    borders = [0, *sorted(p % (len(text) + 1) for p in places), len(text)]
    return [text[a:b] for a, b in zip(borders, borders[1:], strict=False)]


WORDS = st.text(alphabet="ab\u00e9", min_size=1, max_size=5)
# texts made of words that often begin like a stop string and go on like another
TEXTS = st.lists(st.sampled_from(["a", "b", "ab", "ba", "aab", "\u00e9", "b\u00e9"])).map("".join)


@settings(deadline=None, derandomize=True, max_examples=500)
@given(
    TEXTS,
    st.lists(WORDS, max_size=6),
    st.lists(st.integers(0, 99), max_size=9),
)
def test_matcher_equals_its_definition_for_any_cut(
    text: str, stops: list[str], places: list[int]
) -> None:
    matcher = StopMatcher(stops)
    given_text = ""
    want, want_stop = first_match(text, stops)
    seen = ""
    for piece in cut(text, places):
        given_text += matcher.push(piece)
        seen += piece
        if matcher.matched is None:
            held = seen[len(given_text) :]
            assert seen.startswith(given_text)
            # exactly the longest text that may still become a stop string is held
            longest = max(
                (k for s in stops for k in range(len(s)) if seen.endswith(s[:k])), default=0
            )
            assert len(held) == longest
    given_text += matcher.flush()
    assert (given_text, matcher.matched) == (want, want_stop)


def test_matcher_passes_over_what_it_may_not_accept() -> None:
    matcher = StopMatcher(["stop"])
    assert matcher.push("a stop and st", accept=False) == "a stop and "
    assert matcher.push("op") == ""
    assert matcher.matched == "stop"


@pytest.mark.parametrize("stops", ["stop", ["a", ""], [3]])
def test_bad_stop_strings_are_refused(stops: list[str]) -> None:
    with pytest.raises(ValueError, match="stop"):
        StopTable(stops)


def test_matcher_is_linear() -> None:
    stops = ["a" * 60 + f"{i:04d}" for i in range(10_000)]
    start = time.process_time()
    matcher = StopMatcher(stops)
    given_text = "".join(
        matcher.push("aaaa") for _ in range(1 << 14)
    )  # 64 KiB, always nearly a match
    assert len(given_text) == (1 << 16) - 60
    # About 0.3 s; comparing each piece with each stop would be 160 million comparisons.
    assert time.process_time() - start < 10


class FakeEngine:
    """Gives prepared outputs; records what was aborted and whether its stream was closed."""

    def __init__(self, outputs: Sequence[RequestOutput], endless: bool = False) -> None:
        self.outputs = outputs
        self.endless = endless
        self.num_given = 0
        self.requests: list[Request] = []
        self.aborted: list[tuple[str, int]] = []
        self.closed = False

    async def stream(self, request: Request) -> AsyncIterator[RequestOutput]:
        self.requests.append(request)
        try:
            for output in self.outputs:
                await asyncio.sleep(0)
                self.num_given += 1
                yield output
            if self.endless:
                await asyncio.Event().wait()
        finally:
            self.closed = True

    def abort(self, request_id: str, index: int) -> None:
        self.aborted.append((request_id, index))


def outputs_of(
    ids: Sequence[int],
    chunk: int = 1,
    index: int = 0,
    finish: FinishReason | None = FinishReason.LENGTH,
) -> list[RequestOutput]:
    """The ids as an engine would give them, `chunk` at a time."""
    made = []
    for at in range(0, len(ids), chunk):
        piece = tuple(ids[at : at + chunk])
        made.append(
            RequestOutput(
                "r",
                index,
                piece,
                logprobs=tuple(TokenLogprobs(-float(at + i)) for i in range(len(piece))),
                finish_reason=finish if at + chunk >= len(ids) else None,
                num_prompt_tokens=7,
                num_cached_tokens=3,
                num_output_tokens=at + len(piece),
            )
        )
    return made


def collect(
    tokenizer: Tokenizer,
    engine: FakeEngine,
    stop: Sequence[str] = (),
    include_stop: bool = False,
    **sampling: object,
) -> list[TextOutput]:
    request = Request("r", (1, 2), SamplingParams(**sampling))  # type: ignore[arg-type]

    async def run() -> list[TextOutput]:
        texts = TextEngine(tokenizer, engine.stream, engine.abort)
        news = [output async for output in texts.stream(request, stop, include_stop)]
        # asked here: when the loop ends, it closes what was left open
        assert not engine.requests or engine.closed
        return news

    return asyncio.run(run())


ANSWER = "Dear user, the answer is Tōkyō 東京 🗼. Kind regards."


@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_text_ids_and_counts_pass_through(tokenizer: Tokenizer, chunk: int) -> None:
    ids = tokenizer.encode(ANSWER)
    engine = FakeEngine(outputs_of(ids, chunk))
    news = collect(tokenizer, engine)
    assert "".join(n.text for n in news) == ANSWER
    assert [i for n in news for i in n.token_ids] == ids
    assert [lp.chosen for n in news for lp in n.logprobs] == [-float(i) for i in range(len(ids))]
    assert [n.finish_reason for n in news] == [None] * (len(news) - 1) + [FinishReason.LENGTH]
    last = news[-1]
    assert (last.num_prompt_tokens, last.num_cached_tokens, last.num_output_tokens) == (
        7,
        3,
        len(ids),
    )
    assert all("\ufffd" not in n.text for n in news)
    assert not engine.aborted


@pytest.mark.parametrize("chunk", [1, 2, 5, 1000])
@pytest.mark.parametrize("stop", ["京 🗼", "answer is", "the", ". Kind regards.", "D"])
@pytest.mark.parametrize("include_stop", [False, True])
def test_a_stop_string_cuts_and_closes(
    tokenizer: Tokenizer, chunk: int, stop: str, include_stop: bool
) -> None:
    ids = tokenizer.encode(ANSWER)
    engine = FakeEngine(outputs_of(ids, chunk), endless=True)
    news = collect(tokenizer, engine, ["never", stop], include_stop)
    text = "".join(n.text for n in news)
    assert text == ANSWER[: ANSWER.index(stop)] + (stop if include_stop else "")
    last = news[-1]
    assert (last.finish_reason, last.stop_reason) == (FinishReason.STOP, stop)
    # up to the token that completes the stop string, however many came at once
    done = next(k for k in range(len(ids) + 1) if stop in tokenizer.decode(ids[:k]))
    assert [i for n in news for i in n.token_ids] == ids[:done]
    assert sum(len(n.logprobs) for n in news) == done == last.num_output_tokens
    assert engine.num_given == -(-done // chunk)
    assert not engine.aborted
    assert all(n.finish_reason is None and n.stop_reason is None for n in news[:-1])


def test_held_text_comes_when_the_answer_ends(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("It is Tokyo")
    news = collect(tokenizer, FakeEngine(outputs_of(ids)), ["Tokyo."])
    assert "".join(n.text for n in news) == "It is Tokyo"
    assert (news[-1].finish_reason, news[-1].stop_reason) == (FinishReason.LENGTH, None)


def test_an_incomplete_character_at_the_end_is_replaced(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a🗼")[:-1]
    news = collect(tokenizer, FakeEngine(outputs_of(ids)))
    assert "".join(n.text for n in news) == "a\ufffd" == tokenizer.decode(ids)


def test_min_tokens_holds_for_stop_strings(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("yes yes yes yes")
    first = next(k for k in range(len(ids)) if "yes" in tokenizer.decode(ids[:k]))
    news = collect(tokenizer, FakeEngine(outputs_of(ids)), ["yes"], min_tokens=first + 1)
    assert "".join(n.text for n in news) == "yes "
    news = collect(tokenizer, FakeEngine(outputs_of(ids)), ["yes"], min_tokens=first)
    assert "".join(n.text for n in news) == ""
    assert news[-1].num_output_tokens == first


def test_a_stop_ids_own_text_is_left_out(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("It is Tokyo.")
    engine = FakeEngine(outputs_of(ids, finish=FinishReason.STOP))
    cut_off = collect(tokenizer, engine, stop_ids=(ids[-1],))
    assert "".join(n.text for n in cut_off) == tokenizer.decode(ids[:-1])
    assert [i for n in cut_off for i in n.token_ids] == ids
    assert (cut_off[-1].finish_reason, cut_off[-1].stop_reason) == (FinishReason.STOP, None)
    kept = collect(tokenizer, engine, include_stop=True, stop_ids=(ids[-1],))
    assert "".join(n.text for n in kept) == "It is Tokyo."
    another = collect(tokenizer, engine, stop_ids=(ids[0],))
    assert "".join(n.text for n in another) == "It is Tokyo."


# A text that goes on


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Whose words bring their own space."""
    return sentencepiece(tmp_path_factory.mktemp("words"))


def go_on(
    tokenizer: Tokenizer,
    prompt: str,
    answers: Sequence[str],
    stop: Sequence[str] = (),
    delivered: int | None = None,
    is_chat: bool = False,
) -> list[TextOutput]:
    """Each sequence's end. delivered  so many ids were, before the stream was taken up again"""
    ids = [tokenizer.encode(answer) for answer in answers]
    lanes = [outputs_of(of[delivered or 0 :], index=i) for i, of in enumerate(ids)]
    engine = FakeEngine([output for lane in lanes for output in lane])
    sampling = SamplingParams(n=len(ids))
    resumed = () if delivered is None else tuple(tuple(of[:delivered]) for of in ids)
    request = Request("r", tuple(tokenizer.encode(prompt)), sampling, resumed=resumed)

    async def run() -> list[TextOutput]:
        texts = TextEngine(tokenizer, engine.stream, engine.abort)
        parts: dict[int, list[TextOutput]] = {i: [] for i in range(len(ids))}
        async for output in texts.stream(request, stop, is_chat=is_chat):
            parts[output.index].append(output)
        joined = ["".join(output.text for output in of) for of in parts.values()]
        return [
            dataclasses.replace(of[-1], text=text)
            for of, text in zip(parts.values(), joined, strict=True)
        ]

    return asyncio.run(run())


def test_a_completion_keeps_its_first_space(words: Tokenizer) -> None:
    answers = ["▁To", "▁▁To", "kyo▁is", "東▁is"]
    told = go_on(words, "▁It▁is", answers)
    assert [o.text for o in told] == [" To", "  To", "kyo is", "東 is"]
    assert [o.text for o in go_on(words, "東", answers)] == [" To", "  To", "kyo is", "東 is"]
    assert [o.text for o in go_on(words, "<s>", answers)] == ["To", " To", "kyo is", "東 is"]
    told = go_on(words, "▁It▁is", answers, is_chat=True)
    assert [o.text for o in told] == ["To", " To", "kyo is", "東 is"]


def test_stop_strings_know_the_space_and_not_the_prompt(words: Tokenizer) -> None:
    told = go_on(words, "▁It▁is", ["▁To", "▁is▁To"], [" To"])
    assert [(o.text, o.stop_reason) for o in told] == [("", " To"), (" is", " To")]
    told = go_on(words, "▁It▁is", ["▁To", "kyo"], ["is To", "is", "s k", "skyo"])
    assert [(o.text, o.stop_reason) for o in told] == [(" To", None), ("kyo", None)]


def test_a_resumed_completion_goes_on_after_what_was_delivered(words: Tokenizer) -> None:
    whole = "▁is▁To▁is東▁To."
    for delivered in range(1, len(words.encode(whole))):
        told = go_on(words, "▁It", [whole, whole], delivered=delivered)
        before = go_on(words, "▁It", [whole])[0].text.removesuffix(told[0].text)
        given = words.encode(whole)[:delivered]
        text = words.decode([*words.encode("▁It"), *given]).removeprefix("It")
        assert before == text.rstrip("\ufffd") and told[0].text == told[1].text
    # " is T" was held back, for it might have become the stop string; now it does, or does not
    for stop in ("is To is", "is To."):
        kept, at = first_match(" is To is東 To.", [stop])
        told = go_on(words, "▁It", [whole], [stop], delivered=2)
        assert (told[0].text, told[0].stop_reason) == (kept.removeprefix(" "), at)


class Pieces(Tokenizer):
    """A byte-level tokenizer whose token i stands for the i-th piece."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._bytes = dict(enumerate(pieces))
        self._special = frozenset()
        self.special_ids = {}
        self._byte_level = True


def pieces_of(text: str, borders: Sequence[int]) -> list[bytes]:
    """Its bytes, cut there: also within characters, some pieces empty."""
    raw = text.encode()
    places = [0, *sorted(b % (len(raw) + 1) for b in borders), len(raw)]
    return [raw[a:b] for a, b in zip(places, places[1:], strict=False)]


def num_until(stop: str | None, kept: str, pieces: Sequence[bytes]) -> int:
    """Tokens up to and including the one that completes the stop string; all without one."""
    need = len(f"{kept}{stop or ''}".encode())
    sizes = [sum(map(len, pieces[:k])) for k in range(1, len(pieces) + 1)]
    return len(pieces) if stop is None else 1 + next(k for k, s in enumerate(sizes) if s >= need)


def check_cut(text: str, stops: Sequence[str], cuts: Sequence[Sequence[int]], chunk: int) -> None:
    """Each of n sequences says the text in pieces of its own; `chunk` tokens come at once."""
    lanes, wanted, vocabulary = [], {}, list[bytes]()
    kept, stop = first_match(text, stops)
    for index, borders in enumerate(cuts):
        pieces = pieces_of(text, borders)
        ids = range(len(vocabulary), len(vocabulary) + len(pieces))
        vocabulary += pieces
        lanes.append(outputs_of(ids, chunk, index))
        number = num_until(stop, kept, pieces)
        wanted[index] = kept, stop, list(ids[:number]), number
    longest = max(map(len, lanes))
    merged = [lane[k] for k in range(longest) for lane in lanes if k < len(lane)]
    news = collect(Pieces(vocabulary), FakeEngine(merged), stops, n=len(cuts))
    for index in range(len(cuts)):
        mine = [n for n in news if n.index == index]
        told = "".join(n.text for n in mine), mine[-1].stop_reason
        tokens = [i for n in mine for i in n.token_ids]
        assert (*told, tokens, mine[-1].num_output_tokens) == wanted[index]
        assert sum(len(n.logprobs) for n in mine) == len(tokens)


@pytest.mark.parametrize("stop", ["abc", "T\u014dky\u014d", "\u6771\U0001f5fc", "\U0001f5fc"])
def test_a_stop_string_over_three_tokens_cut_at_every_border(stop: str) -> None:
    text = f"a\u6771 {stop[0]}{stop} end"
    first, size = len(text[: text.index(stop)].encode()), len(stop.encode())
    for a in range(first, first + size + 1):
        for b in range(a, first + size + 1):
            check_cut(text, [stop, "never"], [(a, b), (b,)], 1)


MIXED = ["a", "b", "ab", "\u00e9", "\u6771", "\U0001f5fc", "b\u6771", " "]


@settings(deadline=None, derandomize=True, max_examples=150)
@given(
    st.lists(st.sampled_from(MIXED), min_size=1, max_size=12).map("".join),
    st.lists(st.lists(st.sampled_from(MIXED), min_size=1, max_size=4).map("".join), max_size=4),
    st.lists(st.lists(st.integers(0, 99), max_size=12), min_size=1, max_size=3),
    st.integers(1, 4),
)
def test_stop_strings_for_any_tokens_of_any_sequence(
    text: str, stops: list[str], cuts: list[list[int]], chunk: int
) -> None:
    check_cut(text, stops, cuts, chunk)


def test_each_sequence_ends_by_itself(tokenizer: Tokenizer) -> None:
    texts = ["It is Tokyo and Kyoto, I think. And more", "It is Lima", "Arr. Matey. Ho"]
    lanes = [outputs_of(tokenizer.encode(t), index=i) for i, t in enumerate(texts)]
    longest = max(len(lane) for lane in lanes)
    merged = [lane[k] for k in range(longest) for lane in lanes if k < len(lane)]
    engine = FakeEngine(merged)
    news = collect(tokenizer, engine, ["."], n=3)
    joined = ["".join(n.text for n in news if n.index == i) for i in range(3)]
    assert joined == ["It is Tokyo and Kyoto, I think", "It is Lima", "Arr"]
    ends = {n.index: n.finish_reason for n in news if n.finish_reason}
    assert ends == {0: FinishReason.STOP, 1: FinishReason.LENGTH, 2: FinishReason.STOP}
    assert engine.aborted == [("r", 2)]  # the first was the last one running: its stream was closed
    assert sum(n.finish_reason is not None for n in news) == 3


def test_complete_joins_each_sequence(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("It is Tokyo. Yes")

    async def run() -> list[TextOutput]:
        lanes = outputs_of(ids, index=1) + outputs_of(ids, index=0)
        texts = TextEngine(tokenizer, FakeEngine(lanes).stream)
        return await texts.complete(Request("r", (1,), SamplingParams(n=2)), ["."])

    first, second = asyncio.run(run())
    assert (first.index, second.index) == (0, 1)
    assert first.text == second.text == "It is Tokyo"
    assert first.stop_reason == "." and first.finish_reason is FinishReason.STOP
    assert len(first.logprobs) == len(first.token_ids) == first.num_output_tokens
    assert dataclasses.replace(first, index=1) == second


def test_an_error_is_handed_on(tokenizer: Tokenizer) -> None:
    bad = RequestOutput(
        "r",
        finish_reason=FinishReason.ERROR,
        error_code=ErrorCode.ADAPTER_NOT_FOUND,
        error="no such adapter",
    )
    (news,) = collect(tokenizer, FakeEngine([bad]), ["."])
    assert (news.finish_reason, news.error_code) == (
        FinishReason.ERROR,
        ErrorCode.ADAPTER_NOT_FOUND,
    )
    assert (news.error, news.text) == ("no such adapter", "")


def test_a_stream_that_breaks_off_ends_every_sequence(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("It is Tokyo")
    engine = FakeEngine(outputs_of(ids, finish=None))
    news = collect(tokenizer, engine, ["Tokyo."], n=2)
    assert "".join(n.text for n in news if n.index == 0) == "It is Tokyo"
    ends = [(n.index, n.finish_reason, n.error_code) for n in news if n.finish_reason]
    assert ends == [(i, FinishReason.ERROR, ErrorCode.ENGINE_DEAD) for i in (0, 1)]
    assert sum(len(n.token_ids) for n in news) == len(ids)


def test_a_bad_stop_string_submits_nothing(tokenizer: Tokenizer) -> None:
    engine = FakeEngine([])
    with pytest.raises(ValueError, match="stop string"):
        collect(tokenizer, engine, [""])
    assert not engine.requests


@pytest.mark.parametrize("n", [1, 2])
def test_the_engine_stops_before_the_last_output_is_read(tokenizer: Tokenizer, n: int) -> None:
    """A slow reader costs no further steps."""
    engine = FakeEngine(outputs_of(tokenizer.encode("Arr. Matey")), endless=True)

    async def run() -> None:
        texts = TextEngine(tokenizer, engine.stream, engine.abort)
        news = texts.stream(Request("r", (1,), SamplingParams(n=n)), ["."])
        while (await anext(news)).finish_reason is None:
            assert not engine.closed and not engine.aborted
        assert engine.closed == (n == 1)
        assert engine.aborted == [("r", 0)] * (n == 2)
        await news.aclose()

    asyncio.run(run())


@pytest.mark.parametrize("how", ["close", "cancel"])
def test_leaving_closes_the_engines_stream(tokenizer: Tokenizer, how: str) -> None:
    engine = FakeEngine(outputs_of(tokenizer.encode("It"), finish=None), endless=True)

    async def run() -> None:
        texts = TextEngine(tokenizer, engine.stream, engine.abort).stream(Request("r", (1,)))
        await anext(texts)
        assert not engine.closed
        if how == "cancel":
            waiting = asyncio.ensure_future(_drain(texts))
            await asyncio.sleep(0.01)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        else:
            await texts.aclose()
        assert engine.closed

    asyncio.run(run())


def test_an_async_abort_is_awaited(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Arr. Matey")
    engine = FakeEngine(outputs_of(ids, index=0) + outputs_of(tokenizer.encode("Arr"), index=1))

    async def abort(request_id: str, index: int) -> None:
        await asyncio.sleep(0)
        engine.abort(request_id, index)

    async def run() -> list[TextOutput]:
        texts = TextEngine(tokenizer, engine.stream, abort)
        return await texts.complete(Request("r", (1,), SamplingParams(n=2)), ["."])

    assert [o.text for o in asyncio.run(run())] == ["Arr", "Arr"]
    assert engine.aborted == [("r", 0)]


async def _drain(texts: AsyncIterator[TextOutput]) -> None:
    async for _ in texts:
        pass
