"""Fixtures of the serving tests: the demo's configuration, a face before a scripted backend."""

import asyncio
import shutil
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.config import ServiceConfig, load_config
from deployments.frontend import Frontend
from deployments.ingress import build_api
from deployments.placement.view import Place
from model_runner.request import ErrorCode, FinishReason, Request, RequestOutput, TokenLogprobs
from model_runner.tokenizer import Tokenizer
from tests.model_runner.vocabularies import harmony, sentencepiece

DEMO = Path(__file__).resolve().parent.parent / "data" / "demo"


class ScriptedBackend:
    """Answers with the words it was given, token by token; remembers who asked and who left."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.words = "Hello there, friend. How are you?"
        self.gap_s = 0.0
        self.failure: tuple[ErrorCode, str] | None = None
        self.requests: list[Request] = []
        self.places: list[Place | None] = []
        self.again: list[bool] = []
        self.running: set[str] = set()
        self.aborted: list[tuple[str, int]] = []

    async def stream(
        self, request: Request, place: Place | None, again: bool = False
    ) -> AsyncGenerator[RequestOutput, None]:
        self.again.append(again)
        self.requests.append(request)
        self.places.append(place)
        self.running.add(request.request_id)
        try:
            async for output in self._outputs(request):
                await asyncio.sleep(self.gap_s)
                yield output
        finally:
            self.running.discard(request.request_id)

    async def _outputs(self, request: Request) -> AsyncIterator[RequestOutput]:
        if self.failure is not None:
            code, words = self.failure
            yield RequestOutput(
                request.request_id,
                finish_reason=FinishReason.ERROR,
                error_code=code,
                error=words,
            )
            return
        sampling = request.sampling
        ids = self.tokenizer.encode(self.words)
        told: tuple[TokenLogprobs, ...] = ()
        if sampling.prompt_logprobs is not None:
            most = sampling.prompt_logprobs
            told = tuple(self._scored(i, most) for i in request.token_ids[1:])
        if not sampling.max_tokens:
            for index in range(sampling.n):
                yield RequestOutput(
                    request.request_id,
                    index,
                    finish_reason=FinishReason.LENGTH,
                    num_prompt_tokens=len(request.token_ids),
                    prompt_logprobs=() if index else told,
                )
            return
        cut = ids[: sampling.max_tokens]
        end = FinishReason.STOP if len(ids) <= sampling.max_tokens else FinishReason.LENGTH
        for position, token_id in enumerate(cut):
            for index in range(sampling.n):
                if (request.request_id, index) in self.aborted:
                    continue
                top = tuple((token_id + i, -0.5 - i) for i in range(sampling.logprobs or 0))
                yield RequestOutput(
                    request.request_id,
                    index=index,
                    new_token_ids=(token_id,),
                    logprobs=() if sampling.logprobs is None else (TokenLogprobs(-0.5, top),),
                    finish_reason=end if position == len(cut) - 1 else None,
                    num_prompt_tokens=len(request.token_ids),
                    num_cached_tokens=2,
                    num_output_tokens=position + 1,
                    prompt_logprobs=() if index or position else told,
                )

    def _scored(self, token_id: int, num_top: int) -> TokenLogprobs:
        """Best is the next id, then itself, then others; the more, the larger the id."""
        order = (token_id + 1, token_id, *range(token_id + 2, token_id + 20))
        top = tuple((other, -0.5 - i - token_id) for i, other in enumerate(order[:num_top]))
        return TokenLogprobs(-1.5 - token_id, top, rank=2)

    async def abort(self, request_id: str, index: int) -> None:
        self.aborted.append((request_id, index))


@dataclass
class FakeControl:
    absent: list[str] = field(default_factory=list)

    async def metrics(self) -> bytes:
        return b"# nothing\n"

    async def missing(self) -> list[str]:
        return self.absent


@dataclass
class Face:
    """A client, and what is behind it."""

    client: httpx.AsyncClient
    frontend: Frontend
    backend: ScriptedBackend
    control: FakeControl
    api: Any

    async def post(self, path: str, body: Any, key: str = "sk-demo-pirate") -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return await self.client.post(path, json=body, headers=headers)

    async def chat(self, key: str = "sk-demo-pirate", **fields: Any) -> httpx.Response:
        body = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]} | fields
        return await self.post("/v1/chat/completions", body, key)


@pytest.fixture(scope="session")
def demo_tokenizer() -> Tokenizer:
    return Tokenizer(DEMO / "base")


@pytest.fixture
def demo_config() -> ServiceConfig:
    return load_config()


@pytest.fixture
async def face(demo_config: ServiceConfig, demo_tokenizer: Tokenizer) -> AsyncIterator[Face]:
    async with _open_face(demo_config, demo_tokenizer) as face:
        yield face


@pytest.fixture
async def harmony_face(demo_config: ServiceConfig, tmp_path: Path) -> AsyncIterator[Face]:
    """Of a model that answers in harmony's format."""
    async with _open_face(_with_model(demo_config, tmp_path), harmony(tmp_path)) as face:
        yield face


@pytest.fixture
async def words_face(demo_config: ServiceConfig, tmp_path: Path) -> AsyncIterator[Face]:
    """Of a model whose words bring their own space."""
    async with _open_face(_with_model(demo_config, tmp_path), sentencepiece(tmp_path)) as face:
        yield face


def _with_model(config: ServiceConfig, folder: Path) -> ServiceConfig:
    shutil.copy(DEMO / "base" / "config.json", folder)
    models = [model.model_copy(update={"path": str(folder)}) for model in config.models]
    return config.model_copy(update={"models": type(config.models)(models)})


@asynccontextmanager
async def _open_face(config: ServiceConfig, tokenizer: Tokenizer) -> AsyncIterator[Face]:
    backend = ScriptedBackend(tokenizer)
    frontend = Frontend(config, b"k" * 32, {"demo": backend})
    control = FakeControl()
    api = build_api(frontend, control)
    transport = httpx.ASGITransport(api, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield Face(client, frontend, backend, control, api)
