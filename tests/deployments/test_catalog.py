"""The catalog and the replicas' lines to it, with a clock of the tests' own and no Ray.

Replicas are stores' contents with a line; sources are a dict. Not here: the actors
(whole_service/), what the store does with contents (tests/adapter_store).
"""

import asyncio
import tracemalloc
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from adapter_store.contents import WANTED_S, Content, KnownContents
from deployments.catalog import LEASE_S, Answer, Catalog, Report
from deployments.catalog_link import LOOK_PERIOD_S, PERIOD_S, VOUCHED_S, CatalogLink

A, B = "s3://bucket/a", "s3://bucket/b"
DIGESTS = [f"{i:064x}" for i in range(8)]


class World:
    """Replicas of a service over one source and one catalog, which may be away."""

    def __init__(self) -> None:
        self.now = 0.0
        self.source = {A: "a1", B: "b1"}
        self.looks: Counter[str] = Counter()
        self.catalog: Catalog | None = self.new_catalog()
        self.replicas: dict[str, Replica] = {}

    def new_catalog(self) -> Catalog:
        return Catalog(lambda: self.now)

    def add(self, name: str, node: str = "node") -> "Replica":
        self.replicas[name] = Replica(self, name, node)
        return self.replicas[name]

    async def pass_time(self, seconds: float, wanted: tuple[str, ...] = ()) -> None:
        """Everybody lives on, and asks for some uris all the time."""
        end = self.now + seconds
        while self.now < end:
            for replica in list(self.replicas.values()):
                for uri in wanted:
                    replica.contents.want(uri)
                if await replica.link.look_around():
                    await replica.link.report()
                await replica.link.report()
            self.now += PERIOD_S


class Replica:
    def __init__(self, world: World, name: str, node: str) -> None:
        self.world = world
        self.contents = KnownContents(lambda: world.now)
        self.held: set[str] = set()
        self.can_look = True
        self.reports: list[Report] = []
        self.link = CatalogLink(
            name, node, self.contents, lambda: self.held, self.look, self.send, lambda: world.now
        )

    async def look(self, uris: list[str]) -> dict[str, str]:
        if not self.can_look:
            raise RuntimeError("the node's actor is dead")
        self.world.looks.update(uris)
        return {uri: self.world.source[uri] for uri in uris if uri in self.world.source}

    async def send(self, report: Report) -> Answer:
        self.reports.append(report)
        if self.world.catalog is None:
            raise ConnectionError("no catalog")
        return self.world.catalog.exchange(report)


@pytest.fixture
def world() -> World:
    return World()


def current(world: World, uri: str = A) -> list[str | None]:
    return [replica.contents.current(uri) for replica in world.replicas.values()]


async def test_one_looks_for_all(world: World) -> None:
    for i in range(4):
        world.add(f"r{i}")
    await world.pass_time(2, (A, B))
    assert current(world, A) == ["a1"] * 4 and current(world, B) == ["b1"] * 4
    world.looks.clear()
    await world.pass_time(10, (A, B))
    assert all(9 <= world.looks[uri] <= 11 for uri in (A, B)), world.looks
    watched = [set(replica.link._looked_at) for replica in world.replicas.values()]
    assert sorted(map(len, watched)) == [0, 0, 1, 1], "and nobody looks at more than another"


async def test_new_content_is_known_to_all_in_a_second_or_so(world: World) -> None:
    for i in range(3):
        world.add(f"r{i}")
    await world.pass_time(3, (A,))
    world.source[A] = "a2"
    await world.pass_time(LOOK_PERIOD_S + PERIOD_S, (A,))
    assert current(world) == ["a2"] * 3


async def test_a_source_that_is_away_changes_nothing_and_one_that_is_empty_does(
    world: World,
) -> None:
    for i in range(2):
        world.add(f"r{i}")
    await world.pass_time(3, (A,))
    del world.source[A]  # no answer: the watcher cannot tell
    await world.pass_time(5, (A,))
    assert current(world) == ["a1"] * 2
    world.source[A] = ""  # an answer: nothing is there
    await world.pass_time(2, (A,))
    assert current(world) == [None] * 2
    world.source[A] = "a3"
    await world.pass_time(2, (A,))
    assert current(world) == ["a3"] * 2


