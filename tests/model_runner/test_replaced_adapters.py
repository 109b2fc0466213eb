"""An adapter replaced in S3 while its answer is written: that answer goes on with what it began
with, here and on another engine, or ends in a clear error. Never a mix.

Real S3, real engines on the demo's model. Not here: which revision is fetched how
(tests/adapter_store/test_changing_content.py).
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import adapter_store.loader as loader_side
from adapter_store.ref import AdapterRef
from adapter_store.sources.source import S3Options
from model_runner.config import EngineConfig
from model_runner.engine import Engine
from model_runner.request import ErrorCode, FinishReason, Request, RequestOutput, SamplingParams
from model_runner.tokenizer import Tokenizer
from tests.model_runner.demo import ADAPTER_DIRS, ANSWERS, BASE_DIR, QUESTIONS, chat
from tests.s3_server import S3Server, start_s3_server

STYLES = ("pirate", "formal")
GREEDY = SamplingParams(temperature=0, max_tokens=40)


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with start_s3_server() as server:
        for bucket in ("plain", "versioned"):
            server.client().create_bucket(Bucket=bucket)
        server.client().put_bucket_versioning(
            Bucket="versioned", VersioningConfiguration={"Status": "Enabled"}
        )
        yield server


class Service:
    """Engines over one S3 server; engines with one folder share a host tier."""

    def __init__(self, s3: S3Server, folder: Path) -> None:
        self.s3 = s3
        self.folder = folder
        self.engines: list[Engine] = []
        self.tokenizer = Tokenizer(BASE_DIR)

    def engine(self, tier: str) -> Engine:
        config = EngineConfig(str(BASE_DIR), device="cpu", host_cache_dir=str(self.folder / tier))
        keys = self.s3.access_key, self.s3.secret_key
        self.engines.append(Engine(config, S3Options(self.s3.endpoint_url, "us-east-1", *keys)))
        return self.engines[-1]

    def request(self, name: str, ref: AdapterRef) -> Request:
        prompt = self.tokenizer.encode_chat(chat(QUESTIONS[0]))
        return Request(name, tuple(prompt), GREEDY, ref)

    def text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids)


@pytest.fixture
def service(s3: S3Server, tmp_path: Path) -> Iterator[Service]:
    made = Service(s3, tmp_path)
    yield made
    for engine in made.engines:
        engine.close()


def resumed(request: Request, ids: list[int], digest: str, name: str) -> Request:
    """What is left of a request whose engine was lost."""
    sampling = replace(request.sampling, max_tokens=request.sampling.max_tokens - len(ids))
    return replace(
        request,
        request_id=name,
        token_ids=(*request.token_ids, *ids),
        sampling=sampling,
        adapter_digest=digest,
    )


def step_until(engine: Engine, request_id: str, count: int) -> list[RequestOutput]:
    found: list[RequestOutput] = []
    end = time.monotonic() + 60
    while sum(len(o.new_token_ids) for o in found) < count and time.monotonic() < end:
        outputs = engine.step()
        found += [o for o in outputs if o.request_id == request_id]
        if not outputs:
            time.sleep(0.001)
    return found


@pytest.mark.parametrize("bucket", ["plain", "versioned"])
def test_a_request_keeps_the_content_it_began_with(
    service: Service, s3: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader_side, "_TELL_WAIT_S", 0.3)
    s3.put_folder(bucket, "a", ADAPTER_DIRS["pirate"])
    ref = AdapterRef("t/a", f"s3://{bucket}/a")
    old, new = (ANSWERS[style][0] for style in STYLES)
    engine = service.engine("one")
    request = service.request("old", ref)
    engine.submit(request)
    begun = step_until(engine, "old", 3)
    [digest] = {o.adapter_digest for o in begun}
    assert len(digest) == 64
    ids = [token for o in begun for token in o.new_token_ids]

    s3.put_folder(bucket, "a", ADAPTER_DIRS["formal"])
    time.sleep(1.0)  # the store's own freshness: new requests ask again
    engine.submit(service.request("new", ref))
    outputs = []
    while engine.has_work:  # side by side in one batch
        outputs += engine.step()
    texts = {
        name: service.text([t for o in outputs if o.request_id == name for t in o.new_token_ids])
        for name in ("old", "new")
    }
    assert service.text(ids) + texts["old"] == old and texts["new"] == new
    told = {name: {o.adapter_digest for o in outputs if o.request_id == name} for name in texts}
    assert told["old"] == {digest} and len(told["new"]) == 1 and told["new"] != {digest}

    # Another engine of the node, and one of another node, which learns from the catalog.
    again = resumed(request, ids, digest, "again")
    near, far = service.engine("one"), service.engine("two")
    [answer] = near.generate([again])
    assert service.text(ids + answer.token_ids) == old
    far.store.contents.tell({}, engine.store.contents.all(), vouched_s=60)
    [answer] = far.generate([again])
    if bucket == "versioned":
        assert service.text(ids + answer.token_ids) == old
    else:
        assert (answer.finish_reason, answer.error_code) == (
            FinishReason.ERROR,
            ErrorCode.ADAPTER_UNAVAILABLE,
        )
        assert ref.uri in answer.error and "no longer holds" in answer.error
        assert not answer.token_ids
    [answer] = far.generate([service.request("fresh", ref)])
    assert service.text(answer.token_ids) == new


def test_a_digest_that_is_none_is_refused(service: Service) -> None:
    request = service.request("x", AdapterRef("t/a", "s3://plain/a"))
    [answer] = service.engine("one").generate([replace(request, adapter_digest="pirate")])
    assert answer.error_code == ErrorCode.BAD_REQUEST and "adapter_digest" in answer.error
