"""Bodies that no honest client sends, with the answers they must get."""

from collections.abc import Callable
from dataclasses import dataclass

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
_MEGABYTES = 7_900_000  # just below what the demo's configuration takes
_HI = b'{"model":"demo","messages":[{"role":"user","content":"Hi"}],'
_PROMPT = b'{"model":"demo","prompt":'


@dataclass(frozen=True)
class Hostile:
    """A body by its maker, and what is said of it."""

    name: str
    path: str
    body: Callable[[], bytes]
    status: int
    param: str | None = None
    words: str = ""


def _field(name: str, value: bytes, status: int, words: str = "") -> Hostile:
    label = f"{name}={value[:20].decode()}"
    return Hostile(
        label, CHAT, lambda: _HI + b'"%s":%s}' % (name.encode(), value), status, name, words
    )


def _many(item: bytes) -> bytes:
    return (item + b",") * (_MEGABYTES // (len(item) + 1)) + item


def _chat(
    name: str, make: Callable[[], bytes], status: int, param: str | None = None, words: str = ""
) -> Hostile:
    return Hostile(name, CHAT, make, status, param, words)


def _prompt(
    name: str, make: Callable[[], bytes], status: int, param: str | None = None, words: str = ""
) -> Hostile:
    return Hostile(name, COMPLETIONS, lambda: _PROMPT + make() + b"}", status, param, words)


_TOO_MANY = "too many values"
_IDS = "stop_token_ids"
_FIELDS = (
    ("max_tokens", b"0", 400), ("max_tokens", b"-1", 400), ("max_tokens", b"1e3", 422),
    ("max_tokens", b'"8"', 422), ("max_tokens", b"9" * 400, 400), ("max_tokens", b"true", 422),
    ("n", b"0", 400), ("n", b"-7", 400), ("n", b"129", 400), ("n", b"9" * 30, 400),
    ("temperature", b"-0.1", 400), ("temperature", b"1e300", 400), ("temperature", b"1e999", 422),
    ("top_p", b"1.5", 400), ("top_k", b"-2", 400), ("seed", b"1e2", 422),
    ("min_tokens", b"-1", 400), ("stop_token_ids", b"[" + b"9" * 30 + b"]", 400),
    ("stream", b'"yes"', 422), ("stop", b"7", 422), ("stop", b"[7]", 422),
    ("stop_token_ids", b"[-1]", 400), ("stop_token_ids", b'["a"]', 422),
    ("messages", b"[]", 422), ("messages", b'"Hi"', 422), ("messages", b"[[]]", 422),
    ("messages", b'[{"role":"user"}]', 400), ("messages", b'[{"content":"Hi"}]', 400),
    ("messages", b'[{"role":7,"content":"Hi"}]', 400), ("model", b'""', 422), ("model", b"7", 422),
    ("model", b"null", 422), ("model", b'"absent"', 404), ("model", b'"formal"', 404),
    ("cache_salt", b'"x"', 400), ("stream_options", b"[]", 422),
)  # fmt: skip


def _messages(inside: bytes, end: bytes = b"]}") -> bytes:
    return b'{"model":"demo","messages":[' + inside + end


def _with(name: str, value: bytes) -> Callable[[], bytes]:
    return lambda: _HI + b'"%s":%s}' % (name.encode(), value)


def _biases() -> bytes:
    return b"{" + b",".join(b'"%d":"a"' % number for number in range(20_000)) + b"}"


def _role() -> bytes:
    return _messages(b'{"role":"' + b"r" * _MEGABYTES + b'","content":"Hi"}')


def _text() -> bytes:
    return _messages(b'{"role":"user","content":"' + b"a b " * (_MEGABYTES // 4) + b'"}')


def _string(char: bytes) -> bytes:
    return b'"' + char * _MEGABYTES + b'"'


BODIES: tuple[Hostile, ...] = (
    *(_field(name, value, status) for name, value, status in _FIELDS),
    _chat("empty", lambda: b"", 400, None, "not valid JSON"),
    _chat("cut", lambda: _HI[:-1], 400, None, "not valid JSON"),
    _chat("two", lambda: b"{}{}", 400, None, "not valid JSON"),
    _chat("no utf-8", lambda: b'{"model":"\xff"}', 400, None, "not valid JSON"),
    _chat("lone surrogate", lambda: b'{"model":"\\ud800"}', 400, None, "not valid JSON"),
    _chat("a list", lambda: b"[]", 422),
    _chat("deep", lambda: b"[" * 60_000, 400, None, "recursion"),
    _chat("deep in a field", lambda: _HI + b'"a":' + b'{"a":' * 10_000, 400, None, "recursion"),
    _chat("deeper", lambda: b"[" * _MEGABYTES, 400, None, _TOO_MANY),
    _chat("above the limit", lambda: b" " * (8 << 20) + b" ", 413, None, "larger than"),
    _chat("10 MB name", lambda: b'{"model":"' + b"m" * 10_000_000 + b'"}', 413, None, "larger"),
    _chat("7.9 MB model", lambda: _with("model", _string(b"m"))(), 422, "model"),
    _chat("7.9 MB field", lambda: _with("f" * _MEGABYTES, b"1")(), 400, "f" * 80),
    _chat("7.9 MB role", _role, 400, None, "tokens"),
    _chat("7.9 MB number", lambda: _with("seed", b"9" * _MEGABYTES)(), 400, None, "range"),
    _chat("7.9 MB stop", lambda: _with("stop", _string(b"s"))(), 400, "stop", "characters"),
    _chat("1e5 stops", _with("stop", b'["a"' + b',"a"' * 100_000 + b"]"), 400, None, _TOO_MANY),
    _chat("1e4 stops", _with("stop", b'["a"' + b',"a"' * 10_000 + b"]"), 400, "stop", "at most"),
    _chat("1e4 stop ids", _with("stop_token_ids", b"[1" + b",1" * 10_000 + b"]"), 400, _IDS),
    _chat("wrong biases", _with("logit_bias", _biases()), 422, "logit_bias"),
    _chat("many fields", lambda: _HI + _many(b'"f":1') + b"}", 400, None, _TOO_MANY),
    _chat("many messages", lambda: _messages(_many(b"{}")), 400, None, _TOO_MANY),
    _chat("wrong messages", lambda: _messages(b"1," * 250_000 + b"1"), 422, "messages"),
    _chat("long text", _text, 400, None, "tokens"),
    _prompt("no prompt", lambda: b"null", 422, "prompt"),
    _prompt("empty prompt", lambda: b'""', 400, "prompt", "no tokens"),
    _prompt("foreign id", lambda: b"[-1]", 422, "prompt"),
    _prompt("echo of a large id", lambda: b'[1,4294967296],"echo":true', 400, "prompt", "at most"),
    _prompt("huge ids", lambda: b"[[1],[" + b"9" * 400 + b"]]", 400, "prompt", "at most"),
    _prompt("many ids", lambda: b"[" + _many(b"1") + b"]", 400, None, _TOO_MANY),
    _prompt("wrong items", lambda: b"[" + b"1.5," * 250_000 + b"1]", 422, "prompt"),
    _prompt("many lists", lambda: b"[" + _many(b"[]") + b"]", 400, None, _TOO_MANY),
    _prompt("too long", lambda: b"[" + b"1," * 200_000 + b"1]", 400, None, "tokens"),
    _prompt("65 prompts", lambda: b"[" + b'"Hi",' * 64 + b'"Hi"]', 400, "prompt", "at most 64"),
    _prompt("many choices", lambda: b"[" + b'"Hi",' * 9 + b'"Hi"],"n":128', 400, "n", "at most"),
)
