"""The process in which tenants' chat templates run. Started as a script by template_sandbox.py.

It never runs a template itself: it forks a child for each, and the kernel ends a child that takes
too long. Its cache holds what children compiled, as bytes that only children unpack. It has no
loader (nothing to include), no secrets in its environment, and knows one thing about the project:
the frames on the socket that is its standard input.

Frames:  4 bytes of length (big endian), then so many bytes.
In:      the template's name (same name, same text); the template; what it knows, as a JSON object
Out:     b"T" and the text, or b"E" and why there is none
"""

import gc
import json
import marshal
import os
import resource
import select
import signal
import socket
import struct
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime
from types import CodeType
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

RENDER_S = 0.05
"""Of its own processor time, so that a busy machine fails nobody; a loop has no other."""

COMPILE_S = 0.5
"""To compile a template that is not known yet, and again to read what it is given."""

WALL_FACTOR = 10
"""So many times as long on the clock, however little it ran."""

MAX_OUTPUT_BYTES = 1 << 20
MAX_MEMORY_BYTES = 256 << 20
_MAX_CODE_BYTES = 8 << 20
_MAX_CODES = 256
_MAX_REASON_CHARS = 300
_WARM_UP = """{%- for a in x if a.y -%}{{ "\\n" ~ a["y"] | trim | tojson }}{%- endfor -%}
{{ raise_exception("") }}"""
_LENGTH = struct.Struct(">I")
_TOO_SLOW = f"it takes more than {RENDER_S * 1000:.0f} ms"
_TOO_SLOW_TO_COMPILE = f"it takes more than {COMPILE_S * 1000:.0f} ms to compile"
_TOO_LONG = f"it writes more than {MAX_OUTPUT_BYTES} bytes"
_TOO_MUCH_CODE = f"it compiles to more than {_MAX_CODE_BYTES} bytes"
_HALF = "it writes half a character"
_TOO_LARGE = f"it needs more than {MAX_MEMORY_BYTES >> 20} MB of memory"


class _Generation(Extension):
    """`{% generation %}` marks an answer for training; it writes what is between."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> Node | list[Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_between"), [], [], body).set_lineno(line)

    def _between(self, caller: Callable[[], str]) -> str:
        return caller()


def make_environment() -> ImmutableSandboxedEnvironment:
    """What chat templates may use: what transformers gives them."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    made.filters["tojson"] = _tojson
    made.globals["raise_exception"] = _raise_exception
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return made


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def send(line: socket.socket, frame: bytes) -> None:
    """One frame. Errors: OSError."""
    line.sendall(_LENGTH.pack(len(frame)) + frame)


def receive(line: socket.socket) -> bytes:
    """One frame. Errors: EOFError where the other side has gone; OSError."""
    (length,) = _LENGTH.unpack(_exactly(line, _LENGTH.size))
    return _exactly(line, length)


