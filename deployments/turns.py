"""Work that a process does turn by turn for as long as it lives. No Ray here."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

_log = logging.getLogger("ray.serve")


async def take_turns(what: str, turn: Callable[[], Awaitable[None]], period_s: float) -> None:
    """Take turns for ever. One that fails does not end them, whatever it raised; the first of such
    in a row is logged.

    what  is done, in words for the log;  period_s  between two turns
    """
    fails = False
    while True:
        try:
            await turn()
            if fails:
                _log.info("%s works again", what)
            fails = False
        except Exception as exc:
            if not fails:
                _log.warning("%s fails: %s: %s", what, type(exc).__name__, exc)
            fails = True
        await asyncio.sleep(period_s)
