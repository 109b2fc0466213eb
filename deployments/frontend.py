"""The life of one HTTP request between its body and the engine: who asks, how much at once, tokens
to text, what is counted.

Not here: what a body means (job_maker.py), routes (ingress.py), Ray: the replicas are behind a
`Backend`, so all of this runs in a plain test.
"""

import asyncio
import logging
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeVar

from deployments import metrics
from deployments.admission import Job, Remaker
from deployments.api_errors import (
    CLIENT_GONE_STATUS,
    ApiError,
    engine_error,
    internal_error,
    overloaded,
    unauthorized,
)
from deployments.body import BIG_BYTES, BodyBudget
from deployments.config import ServiceConfig
from deployments.job_maker import JobMaker
from deployments.meter import Meter
from deployments.openai_schema import ModelCard, ModelList
from deployments.operators import Judge, Operators
from deployments.placement.view import Place, Placement
from deployments.resumption import Resumption
from deployments.spill import stream_near_home
from deployments.streaming import ChatWriter, error_events, interleave
from deployments.tenant_labels import first_tenants
from deployments.tenants import TenantConfig, TenantDirectory, bearer_key
from deployments.usage import UsageLog
from model_runner.request import Request, RequestOutput
from model_runner.sequence_text import TextOutput
from model_runner.template_sandbox import TemplateSandbox
from model_runner.text import TextEngine
from model_runner.tokenizer import Tokenizer

Output = tuple[int, TextOutput]
Outputs = AsyncGenerator[Output, None]
Prepare = Callable[[TenantConfig, bytes, str], Awaitable[Job]]
_T = TypeVar("_T")
_log = logging.getLogger("ray.serve")