def _exactly(line: socket.socket, count: int) -> bytes:
    parts = []
    while count:
        part = line.recv(min(count, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


class Zygote:
    """Forks children, ends them, keeps what they compiled, or why that cannot be."""

    def __init__(self) -> None:
        self._environment = make_environment()
        with suppress(jinja2.TemplateError):  # loads what each child would load anew
            self._environment.from_string(_WARM_UP).render(x=[{"y": "z"}])
        self._codes: OrderedDict[bytes, bytes | str] = OrderedDict()

    def answer(self, name: bytes, template: bytes, known: bytes) -> bytes:
        """The frame for one job."""
        code = self._codes.get(name, b"")
        if isinstance(code, str):
            return b"E" + code.encode()
        if code:
            self._codes.move_to_end(name)
        ours, theirs = os.pipe()
        child = os.fork()
        if child == 0:
            _run_child(self._environment, theirs, template, known, code)
        os.close(theirs)
        try:
            told = _read_all(ours)
        finally:
            os.close(ours)
            os.kill(child, signal.SIGKILL)  # in case it is not over: nothing it still does counts
            _, status = os.waitpid(child, 0)
        parts = _unpack(told)
        ended = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        slow = ended in (signal.SIGPROF, signal.SIGALRM, signal.SIGKILL)
        if b"T" in parts:
            said = b"T" + parts[b"T"]
        else:
            words = _TOO_SLOW if code or b"C" in parts else _TOO_SLOW_TO_COMPILE
            words = words if slow else f"it ends its process ({status})"
            said = b"E" + parts.get(b"E", words.encode())
        if b"C" in parts:
            self._keep(name, parts[b"C"])
        elif not code and ended != signal.SIGALRM:  # that may have been the machine
            self._keep(name, said[1:].decode())
        return said

    def _keep(self, name: bytes, code: bytes | str) -> None:
        self._codes[name] = code
        if len(self._codes) > _MAX_CODES:
            self._codes.popitem(last=False)


def _pack(kind: bytes, data: bytes) -> bytes:
    return kind + _LENGTH.pack(len(data)) + data


def _unpack(told: bytes) -> dict[bytes, bytes]:
    """What a child said, whole parts alone: C = compiled code, T = text, E = why there is none."""
    parts = {}
    while len(told) >= 5:
        (length,) = _LENGTH.unpack(told[1:5])
        if len(told) < 5 + length:
            break
        parts[told[:1]] = told[5 : 5 + length]
        told = told[5 + length :]
    return parts


def _read_all(pipe: int) -> bytes:
    """What a child writes until it ends, or has said or taken more than any may."""
    parts, size = [], 0
    deadline = time.monotonic() + (COMPILE_S + RENDER_S) * WALL_FACTOR + 1
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    while size <= MAX_OUTPUT_BYTES + _MAX_CODE_BYTES + (1 << 16):
        if not poll.poll(max(0, deadline - time.monotonic()) * 1000):
            break
        part = os.read(pipe, 1 << 20)
        if not part:
            break
        parts.append(part)
        size += len(part)
    return b"".join(parts)


def _run_child(
    environment: ImmutableSandboxedEnvironment,
    pipe: int,
    template: bytes,
    known: bytes,
    code: bytes,
) -> NoReturn:
    """One rendering, then the end of this process, whatever happens."""
    try:
        said = _pack(b"E", _TOO_LARGE.encode())
        try:
            os.closerange(0, pipe)
            os.closerange(pipe + 1, 256)
            _limit_resources()
            _limit_time(COMPILE_S)
            if not code:
                compiled = environment.compile(template.decode())
                made = marshal.dumps(compiled)
                if len(made) > _MAX_CODE_BYTES:
                    raise jinja2.TemplateError(_TOO_MUCH_CODE)
                _write(pipe, _pack(b"C", made))
            else:
                compiled = marshal.loads(code)
            _limit_time(COMPILE_S)
            values = json.loads(known)
            _limit_time(RENDER_S)
            said = _pack(b"T", _render(environment, compiled, values))
        except MemoryError:
            pass
        except BaseException as error:
            said = _pack(b"E", _words(error).encode())
        _limit_time(COMPILE_S)
        _write(pipe, said)
    finally:
        os._exit(0)


def _render(
    environment: ImmutableSandboxedEnvironment, compiled: CodeType, values: dict[str, Any]
) -> bytes:
    made = environment.template_class.from_code(
        environment, compiled, environment.make_globals(None)
    )
    return b"".join(_bounded(made.generate(**values)))


def _bounded(pieces: Iterator[str]) -> Iterator[bytes]:
    size = 0
    for piece in pieces:
        try:
            raw = piece.encode()
        except UnicodeEncodeError:
            raise jinja2.TemplateError(_HALF) from None
        size += len(raw)
        if size > MAX_OUTPUT_BYTES:
            raise jinja2.TemplateError(_TOO_LONG)
        yield raw


def _limit_resources() -> None:
    """Memory, and nothing to write or start."""
    for kind, most in (
        (resource.RLIMIT_AS, MAX_MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (most, most))


def _limit_time(seconds: float) -> None:
    """The kernel ends this process then: no handler is set for these signals."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, seconds * WALL_FACTOR)


def _words(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "it calls itself too deep"
    if isinstance(error, TypeError) and "no loader" in str(error):
        return "it includes, imports or extends another template: there is none"
    line = getattr(error, "lineno", None)
    words = f"{type(error).__name__}: {str(error)[:_MAX_REASON_CHARS]}"
    words += f" (line {line})" if line else ""
    # One line, for answers and logs, whatever a template has raised.
    shown = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in words)
    return "".join(shown)[:_MAX_REASON_CHARS]


def _write(pipe: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(pipe, view) :]


def main() -> None:
    """Answer until the other side has gone."""
    # Whoever started this may have blocked or ignored the signals that end children.
    clocks = {signal.SIGPROF, signal.SIGALRM}
    for clock in clocks:
        signal.signal(clock, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, clocks)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's: the other side will go, or not
    with socket.socket(fileno=0) as line:
        zygote = Zygote()
        gc.freeze()  # children touch, and so copy, less
        send(line, b"ready")
        while True:
            try:
                name, template, known = (receive(line) for _ in range(3))
            except (EOFError, OSError):
                return
            send(line, zygote.answer(name, template, known))


if __name__ == "__main__":
    main()
