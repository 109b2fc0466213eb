"""What operators may ask of a running service: would it serve this adapter? Nothing is loaded.

Their keys are no tenant's, and a tenant's key opens nothing here. Neither routes (ingress.py) nor
Ray: whoever judges is behind a `Judge`, on a machine that has torch.
"""

import asyncio
import hmac
import json
import logging
from collections.abc import Mapping
from typing import Any, Protocol
from urllib.parse import unquote

from deployments.api_errors import ApiError, model_not_found, overloaded, unauthorized
from deployments.config import ServiceConfig
from deployments.tenant_settings import DIGEST, innermost, inside, join_uri
from deployments.tenants import bearer_key, key_digest

MAX_URI_CHARS = 2048
_FIELDS = ("model", "uri")
_log = logging.getLogger("ray.serve")


class Judge(Protocol):
    """Who can judge adapters for one base model."""

    async def validate(self, uri: str, root: str) -> dict[str, Any] | None:
        """The report of `python -m adapter_store validate --json`; None: it judges another one
        just now. Errors: any, if nobody can be reached."""
        ...


class Operators:
    """The operators' side of one ingress. One event loop owns it: no locks.

    judges  by the base models' names
    """

    def __init__(self, config: ServiceConfig, judges: Mapping[str, Judge]) -> None:
        self._digests = tuple(key.removeprefix(DIGEST) for key in config.operator_keys)
        self._judges = judges
        self._root = config.adapters.root
        allowed = (uri for tenant in config.tenants for uri in tenant.allowed_uris)
        self._places = tuple(place for place in (self._root, *allowed) if place)
        self._patience_s = config.ingress.max_waiting_s
        self._is_judging = False

    @property
    def exist(self) -> bool:
        """Whether there is any key: without one the service has no such address."""
        return bool(self._digests)

    def check(self, headers: Mapping[str, str]) -> None:
        """Errors: ApiError 401 unless the request bears an operator's key."""
        key = bearer_key(headers.get("authorization", ""))
        if key is None:
            raise unauthorized()
        digest = key_digest(key)
        # All of them, for they are few: the time tells not even which one it is.
        if not sum(hmac.compare_digest(known, digest) for known in self._digests):
            raise unauthorized()

    async def validate(self, body: bytes) -> dict[str, Any]:
        """What would come of the adapter that the body names, with the base that it names.

        Errors: ApiError 400 or 422 for a body that is no such question or a uri that lies nowhere
                where this service has adapters, whether anything is there or not; 404 for an
                unknown base; 429 while another one is judged; 503 if nobody can judge.
        """
        model, uri = _question(body)
        judge = self._judges.get(model)
        if judge is None:
            raise model_not_found(model)
        uri = join_uri(self._root, uri)
        root = innermost([place for place in self._places if _lies_in(uri, place)])
        if not root:
            words = "is not below adapters.root, nor below any tenant's allowed_uris"
            raise ApiError(400, f"uri: {uri:.200} {words}", param="uri", code="uri_not_allowed")
        if self._is_judging:
            raise _busy()
        self._is_judging = True
        try:
            async with asyncio.timeout(self._patience_s):
                report = await judge.validate(uri, root)
        except TimeoutError:
            raise overloaded("the adapter was not judged in time", 503) from None
        except Exception as exc:
            _log.warning("nobody could judge %r for %s: %s", uri, model, exc)
            raise overloaded("no replica of this base model answers: try again", 503) from exc
        finally:
            self._is_judging = False
        if report is None:
            raise _busy()
        return report


def _busy() -> ApiError:
    return overloaded("another adapter is being judged: try again")


def _question(body: bytes) -> tuple[str, str]:
    """(model, uri) of a body. Errors: ApiError 400, 422."""
    try:
        values = json.loads(body)
    except (ValueError, RecursionError):
        raise ApiError(400, "the body is not JSON") from None
    if not isinstance(values, dict):
        raise ApiError(400, "the body is not an object with `model` and `uri`")
    for name in values:
        if name not in _FIELDS:
            raise ApiError(400, f"`{name:.80}` is not known here", param=name[:80])
    for name in _FIELDS:
        value = values.get(name)
        if not isinstance(value, str) or not 0 < len(value) <= MAX_URI_CHARS:
            words = f"`{name}` must be a text of at most {MAX_URI_CHARS} characters"
            raise ApiError(422, words, param=name)
    return values["model"], values["uri"]


def _lies_in(uri: str, place: str) -> bool:
    """Whether a uri is at or below a place however a source may read it: `..` leads nowhere, not
    even where it would come back, for a folder on the way may be a link."""
    plain = unquote(uri)
    return ".." not in plain.split("/") and inside(uri, place) and inside(plain, place)