class Backend(Judge, Protocol):
    """The replicas of one base model, wherever they are."""

    def stream(
        self, request: Request, place: Place | None, again: bool = False
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run a request. Closing the generator aborts it in the engine.

        again  it ran before, under an id that began like this one up to "/": go on with what is
               known of it
        """
        ...

    async def abort(self, request_id: str, index: int) -> None:
        """End one of the n sequences of a running request."""
        ...


class Frontend:
    """What one ingress knows and does. One event loop owns it: no locks."""

    def __init__(
        self, config: ServiceConfig, salt_key: bytes, backends: Mapping[str, Backend]
    ) -> None:
        tenants = config.tenant_configs()
        self.config = config
        self.placement = Placement()
        self.log = metrics.MetricLog()
        self.usage = UsageLog() if config.usage.root else None
        self.labelled = first_tenants((t.tenant_id for t in tenants), config.max_metric_tenants)
        self.traffic: Counter[str] = Counter()  # tokens by adapter_id since the last sync
        self._secret = salt_key
        self._directory = TenantDirectory(tenants, [m.name for m in config.models], salt_key)
        self._sandbox = TemplateSandbox()
        self._backends = backends
        self._texts = {
            model.name: TextEngine(
                Tokenizer(model.path),
                partial(backends[model.name].stream, place=None),
                backends[model.name].abort,
                self._sandbox,
            )
            for model in config.models
        }
        self.jobs = JobMaker(config, self._directory, self._texts)
        self.operators = Operators(config, backends)
        self._active: Counter[str] = Counter()
        limit = config.ingress.max_bodies_bytes
        self.bodies = BodyBudget(limit, max(limit // 4, config.ingress.max_body_bytes))
        self._big_work: defaultdict[str, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(1)
        )
        self._started_at = int(time.time())

    def stop(self) -> None:
        """End the processes that it started. Blocks."""
        self._sandbox.close()

    def _text_of(self, job: Job, meter: Meter, again: bool) -> TextEngine:
        """The text of one connection's runs. Its requests are its own: where they ran before, they
        get other ids, for another connection may have asked for the same answer."""
        model, names = job.target.model, {request.request_id for request in job.requests}
        backend, text = self._backends[model], self._texts[model]
        mark = f"/{secrets.token_hex(4)}" if again else ""

        async def stream(request: Request) -> AsyncGenerator[RequestOutput, None]:
            place = self.placement.place(request.adapter.adapter_id if request.adapter else "")
            is_answer = request.request_id in names  # else it only asks for extras
            if again:
                place = replace(place, seats=self.placement.seats.get(model, ()))
            request = replace(request, request_id=request.request_id + mark)
            run = partial(backend.stream, again=again and is_answer)
            async with aclosing(stream_near_home(run, request, place)) as outputs:
                async for output in outputs:
                    if is_answer:
                        meter.received(output)
                    yield output

        async def abort(request_id: str, index: int) -> None:
            await backend.abort(request_id + mark, index)

        return text.around(stream, abort)

    def tenant_of(self, headers: Mapping[str, str]) -> TenantConfig:
        """Who asks. A trusted header, where there is one, beats the key, even an empty one.

        Where no tenant has a key, none is looked at: clients send some word or other then.
        headers  by their names in lower case, each once.  Errors: ApiError 401.
        """
        settings = self.config.ingress
        tenant: TenantConfig | None = None
        trusted = settings.trusted_tenant_header.lower()
        named = headers.get(trusted) if trusted else None
        authorization = headers.get("authorization", "")
        if named is not None:
            tenant = self._directory.tenant(named)
        elif authorization and self._directory.has_keys:
            key = bearer_key(authorization)
            if key is not None:
                tenant = self._directory.tenant_of_key(key)
        elif settings.anonymous_tenant:
            tenant = self._directory.tenant(settings.anonymous_tenant)
        if tenant is None:
            self.log.count(metrics.REQUESTS, ("", "", "401"))
            raise unauthorized()
        return tenant

    def models(self, tenant: TenantConfig) -> ModelList:
        """What this tenant may name as `model`."""
        return ModelList(data=[self.model(tenant, name) for name in self._directory.names(tenant)])

    def model(self, tenant: TenantConfig, name: str) -> ModelCard:
        """One of them. Errors: ApiError 404."""
        target = self.jobs.resolve(tenant, name)
        return ModelCard(
            id=name,
            created=self._started_at,
            owned_by=(target.owner or tenant).tenant_id if target.adapter else "base",
            parent=target.model if target.adapter else None,
        )

    def resumption(
        self, tenant: TenantConfig, path: str, body: bytes, cursor: str | None
    ) -> Resumption:
        """Which answer this is: a new one, or that of the cursor. Errors: ApiError 400."""
        return Resumption(self._secret, tenant.tenant_id, path, body, cursor)

    async def prepared(
        self, prepare: Prepare, tenant: TenantConfig, body: bytes, answer_id: str
    ) -> Job:
        """What `prepare` makes of a body: of a big one off the loop, and one at a time per tenant.

        Errors: those of `prepare`.
        """
        if len(body) <= BIG_BYTES:
            return await prepare(tenant, body, answer_id)
        return await self._in_turn(tenant.tenant_id, partial(prepare, tenant, body, answer_id))

    async def _in_turn(self, tenant_id: str, work: Callable[[], Awaitable[_T]]) -> _T:
        """Big work in threads: one at a time per tenant.

        It is done to its end even if nobody waits for it any more: a thread cannot be stopped, and
        a client that comes and goes would fill them all.
        """
        gate = self._big_work[tenant_id]
        await gate.acquire()
        task = asyncio.ensure_future(work())

        def ended(task: asyncio.Future[_T]) -> None:
            gate.release()
            if not task.cancelled():
                task.exception()  # heard, whether somebody waits or not

        task.add_done_callback(ended)
        return await asyncio.shield(task)

    def meter(self, tenant: TenantConfig) -> Meter:
        """Count a request in. Errors: ApiError 429 where tenant or ingress has its fill."""
        settings, label = self.config.ingress, self.labelled.label(tenant.tenant_id)
        if self._active.total() >= settings.max_concurrent_requests:
            self.log.count(metrics.REQUESTS, ("", label, "429"))
            raise overloaded(f"{settings.max_concurrent_requests} requests at once: try again")
        limit = tenant.limits.max_concurrent_requests
        if self._active[tenant.tenant_id] >= limit:
            self.log.count(metrics.REQUESTS, ("", label, "429"))
            raise overloaded(f"tenant {tenant.tenant_id} has {limit} requests running: try again")
        self._active[tenant.tenant_id] += 1
        return Meter(
            self.log,
            self.traffic,
            self.labelled.label,
            tenant.tenant_id,
            self.usage,
            partial(self._leave, tenant.tenant_id),
        )

    def _leave(self, tenant_id: str) -> None:
        self._active[tenant_id] -= 1
        if not self._active[tenant_id]:
            del self._active[tenant_id]  # the sum over all is taken for every request

    async def outputs(self, job: Job, meter: Meter, again: bool = False) -> Outputs:
        """The job's outputs, each with its choice's number.

        again  it ran before, for a connection that broke
        Errors: ApiError for what failed in the engine.
        """
        text = self._text_of(job, meter, again)
        num_choices = job.requests[0].sampling.n
        requests, remake = job.requests, Remaker(self._with_turns(job))
        # What a broken connection was told of is no place to learn of another template.
        if again and text.chats.known(job.target.adapter) is None:
            extras = await text.ask_extras(requests[0])
            if extras is not None and extras.key:
                requests = tuple([await remake(i, extras) for i in range(len(requests))])
        is_chat = isinstance(job.writer, ChatWriter)
        streams = [
            text.stream(request, job.stop, remake=partial(remake, number), is_chat=is_chat)
            for number, request in enumerate(requests)
        ]
        async with aclosing(interleave(streams)) as outputs:
            async for number, output in outputs:
                if output.error_code is not None:
                    raise engine_error(output.error_code, output.error)
                meter.saw(job, output)
                yield number * num_choices + output.index, output

    def _with_turns(self, job: Job) -> Job:
        """Made anew of a big body, it waits for its tenant's turn, as it did when it was made."""
        remake = job.remake
        if remake is None or job.kept_bytes <= BIG_BYTES:
            return job
        tenant_id = job.requests[0].tenant_id
        return replace(job, remake=lambda e: self._in_turn(tenant_id, partial(remake, e)))

    async def first(self, outputs: Outputs) -> Output:
        """The first output: an error that comes instead of it can still be an HTTP status."""
        try:
            async with asyncio.timeout(self.config.ingress.max_waiting_s):
                return await anext(outputs)
        except TimeoutError:
            raise overloaded("the request waited too long for its first token", 503) from None

    async def whole(self, job: Job, meter: Meter) -> bytes:
        """The answer of a job that is not streamed."""
        async with aclosing(self.outputs(job, meter)) as outputs:
            job.writer.collect(*await self.first(outputs))
            async for index, output in outputs:
                job.writer.collect(index, output)
        if job.writer.is_long:
            write = partial(asyncio.to_thread, job.writer.whole)
            answer = await self._in_turn(job.requests[0].tenant_id, write)
        else:
            answer = job.writer.whole()
        meter.finish(200)
        return answer

    async def drop(self, outputs: Outputs, first: "asyncio.Task[Output]") -> None:
        """Give up a streamed answer, however far it came; nothing happens if it came to its end."""
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await outputs.aclose()

    async def close(self, meter: Meter, outputs: Outputs, first: "asyncio.Task[Output]") -> None:
        """The end of a streamed answer that is the response by now."""
        await self.drop(outputs, first)
        meter.finish(CLIENT_GONE_STATUS)

    async def events(
        self,
        job: Job,
        meter: Meter,
        outputs: Outputs,
        first: Awaitable[Output],
        resumption: Resumption,
    ) -> AsyncGenerator[bytes, None]:
        """The server-sent events of a job, without those that the client has. What fails from here
        on is an event as well."""
        try:
            async with aclosing(outputs):
                if event := resumption.event(job.writer, *await first):
                    yield event
                async for index, output in outputs:
                    if event := resumption.event(job.writer, index, output):
                        yield event
            meter.finish(200)
            yield job.writer.last_chunks()
        except ApiError as exc:
            meter.finish(exc.status)
            yield error_events(exc)
        except Exception as exc:
            _log.error("a stream failed unexpectedly", exc_info=exc)
            meter.finish(500)
            yield error_events(internal_error())
        finally:
            meter.finish(CLIENT_GONE_STATUS)
