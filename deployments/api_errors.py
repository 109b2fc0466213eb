"""What goes wrong, in the words and shapes of OpenAI's API.

The one table from error code to HTTP status is here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from model_runner.request import ErrorCode

CLIENT_GONE_STATUS = 499


@dataclass(frozen=True)
class _Wire:
    status: int
    type: str
    code: str


ERRORS: dict[ErrorCode, _Wire] = {
    ErrorCode.BAD_REQUEST: _Wire(400, "invalid_request_error", "bad_request"),
    ErrorCode.PROMPT_TOO_LONG: _Wire(400, "invalid_request_error", "context_length_exceeded"),
    ErrorCode.ADAPTER_NOT_FOUND: _Wire(404, "invalid_request_error", "adapter_not_found"),
    ErrorCode.ADAPTER_INVALID: _Wire(422, "invalid_request_error", "adapter_invalid"),
    ErrorCode.ADAPTER_TOO_LARGE: _Wire(422, "invalid_request_error", "adapter_too_large"),
    ErrorCode.OTHER_EXTRAS: _Wire(503, "server_error", "adapter_changes"),
    ErrorCode.ADAPTER_UNAVAILABLE: _Wire(503, "server_error", "adapter_unavailable"),
    ErrorCode.NOT_FINITE: _Wire(500, "server_error", "not_finite"),
    ErrorCode.OVERLOADED: _Wire(503, "server_error", "overloaded"),
    ErrorCode.NO_ROOM: _Wire(503, "server_error", "overloaded"),
    ErrorCode.ENGINE_DEAD: _Wire(503, "server_error", "engine_dead"),
    ErrorCode.REPLICAS_LOST: _Wire(500, "server_error", "replicas_lost"),
}


class ApiError(Exception):
    """An answer that is an error. retry_after_s  seconds, for the header of that name."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, dict[str, str | None]]:
        """The JSON body."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def headers(self) -> dict[str, str]:
        headers = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        if self.status == 408:
            headers["Connection"] = "close"  # the rest of the body may never come
        return headers


def engine_error(code: ErrorCode | None, message: str) -> ApiError:
    """The answer to a request that failed in the engine."""
    wire = ERRORS[code or ErrorCode.ENGINE_DEAD]
    return ApiError(
        wire.status,
        message or str(code),
        kind=wire.type,
        code=wire.code,
        retry_after_s=1 if wire.status == 503 else None,
    )


def internal_error() -> ApiError:
    """A bug of ours: the log has its words, the client does not."""
    return ApiError(500, "internal error", kind="server_error")


def model_not_found(name: str) -> ApiError:
    """The same words for a model that is nobody's and for one that is another tenant's."""
    return ApiError(
        404,
        f"The model `{name:.200}` does not exist or you do not have access to it.",
        param="model",
        code="model_not_found",
    )


def ambiguous_model(name: str, full_names: Sequence[str]) -> ApiError:
    """A name that the tenant has under several bases."""
    choices = ", ".join(f"`{full}`" for full in full_names)
    return ApiError(
        400,
        f"The model `{name:.200}` is there for several base models: ask for one of {choices}.",
        param="model",
        code="ambiguous_model",
    )


def unauthorized() -> ApiError:
    """The same words for a missing key and a wrong one."""
    return ApiError(
        401,
        "Incorrect API key provided, or none: send it as `Authorization: Bearer KEY`.",
        code="invalid_api_key",
    )


def overloaded(message: str, status: int = 429) -> ApiError:
    """Too much at once; the client may come again."""
    kind = "rate_limit_error" if status == 429 else "server_error"
    return ApiError(status, message, kind=kind, code="overloaded", retry_after_s=1)
