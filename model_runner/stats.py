"""`EngineStats`: a snapshot of plain numbers. Nobody here knows Prometheus."""

from dataclasses import dataclass, field

from adapter_store.ref import AdapterRef


@dataclass(frozen=True)
class EngineStats:
    """Counters grow for ever (since start); gauges are of now.

    counters: num_steps, sampled_tokens (drawn on the device), delivered_tokens (given to clients),
    discarded_tokens (drawn and thrown away: past a stop id, after an abort, not finite),
              replayed_tokens (computed again: after a preemption, or for a resumed answer),
              prompt_tokens, cached_tokens, preemptions, finished (by reason), evictions,
              load_failures;
              loads, load_seconds, load_bytes  by tier: "remote" (S3 or a folder -> host), "host"
              (found there), "device" (host -> slot)
    Once an engine is idle, delivered + discarded = sampled. No token is drawn twice: a preempted
    sequence keeps what it has, and computing that again (replayed) draws nothing.
    gauges:   running, waiting, waiting_for_adapter, free_pages, num_pages, arena_used_bytes,
    arena_bytes, slots_in_use, num_slots;  of the host tier, where whoever passes it on has
              looked (`host_cache.census`): host_adapters, host_used_bytes, host_bytes
    resident  adapters in slots;  by_tenant  tenant -> delivered tokens
    distinct_experts  mean per layer and decode step since the last snapshot that asked for it (0
                      for dense models)
    compiles  kernels compiled since the engine said ready;  step_age_s  seconds since the last step
              ended while work waited (a stuck engine)
    """

    num_steps: int = 0
    sampled_tokens: int = 0
    delivered_tokens: int = 0
    discarded_tokens: int = 0
    replayed_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    loads: dict[str, int] = field(default_factory=dict)
    load_seconds: dict[str, float] = field(default_factory=dict)
    load_failures: int = 0
    evictions: int = 0
    load_bytes: dict[str, int] = field(default_factory=dict)
    running: int = 0
    waiting: int = 0
    waiting_for_adapter: int = 0
    free_pages: int = 0
    num_pages: int = 0
    arena_used_bytes: int = 0
    arena_bytes: int = 0
    slots_in_use: int = 0
    num_slots: int = 0
    host_adapters: int = 0
    host_used_bytes: int = 0
    host_bytes: int = 0
    resident: tuple[AdapterRef, ...] = ()
    by_tenant: dict[str, int] = field(default_factory=dict)
    distinct_experts: float = 0.0
    compiles: int = 0
    step_age_s: float = 0.0
