"""`serve-stdio`: one engine behind two pipes. One JSON object a line.

In:   {"id", "adapter" (a name of --adapters, or null), "input_ids", "max_tokens", "temperature",
      "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
      "logit_bias" (an object: token id -> bias), "seed", "ignore_eos", "stop_ids", "min_tokens",
      "logprobs", "prompt_logprobs"}, {"cmd": "abort", "id"}, {"cmd": "stats"}, {"cmd": "quit"}
Out:  {"ready": true, ...}, {"id", "token_ids" (new ones), "finish_reason" (null until the last),
      "error"; where asked for, "logprobs" and "prompt_logprobs": for each token [its own, its rank,
      [[id, logprob], ...]]}, {"stats": {...}}
Whoever measures owns clocks, prompts and concurrency.
"""

import argparse
import dataclasses
import json
import os
import queue
import re
import sys
import threading
import time
from contextlib import suppress
from typing import IO, Any

from adapter_store.ref import AdapterRef
from kernels.op import use_reference_kernels
from model_runner.command_line import (
    add_engine_options,
    is_name,
    read_adapters,
    read_config,
    read_ids,
    read_name,
)
from model_runner.engine import Engine
from model_runner.request import Request, RequestOutput, SamplingParams

SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "max_tokens",
    "min_tokens",
    "ignore_eos",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logprobs",
    "prompt_logprobs",
)
IDLE_WAIT_S = 0.2
LOAD_POLL_S = 0.001
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,8}", re.ASCII)


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """The command's options."""
    parser = commands.add_parser(
        "serve-stdio", help="requests as JSON lines on stdin, tokens on stdout"
    )
    add_engine_options(parser, model_required=True)
    return parser


def run(args: argparse.Namespace) -> int:
    """Serve until {"cmd": "quit"}, at once, or the end of stdin, after what was asked before it."""
    use_reference_kernels(args.kernels == "reference")
    # Threads that read requests or load adapters must not wait 5 ms, Python's default, for a turn.
    sys.setswitchinterval(5e-5)
    out = _take_stdout()
    started = time.perf_counter()
    refs = read_adapters(args.adapters)
    engine = Engine(read_config(args, args.model, max_loras=max(1, len(refs))))
    try:
        engine.load_adapters(refs.values())
        _write(
            out,
            [
                {
                    "ready": True,
                    "startup_s": round(time.perf_counter() - started, 3),
                    **engine.describe(),
                }
            ],
        )
        lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=_read_lines, args=(lines,), daemon=True).start()
        _serve(engine, refs, lines, out)
    finally:
        engine.close()
    return 0


def _serve(
    engine: Engine,
    refs: dict[str, AdapterRef],
    lines: "queue.SimpleQueue[str | None]",
    out: IO[str],
) -> None:
    has_ended = False
    while engine.has_work or not has_ended:
        line: str | None = ""
        with suppress(queue.Empty):
            if not has_ended:
                line = lines.get_nowait() if engine.has_work else lines.get(timeout=IDLE_WAIT_S)
        if line is None:
            has_ended = True
        elif line.strip():
            answer = _handle(engine, refs, line)
            if answer is None:
                return
            _write(out, answer)
            continue  # take all lines that are there before the next step
        if engine.has_work:
            outputs = engine.step()
            _write(out, [_as_json(o) for o in outputs])
            if not outputs and not engine.is_stepping:
                time.sleep(LOAD_POLL_S)


def _handle(engine: Engine, refs: dict[str, AdapterRef], line: str) -> list[dict[str, Any]] | None:
    """Act on one line; what to answer at once, or None to quit."""
    message: Any = None
    try:
        message = json.loads(line)
        if not isinstance(message, dict):
            raise ValueError("a line must hold a JSON object")
        command = message.get("cmd")
        if command == "quit":
            return None
        if command == "stats":
            stats = dataclasses.asdict(engine.stats(count_experts=True))
            stats["late_compiles"] = engine.late_compiles()
            stats["resident"] = [str(ref["adapter_id"]) for ref in stats["resident"]]
            return [{"stats": stats}]
        if command == "abort":
            engine.abort(read_name(message))
            return []
        if command is not None:
            raise ValueError(f"unknown cmd {command!r}")
        engine.submit(_read_request(message, refs))
        return []
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        name = message.get("id") if isinstance(message, dict) else None
        return [
            {
                "id": name if is_name(name) else None,
                "token_ids": [],
                "finish_reason": "error",
                "error": f"{type(error).__name__}: {error}",
            }
        ]


def _read_request(message: dict[str, Any], refs: dict[str, AdapterRef]) -> Request:
    request_id, adapter = read_name(message), message.get("adapter")
    if adapter is not None and not isinstance(adapter, str):
        raise ValueError(f"adapter must be a name or null, not {adapter!r:.60}")
    if adapter is not None and adapter not in refs:
        raise ValueError(f"unknown adapter {adapter!r}")
    known = {"id", "adapter", "input_ids", "stop_ids", "logit_bias", *SAMPLING_FIELDS}
    if unknown := sorted(set(message) - known):
        raise ValueError(f"unknown fields {unknown}")
    fields = {name: message[name] for name in SAMPLING_FIELDS if message.get(name) is not None}
    bias = {} if message.get("logit_bias") is None else message["logit_bias"]
    if not isinstance(bias, dict) or not all(_TOKEN_ID.fullmatch(key) for key in bias):
        raise ValueError(f"logit_bias must be an object of token ids, not {bias!r:.60}")
    stop_ids = () if message.get("stop_ids") is None else read_ids(message, "stop_ids")
    sampling = SamplingParams(
        **fields,
        stop_ids=stop_ids,
        logit_bias=tuple((int(key), by) for key, by in bias.items()),
    )
    return Request(
        request_id=request_id,
        token_ids=read_ids(message, "input_ids"),
        sampling=sampling,
        adapter=refs[adapter] if adapter is not None else None,
    )


def _as_json(output: RequestOutput) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "id": output.request_id,
        "token_ids": list(output.new_token_ids),
        "finish_reason": output.finish_reason,
        "error": output.error or None,
    }
    for name in ("logprobs", "prompt_logprobs"):
        if entries := getattr(output, name):
            fields[name] = [(entry.chosen, entry.rank, entry.top) for entry in entries]
    return fields


def _write(out: IO[str], objects: list[dict[str, Any]]) -> None:
    if objects:
        out.write("".join(json.dumps(o) + "\n" for o in objects))
        out.flush()


def _read_lines(lines: "queue.SimpleQueue[str | None]") -> None:
    # A file of its own: Python closes sys.stdin at its end, which a blocked reader would hold up.
    # Bytes that are no text make a bad line, not a dead reader.
    stdin = open(0, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    try:
        for line in stdin:
            lines.put(line)
    finally:
        lines.put(None)


def _take_stdout() -> IO[str]:
    """The real stdout, for the protocol alone: whatever else prints goes to stderr."""
    mine = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return mine