async def test_the_catalog_away_and_back(world: World) -> None:
    """Nothing that it said holds on for long, and a new one is full after one turn of each."""
    for i in range(3):
        world.add(f"r{i}", f"node{i}")
    first = world.replicas["r0"]
    first.held = {DIGESTS[0]}
    first.contents.saw(A, DIGESTS[0], "a0")
    await world.pass_time(3, (A, B))
    world.catalog = None
    await world.pass_time(PERIOD_S, (A,))
    assert current(world) == [None] * 3
    assert first.contents.revision_of(A, DIGESTS[0]) == "a0", "what was holds for ever"
    await world.pass_time(5, (A,))
    world.catalog = world.new_catalog()
    await world.pass_time(PERIOD_S, (A, B))
    assert world.catalog.stats().held_by_node == {"node0": 1, "node1": 0, "node2": 0}
    await world.pass_time(2 * PERIOD_S, (A, B))
    assert current(world, A) == ["a1"] * 3 and current(world, B) == ["b1"] * 3
    late = world.add("late")
    await world.pass_time(2, (A,))
    assert late.contents.revision_of(A, DIGESTS[0]) == "a0"


async def test_the_catalog_is_replaced_between_two_turns(world: World) -> None:
    for i in range(2):
        world.add(f"r{i}")
    await world.pass_time(3, (A,))
    world.catalog = world.new_catalog()
    await world.pass_time(PERIOD_S, (A,))
    assert current(world) == [None] * 2
    await world.pass_time(2, (A,))
    assert current(world) == ["a1"] * 2


async def test_a_silent_catalog_is_no_authority(world: World) -> None:
    replica = world.add("r0")
    await world.pass_time(3, (A,))
    world.now += VOUCHED_S - PERIOD_S - 0.01
    assert replica.contents.current(A) == "a1"
    world.now += PERIOD_S
    assert replica.contents.current(A) is None


async def test_a_dead_watcher_is_replaced(world: World) -> None:
    for i in range(3):
        world.add(f"r{i}")
    await world.pass_time(3, (A,))
    [watcher] = [name for name, r in world.replicas.items() if r.link._looked_at]
    del world.replicas[watcher]
    world.source[A] = "a2"
    await world.pass_time(LEASE_S + 2 * PERIOD_S, (A,))
    assert current(world) == ["a2"] * 2


async def test_a_watcher_that_cannot_look_vouches_for_nothing(world: World) -> None:
    for i in range(2):
        world.add(f"r{i}")
    await world.pass_time(3, (A,))
    [watcher] = [r for r in world.replicas.values() if r.link._looked_at]
    watcher.can_look = False
    await world.pass_time(2, (A,))
    assert current(world) == [None] * 2
    watcher.can_look = True
    await world.pass_time(2, (A,))
    assert current(world) == ["a1"] * 2


async def test_nobody_looks_at_what_nobody_needs(world: World) -> None:
    replica, other = world.add("r0"), world.add("r1")
    await world.pass_time(3, (A,))
    other.contents.want(B)
    await world.pass_time(WANTED_S + 2, ())
    world.looks.clear()
    await world.pass_time(5, ())
    assert not world.looks and world.catalog is not None
    assert world.catalog.stats().wanted_uris == 0
    assert replica.contents.current(A) is None, "it may hold anything by now"


async def test_folders_are_nobody_elses(world: World) -> None:
    replica = world.add("r0")
    for uri in ("/folder", "file:///folder", "folder"):
        replica.contents.want(uri)
        replica.contents.saw(uri, DIGESTS[0], "local-1")
    await world.pass_time(2)
    assert not replica.reports, "nobody is asked where nobody could know"


def report(name: str, **values: object) -> Report:
    return Report(name, "node", is_whole=False, **values)  # type: ignore[arg-type]


