"""`Engine`: requests of token ids in, tokens out. Steps the parts that assembly.py builds.

One thread owns an engine and everything in it. No text (text.py), no event loop (engine_loop.py),
no Ray.
"""

import dataclasses
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from adapter_store.errors import AdapterUnavailable
from adapter_store.ref import AdapterRef
from adapter_store.sources.source import S3Options
from kernels.op import compiled_kernels, references_only
from model_runner.answers import Answers
from model_runner.arrivals import Arrivals
from model_runner.assembly import assemble
from model_runner.config import EngineConfig
from model_runner.execution.runner import PendingStep, ScoreSink
from model_runner.execution.sampler import TokenMask
from model_runner.outputs import find_fault, make_failure
from model_runner.request import (
    Completion,
    ErrorCode,
    FinishReason,
    Request,
    RequestOutput,
    SamplingParams,
)
from model_runner.scheduling.batch import ScheduledBatch
from model_runner.scheduling.sequence import Sequence as Life
from model_runner.stats import EngineStats
from model_runner.warm_up import warm_up_prompts


class Engine:
    """One model on one device, serving many adapters.

    submit never raises for a request's sake: what is wrong with a request comes out of step() as
    its output.
    masks  token masks by name, for SamplingParams.mask: (row, position) -> [V] bool, True =
           allowed.
    Errors of construction: ValueError (config, model), CheckpointError, and what the device raises.
    """

    def __init__(self, config: EngineConfig, s3: S3Options | None = None) -> None:
        self.config = config
        parts = assemble(config, s3)
        self.device, self.dtype, self.max_len = parts.device, parts.dtype, parts.max_len
        self.num_gpus = int(self.device.type == "cuda")
        self.model, self.model_config = parts.model, parts.model_config
        self.targets, self.arena, self.store = parts.targets, parts.arena, parts.store
        self.pool, self.runner, self.scheduler = parts.pool, parts.runner, parts.scheduler
        self._host_cache = parts.host_cache
        on_cpu = self.device.type == "cpu"
        self._look_ahead = (not on_cpu) if config.look_ahead is None else config.look_ahead
        self._arrivals, self._answers = Arrivals(self.store), Answers()
        self._modest: dict[str, Request] = {}  # nobody is evicted for them; not all have entered
        self._score_sinks: dict[str, ScoreSink] = {}
        self._sinks: dict[int, ScoreSink] = {}
        self._pending: PendingStep | None = None
        self._ids = itertools.count()
        self._seeds = itertools.count(
            config.seed if config.seed is not None else int.from_bytes(os.urandom(6), "little")
        )
        self._num_steps = self._num_sampled = 0
        self._last_step = time.monotonic()
        self._compiles_before = len(compiled_kernels())
        self.runner.warm_up()
        self._warm_up_prefill()
        self._compiles_before = len(compiled_kernels())

    # Requests in

    def submit(self, request: Request) -> None:
        """Take a request in. Whatever is wrong with it is told by its outputs: one for each of its
        n sequences."""
        try:
            refusal = self._find_fault(request)
        except Exception as error:  # a value of a type that nobody expected
            refusal = ErrorCode.BAD_REQUEST, f"malformed request: {type(error).__name__}: {error}"
        if refusal is not None:
            n = getattr(request.sampling, "n", None)
            indices = request.indices if isinstance(n, int) and 1 <= n <= 128 else (0,)
            self._answers.add([make_failure(request, i, *refusal) for i in indices])
            return
        self._modest.pop(request.request_id, None)  # an earlier one's, which was aborted
        if request.adapter is None:
            self._admit(request, request.indices, time.monotonic())
            return
        if request.adapter_digest:
            ref = dataclasses.replace(request.adapter, revision=request.adapter_digest)
            request = dataclasses.replace(request, adapter=ref)
        if not request.may_evict:
            self._modest[request.request_id] = request
        self._arrivals.add(request)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request (or one of its sequences) now, silently but for a last output. Unknown ids
        are ignored."""
        if request_id in self._arrivals:
            self._answers.add(self._arrivals.abort(request_id, index))
            return
        for life in self._answers.of(request_id):
            if index is not None and life.index != index:
                continue
            adapter = life.request.adapter
            if adapter is not None and not life.has_entered:
                self.store.forget(adapter)
            if self.scheduler.abort(life.seq_id):
                self._answers.finish(life, FinishReason.ABORT)

    def load_adapters(self, refs: Iterable[AdapterRef], timeout_s: float = 600.0) -> None:
        """Bring adapters into their slots before the first request. Blocks. Errors: the
        AdapterError of one that cannot be."""
        refs, end = list(refs), time.monotonic() + timeout_s
        for ref in refs:
            self.store.prefetch(ref)
        for ref in refs:
            while (lease := self.store.acquire(ref)) is None:
                error = self.store.error_of(ref)
                if error is not None:
                    raise error
                if time.monotonic() > end:
                    raise AdapterUnavailable(f"{ref} was not loaded in {timeout_s} s")
                time.sleep(0.002)
                self.store.poll()
            self.store.release(lease)

    # Steps

    @property
    def has_work(self) -> bool:
        """Whether step() has anything to do or to tell."""
        return bool(self._answers or self._arrivals or self._pending)

    @property
    def is_stepping(self) -> bool:
        """Whether a step is under way on the device; if not, and step() told nothing, all work
        waits for adapters."""
        return self._pending is not None

    def step(self) -> list[RequestOutput]:
        """Advance: launch the next step, take in the tokens of the last one, and tell what is
        new."""
        self.scheduler.wake(self.store.poll())
        self._admit_arrived()
        self._refuse_modest()
        batch = self.scheduler.schedule()
        launched = None
        if batch is not None:
            launched = self.runner.launch(batch, self._sinks_of(batch) if self._sinks else None)
            self._num_steps += 1
        if self._look_ahead:
            due, self._pending = self._pending, launched
        else:
            due = launched
        if due is not None:
            tokens, logprobs = due.wait()
            self._num_sampled += len(tokens)
            for row, found in due.read_prompts() if due.batch.prompt_scores else ():
                self._answers.add_scores(due.batch.seq_ids[row], found)
            for update in self.scheduler.commit(due.batch, tokens):
                self._answers.tell(update, logprobs)
        for update in self.scheduler.take_failures():
            self._answers.tell(update, None)
        self._last_step = time.monotonic()
        return self._answers.take()

    def generate(self, requests: Iterable[Request]) -> list[Completion]:
        """Run requests to their end. Gives one Completion for each sequence, in the order of
        requests and of index."""
        requests = list(requests)
        found: dict[tuple[str, int], Completion] = {}
        for request in requests:
            self.submit(request)
        for output in self._run():
            key = output.request_id, output.index
            found.setdefault(key, Completion(*key)).add(output)
        order = [r.request_id for r in requests]
        return sorted(found.values(), key=lambda c: (order.index(c.request_id), c.index))

    def score(
        self,
        items: Sequence[tuple[tuple[int, ...], AdapterRef | None, ScoreSink]],
        done: Callable[[int, str], None],
    ) -> None:
        """Logits of given ids, through the same scheduler, pages and kernels as generation. Blocks
        until all are done.

        items  (token ids, adapter, sink); sink(first, logits [n, V]) gets positions first, first +
               1, ..., chunk by chunk
        done   called once an item with its number and why it was refused ("" = it was not)
        Needs: prefix_cache off (a cached prefix has no logits).
        """
        assert not self.pool.prefix_cache, "scores need every position computed"
        for number, (token_ids, adapter, sink) in enumerate(items):
            name = f"score-{number}"
            sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
            self._score_sinks[name] = sink
            self.submit(Request(name, token_ids, sampling, adapter))
        for output in self._run():
            if output.finish_reason is not None:
                self._score_sinks.pop(output.request_id)
                done(int(output.request_id.removeprefix("score-")), output.error)
        self._sinks.clear()

    def _run(self) -> Iterator[RequestOutput]:
        """All outputs until nothing is left to do. Blocks."""
        while self.has_work:
            outputs = self.step()
            yield from outputs
            if not outputs and not self.is_stepping:
                time.sleep(0.001)

    # What is known

    @property
    def masks(self) -> dict[str, TokenMask]:
        """Token masks by name."""
        return self.runner.masks

    def stats(self, count_experts: bool = False) -> EngineStats:
        """A snapshot. count_experts also reads (and resets) the experts counter, which waits for
        the device."""
        scheduler, pool, store = self.scheduler, self.pool, self.store.stats()
        return EngineStats(
            num_steps=self._num_steps,
            sampled_tokens=self._num_sampled,
            delivered_tokens=self._answers.num_delivered,
            discarded_tokens=scheduler.num_discarded,
            replayed_tokens=scheduler.num_replayed,
            prompt_tokens=scheduler.num_prompt_tokens,
            cached_tokens=scheduler.num_cached_tokens,
            preemptions=scheduler.num_preemptions,
            finished=dict(self._answers.finished),
            loads=store.loads,
            load_seconds=store.load_seconds,
            load_failures=store.failures,
            evictions=store.evictions,
            load_bytes=store.load_bytes,
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            waiting_for_adapter=scheduler.num_waiting_adapter + len(self._arrivals),
            free_pages=pool.free_pages,
            num_pages=pool.num_pages,
            arena_used_bytes=store.arena_used_bytes,
            arena_bytes=store.arena_bytes,
            slots_in_use=store.slots_in_use,
            num_slots=store.num_slots,
            resident=store.resident,
            by_tenant=dict(self._answers.by_tenant),
            distinct_experts=self.runner.distinct_experts() if count_experts else 0.0,
            compiles=len(compiled_kernels()) - self._compiles_before,
            step_age_s=time.monotonic() - self._last_step if self.has_work else 0.0,
        )

    def describe(self) -> dict[str, str | int]:
        """What was built, for a log line."""
        return {
            "architecture": self.model_config.architecture,
            "device": str(self.device),
            "dtype": str(self.dtype).removeprefix("torch."),
            "max_model_len": self.max_len,
            "kv_pages": self.pool.num_pages,
            "arena_bytes": self.store.stats().arena_bytes,
        }

    def late_compiles(self) -> list[str]:
        """Kernels that were compiled after the warm-up, while a request waited. Should be empty."""
        return compiled_kernels()[self._compiles_before :]

    def check(self) -> None:
        """Bookkeeping of pages and slots. Errors: AssertionError with the numbers."""
        self.pool.check()
        self.store.check()

    def close(self) -> None:
        """End the store's threads and give back its files."""
        self.store.close()
        self._host_cache.close()

    # Inside

    def _find_fault(self, request: Request) -> tuple[ErrorCode, str] | None:
        s = request.sampling
        if request.request_id in self._answers or request.request_id in self._arrivals:
            return ErrorCode.BAD_REQUEST, f"request_id {request.request_id!r} is already running"
        fault = find_fault(request, self.model_config.vocab_size, self.max_len)
        if fault is not None:
            return fault
        if s.mask and s.mask not in self.masks:
            return ErrorCode.BAD_REQUEST, f"unknown mask {s.mask!r:.60}"
        num_tokens = len(request.token_ids) + max(1, s.max_tokens)
        if not self.scheduler.fits(min(num_tokens, self.max_len)):
            return ErrorCode.PROMPT_TOO_LONG, f"{num_tokens} tokens do not fit into the KV memory"
        if request.adapter is not None and not self.config.max_loras:
            return ErrorCode.ADAPTER_NOT_FOUND, "this engine serves no adapters (max_loras is 0)"
        if request.adapter is not None and not request.may_evict:
            return self._find_no_room(request.adapter)
        return None

    def _find_no_room(self, ref: AdapterRef) -> tuple[ErrorCode, str] | None:
        if self.store.has_room(ref):
            return None
        return ErrorCode.NO_ROOM, f"{ref.adapter_id} has no slot here, and none is free"

    def _admit_arrived(self) -> None:
        """Requests whose adapter's content is known go to the scheduler; lost ones are told why."""
        if not self._arrivals:
            return
        arrived, outputs = self._arrivals.poll()
        self._answers.add(outputs)
        for arrival in arrived:
            self._admit(arrival.request, arrival.indices, arrival.submitted_s)

    def _refuse_modest(self) -> None:
        """Requests that nobody is evicted for, where their adapter finds no room by itself."""
        for request_id, request in list(self._modest.items()):
            lives = [life for life in self._answers.of(request_id) if not life.has_entered]
            ref = lives[0].request.adapter if lives else request.adapter
            assert ref is not None
            if not lives and request_id not in self._arrivals:
                del self._modest[request_id]
            elif (why := self._find_no_room(ref)) is not None:
                del self._modest[request_id]
                if request_id in self._arrivals:
                    self._answers.add(self._arrivals.refuse(request_id, why))
                for life in lives:
                    self.store.forget(ref)
                    self.scheduler.abort(life.seq_id)
                    self._answers.finish(life, FinishReason.ERROR, error=why)

    def _admit(self, request: Request, indices: Iterable[int], submitted_s: float) -> None:
        seed = request.sampling.seed if request.sampling.seed is not None else next(self._seeds)
        for index in indices:
            life = Life(next(self._ids), request, index, seed)
            life.submitted_s = submitted_s
            if request.request_id in self._score_sinks:
                self._sinks[life.seq_id] = self._score_sinks[request.request_id]
            self._answers.open(life)
            self.scheduler.add(life)

    def _sinks_of(self, batch: ScheduledBatch) -> dict[int, ScoreSink]:
        """Batch row -> where its logits go, for the rows that are scored."""
        ids = enumerate(batch.seq_ids)
        return {row: self._sinks[seq_id] for row, seq_id in ids if seq_id in self._sinks}

    def _warm_up_prefill(self) -> None:
        """On a GPU, run what warm_up.py names, and forget that it ran."""
        if self.device.type != "cuda" or references_only():
            return
        cached, self.pool.prefix_cache = self.pool.prefix_cache, False
        # As if the base model's rows changed seldom targets: their kernels are to be compiled too.
        self.arena.watched_slots.add(-1)
        config = self.config
        for prompts in warm_up_prompts(config.max_step_tokens, config.max_num_seqs, self.max_len):
            self.generate(prompts)
        self.arena.watched_slots.discard(-1)
        self.pool.prefix_cache = cached
        self._num_steps = self._num_sampled = 0
        self._answers.forget_counts()
        self.scheduler.forget_counts()
