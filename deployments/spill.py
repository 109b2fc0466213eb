"""What becomes of a request that spilled over to a replica without room for its adapter.

Not here: when requests spill and where to (request_router.py); who refuses (the engine).
"""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace

from deployments.placement.view import Place
from model_runner.request import ErrorCode, Request, RequestOutput

Stream = Callable[[Request, Place], AsyncGenerator[RequestOutput, None]]


async def stream_near_home(
    stream: Stream, request: Request, place: Place
) -> AsyncGenerator[RequestOutput, None]:
    """`stream(request, place)`; where a spill seat refuses it, again, and no spill this time.

    It is refused before its first token or never.
    """
    has_begun = not place.may_spill
    async with aclosing(stream(request, place)) as outputs:
        async for output in outputs:
            if output.error_code is ErrorCode.NO_ROOM and not has_begun:
                break
            has_begun = True
            yield output
        else:
            return
    async with aclosing(stream(request, replace(place, may_spill=False))) as outputs:
        async for output in outputs:
            yield output