def test_only_the_watcher_says_what_is_now(world: World) -> None:
    """An older look of another replica, told late, must not undo what the watcher saw."""
    catalog = world.new_catalog()
    for name in ("r0", "r1"):
        catalog.exchange(Report(name, "node", is_whole=True, wanted=frozenset({A})))
    assert catalog.exchange(report("r0", looked={A: "a2"})).current == {A: "a2"}
    late = report("r1", looked={A: "a1"}, contents=(Content(A, DIGESTS[1], "a1"),))
    answer = catalog.exchange(late)
    assert answer.current == {A: "a2"} and answer.watch is None
    assert Content(A, DIGESTS[1], "a1") in catalog.exchange(report("r0")).contents


def test_a_digest_is_told_to_those_who_need_a_uri_that_held_it(world: World) -> None:
    """Not to those who may use another uri alone."""
    catalog = world.new_catalog()
    seen = (Content(A, DIGESTS[1], "a1"),)
    catalog.exchange(Report("r0", "node", is_whole=True, wanted=frozenset({A}), contents=seen))
    other = catalog.exchange(Report("r1", "node", is_whole=True, wanted=frozenset({B})))
    assert other.contents == () and A not in other.current
    assert catalog.exchange(report("r1", wanted=frozenset({A}))).contents == seen


def test_host_tiers_are_counted_by_node(world: World) -> None:
    catalog = world.new_catalog()
    catalog.exchange(Report("r0", "n0", True, held=frozenset(DIGESTS[1:3])))
    catalog.exchange(Report("r1", "n0", True, held=frozenset(DIGESTS[1:4])))
    catalog.exchange(Report("r2", "n1", True, held=frozenset(DIGESTS[:1])))
    assert catalog.stats().held_by_node == {"n0": 3, "n1": 1}
    catalog.exchange(Report("r2", "n1", False, held=frozenset(DIGESTS[1:2])))
    assert catalog.stats().held_by_node == {"n0": 3, "n1": 2}
    for name in ("r0", "r1"):
        catalog.exchange(Report(name, "n0", False, dropped=frozenset(DIGESTS[1:2])))
    assert catalog.stats().held_by_node == {"n0": 2, "n1": 2}
    world.now += LEASE_S
    assert catalog.stats().held_by_node == {} and catalog.stats().replicas == 0


async def test_many_adapters_cost_bounded_memory_and_small_reports(world: World) -> None:
    """10,000 adapters on two replicas: what stands still is not said again."""
    uris = [f"s3://bucket/tenant-{i}/adapter" for i in range(10_000)]
    world.source = dict.fromkeys(uris, "1")
    replicas = [world.add("r0"), world.add("r1")]
    tracemalloc.start()
    for i, uri in enumerate(uris):
        for replica in replicas:
            replica.contents.want(uri)
            replica.contents.saw(uri, f"{i:064x}", "1")
    await world.pass_time(1)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used < 60 << 20, f"{used >> 20} MiB for catalog and two replicas"
    assert world.catalog is not None and world.catalog.stats().wanted_uris == 10_000
    await world.pass_time(2)
    last = replicas[0].reports[-1]
    assert not last.wanted and not last.contents and not last.held and len(last.looked) <= 100


def test_above_its_limit_the_catalog_vouches_for_nothing_more() -> None:
    catalog = Catalog(max_uris=3)
    uris = frozenset(f"s3://bucket/{i}" for i in range(5))
    contents = tuple(Content(uri, DIGESTS[0], "1") for uri in sorted(uris))
    answer = catalog.exchange(Report("r0", "n", True, wanted=uris, contents=contents))
    assert answer.watch is not None and len(answer.watch) == 3
    assert catalog.stats().wanted_uris == 3 and len(catalog._contents) == 3
    assert catalog.exchange(report("r0", unwanted=uris)).current == {}
    assert catalog.stats().wanted_uris == 0


async def test_reports_go_one_at_a_time(world: World) -> None:
    replica = world.add("r0")
    replica.contents.want(A)
    running, most = 0, 0
    send: Callable[[Report], Awaitable[Answer]] = replica.link._send

    async def slow(report: Report) -> Answer:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1
        return await send(report)

    replica.link._send = slow
    await asyncio.gather(*(replica.link.report() for _ in range(5)))
    assert most == 1 and len(replica.reports) == 5
