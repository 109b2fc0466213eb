"""An ingress' line to the router: counts go there, the map of replicas and the metrics come back.

Not here: what the router does with them (router.py), and where requests go (ingress.py).
"""

import asyncio
import time
from contextlib import suppress
from uuid import uuid4

from ray.serve.handle import DeploymentHandle

from deployments.api_errors import ApiError
from deployments.frontend import Frontend
from deployments.metrics import LAST_WORDS_S, Outbox
from deployments.placement.view import MapUpdate, MapWanted
from deployments.tenant_labels import LabelledTenants
from deployments.turns import take_turns

SYNC_PERIOD_S = 1.0
_METRICS_MAX_AGE_S = 1.0
_ROUTER_PATIENCE_S = 5.0


class RouterLink:
    """An ingress' line to the router: counts go there, the map comes back.

    Without it the last map holds.
    """

    def __init__(self, frontend: Frontend, router: DeploymentHandle) -> None:
        self._frontend = frontend
        self._router = router
        self._outbox = Outbox(uuid4().hex)
        self._counted_since_s = time.monotonic()
        self._rendered = b""
        self._rendered_at_s = float("-inf")
        self._rendering: asyncio.Task[None] | None = None
        self._asking: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Sync for ever."""
        await take_turns("the line to the router", self.sync, SYNC_PERIOD_S)

    async def sync(self) -> None:
        """Send what was counted, take what is new of the map.

        What could not be sent goes with the next one.
        """
        frontend = self._frontend
        # First: a new router learns whom the counts that follow may name.
        labelled: LabelledTenants = await self._router.metric_tenants.remote(frontend.labelled)
        frontend.labelled = labelled
        delta, tokens = self._outbox.next(frontend.log.drain), dict(frontend.traffic)
        frontend.traffic.clear()
        since_s, self._counted_since_s = self._counted_since_s, time.monotonic()
        over_s = self._counted_since_s - since_s
        placement = frontend.placement
        try:
            news: MapUpdate | MapWanted | None = await self._router.sync.remote(
                placement.version, tokens, delta, over_s
            )
        except Exception:
            frontend.traffic.update(tokens)
            self._counted_since_s = since_s
            raise
        self._outbox.arrived(delta)
        if isinstance(news, MapWanted):
            await self._router.adopt.remote(placement)
        elif news is not None and (news.since is None or news.since == frontend.placement.version):
            frontend.placement = frontend.placement.apply(news)

    async def close(self) -> None:
        """Send what was counted since the last sync, if the router answers now."""
        with suppress(Exception):
            async with asyncio.timeout(LAST_WORDS_S):
                await self.sync()  # perhaps one that was under way
                await self.sync()

    async def metrics(self) -> bytes:
        """Errors: ApiError 503 while the router does not answer."""
        if time.monotonic() - self._rendered_at_s > _METRICS_MAX_AGE_S:
            if self._rendering is None or self._rendering.done():
                self._rendering = asyncio.create_task(self._render())
            with suppress(Exception):
                if await self._is_done_soon(self._rendering):
                    self._rendering.result()
                    if self._rendered:
                        return self._rendered
            raise ApiError(503, "the router does not answer", kind="server_error", retry_after_s=5)
        return self._rendered

    async def missing(self) -> list[str]:
        """Models without a seat, by the newest map that comes soon, else by the last one."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self.sync())
        if await self._is_done_soon(self._asking):
            with suppress(Exception):
                self._asking.result()
        seats = self._frontend.placement.seats
        return [model.name for model in self._frontend.config.models if not seats.get(model.name)]

    async def _render(self) -> None:
        await self.sync()
        self._rendered = await self._router.metrics.remote()
        if self._rendered:
            self._rendered_at_s = time.monotonic()

    async def _is_done_soon(self, call: "asyncio.Task[None]") -> bool:
        """Wait, but not for ever: a call to a router that died waits until Serve has made another
        one. It is not given up then, for it carries counts."""
        done, _ = await asyncio.wait([call], timeout=_ROUTER_PATIENCE_S)
        return bool(done)
