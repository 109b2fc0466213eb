"""Pages: who owns them, who finds them again, and that `check` notices what does not add up."""

from array import array

import pytest

from adapter_store.ref import AdapterRef
from model_runner.scheduling.page_pool import KvGroup, PagePool, PageTable

FULL = (KvGroup("full"),)
BOTH = (KvGroup("full"), KvGroup("window", 8))
PROMPT = array("q", range(100, 130))


def fill(pool: PagePool, table: PageTable, ids: "array[int]", chunk: int = 1000) -> int:
    """Compute `ids` as a scheduler does; the tokens that were found instead."""
    cached = pool.match(table, ids)
    pool.adopt(table, cached)
    for start in range(cached, len(ids), chunk):
        end = min(len(ids), start + chunk)
        assert pool.grow(table, end, start) == 0
        pool.offer(table, ids, end)
        pool.check()
    return cached


def test_page_0_is_nobodys_and_all_others_can_be_owned() -> None:
    pool = PagePool(8, 4, FULL)
    table = pool.open()
    assert pool.grow(table, 28, 0) == 0
    assert sorted(table.pages[0]) == [1, 2, 3, 4, 5, 6, 7]
    assert pool.grow(table, 29, 28) == 1
    assert pool.free_pages == 0
    pool.release(table)
    pool.check()
    assert pool.free_pages == 7


@pytest.mark.parametrize("num_pages, page_tokens, groups", [(1, 4, FULL), (8, 0, FULL), (8, 4, ())])
def test_senseless_sizes_are_refused(
    num_pages: int, page_tokens: int, groups: tuple[KvGroup, ...]
) -> None:
    with pytest.raises(ValueError, match=f"{num_pages}, {page_tokens}, {len(groups)}"):
        PagePool(num_pages, page_tokens, groups)


def test_a_prefix_is_found_while_owned_and_after() -> None:
    pool = PagePool(64, 4, FULL)
    first, second, third = (pool.open() for _ in range(3))
    assert fill(pool, first, PROMPT) == 0
    assert fill(pool, second, PROMPT[:18] + array("q", (1, 2, 3))) == 16
    assert second.pages[0][:4] == first.pages[0][:4]
    assert not set(second.pages[0][4:]) & set(first.pages[0])
    owned = pool.num_pages - 1 - pool.free_pages
    assert owned == 8 + 2
    pool.release(first)
    pool.check()
    assert fill(pool, third, PROMPT) == 28
    pool.release(second)
    pool.release(third)
    pool.check()
    assert pool.free_pages == 63


@pytest.mark.parametrize("length, found", [(28, 24), (29, 28), (4, 0), (5, 4), (1, 0)])
def test_the_last_token_is_never_found(length: int, found: int) -> None:
    pool = PagePool(64, 4, FULL)
    fill(pool, pool.open(), PROMPT)
    assert pool.match(pool.open(), PROMPT[:length]) == found


def test_only_the_same_salt_and_adapter_content_share() -> None:
    pool = PagePool(256, 4, FULL)
    ref = AdapterRef("a", "s3://b/a", "digest1")
    owners: list[tuple[str, AdapterRef | None]] = [
        ("", None),
        ("salt", None),
        ("", ref),
        ("salt", ref),
        ("", AdapterRef("a", "s3://b/a", "digest2")),
        ("", AdapterRef("a", "s3://b/a2", "digest1")),
        ("", AdapterRef("a", "s3://b/a", "digest1", "base")),
        # looks like the one before if the fields were glued together
        ("", AdapterRef("a", "s3://b/adigest1", "", "base")),
        ("('a', 's3://b/a', 'digest1', '')", None),
    ]
    for salt, adapter in owners:
        assert fill(pool, pool.open(salt, adapter), PROMPT) == 0, (salt, adapter)
    for salt, adapter in owners:
        assert pool.match(pool.open(salt, adapter), PROMPT) == 28


def test_a_block_is_found_only_behind_the_same_blocks() -> None:
    pool = PagePool(64, 4, FULL)
    fill(pool, pool.open(), PROMPT)
    assert pool.match(pool.open(), array("q", (1, *PROMPT[1:]))) == 0
    assert pool.match(pool.open(), array("q", (*PROMPT[:4], 1, *PROMPT[5:]))) == 4
    assert pool.match(pool.open(), PROMPT[4:]) == 0


def test_two_processes_hash_differently() -> None:
    one, other = (PagePool(8, 4, FULL).open().hashed.digest() for _ in range(2))
    assert one != other


def test_without_prefix_cache_nothing_is_found() -> None:
    pool = PagePool(64, 4, FULL, prefix_cache=False)
    table = pool.open()
    fill(pool, table, PROMPT)
    assert pool.match(pool.open(), PROMPT) == 0
    pool.release(table)
    assert fill(pool, pool.open(), PROMPT) == 0
    pool.check()


def test_least_recently_used_goes_first_and_tails_before_heads() -> None:
    pool = PagePool(9, 4, FULL)
    old, new = pool.open("old"), pool.open("new")
    fill(pool, old, PROMPT[:16])
    fill(pool, new, PROMPT[:16])
    pool.release(old)
    pool.release(new)
    other = pool.open()
    assert pool.grow(other, 8, 0) == 0  # two pages: the end of `old`
    pool.check()
    longer = array("q", (*PROMPT[:16], 1))
    assert pool.match(pool.open("old"), longer) == 8
    assert pool.match(pool.open("new"), longer) == 16
    again = pool.open("old")
    pool.adopt(again, pool.match(again, longer))
    assert pool.grow(other, 24, 8) == 0  # four more: all of `new`, for `old` is in use
    assert pool.match(pool.open("new"), longer) == 0
    assert pool.match(pool.open("old"), longer) == 8
    assert pool.grow(other, 28, 24) == 1
    pool.check()


def test_a_window_frees_what_fell_out() -> None:
    pool = PagePool(64, 4, BOTH)
    table = pool.open()
    assert pool.grow(table, 20, 0) == 0
    assert pool.num_pages - 1 - pool.free_pages == 10
    assert pool.grow(table, 24, 20) == 0  # the query at 20 sees 13 .. 20: pages 0 .. 2 are dead
    pool.check()
    assert table.pages[1][:3] == [0, 0, 0]
    assert all(table.pages[1][3:]) and all(table.pages[0])
    assert pool.num_pages - 1 - pool.free_pages == 6 + 3
    before = [list(pages) for pages in table.pages]
    assert pool.grow(table, 24, 23) == 0  # no page is added, so the lists stay as they are
    assert [list(pages) for pages in table.pages] == before
    pool.release(table)
    pool.check()


@pytest.mark.parametrize("chunked", [False, True], ids=["sliding", "chunked"])
@pytest.mark.parametrize("window", [1, 3, 4, 5, 8, 9, 128])
def test_a_long_sequence_never_owns_more_than_its_peak(window: int, chunked: bool) -> None:
    groups = (KvGroup("full"), KvGroup("window", window, chunked))
    for chunk in (1, 3, 4, 7, 16):
        pool = PagePool(200, 4, groups)
        table, peak = pool.open(), 0
        for start in range(0, 160, chunk):
            end = min(160, start + chunk)
            assert pool.grow(table, end, start) == 0
            first = groups[1].first_block(start, 4)
            assert not chunked or first == start // window * window // 4
            assert all(table.pages[1][first:]), f"a page that position {start} reads is gone"
            peak = max(peak, pool.num_pages - 1 - pool.free_pages)
            pool.check()
        assert peak <= pool.peak_pages(160, chunk)
        if window <= 9:
            assert peak < 40 + 40


@pytest.mark.parametrize("groups", [FULL, BOTH])
@pytest.mark.parametrize("num_pages", [2, 9, 40])
@pytest.mark.parametrize("limit", [1, 30, 1000])
def test_the_longest_sequence_is_the_last_that_fits(
    groups: tuple[KvGroup, ...], num_pages: int, limit: int
) -> None:
    pool = PagePool(num_pages, 4, groups)
    longest = pool.longest(16, limit)
    fits = [n for n in range(1, limit + 1) if pool.peak_pages(n - 1, 16) < num_pages]
    assert longest == max(fits) and len(fits) == longest


def test_a_hit_needs_every_group_but_of_a_window_only_its_end() -> None:
    pool = PagePool(64, 4, BOTH)
    table = pool.open()
    ids = array("q", range(200, 241))
    fill(pool, table, ids)  # one chunk: all ten full blocks were offered in both groups
    assert pool.match(pool.open(), ids) == 40
    assert pool.grow(table, 44, 41) == 0 and pool.grow(table, 48, 44) == 0
    pool.release(table)
    taken = pool.open()
    # 43 pages were never offered; the first to be evicted are those that fell out of the window.
    assert pool.free_pages == 63
    assert pool.grow(taken, 4 * 25, 0) == 0
    pool.check()
    again = pool.open()
    hit = pool.match(again, ids)
    assert hit == 40
    pool.adopt(again, hit)
    pool.check()
    assert again.pages[1][:8] == [0] * 8 and all(again.pages[1][8:]) and all(again.pages[0])
    assert pool.match(pool.open(), ids[:30]) == 0, "a shorter prefix lacks its window"


def test_a_hit_at_the_border_of_chunks_needs_no_page_before_it() -> None:
    pool = PagePool(64, 4, (KvGroup("full"), KvGroup("chunks", 8, True)))
    table = pool.open()
    ids = array("q", range(200, 241))
    fill(pool, table, ids)
    lost = table.pages[1][7]  # positions 28 .. 31, the end of a chunk
    pool._unkey(lost)
    assert pool.match(pool.open(), ids[:33]) == 32, "position 32 begins a chunk"
    assert pool.match(pool.open(), ids[:32]) == 28, "position 28 reads 24 .. 27"
    assert pool.match(pool.open(), ids) == 40


def test_a_missing_window_page_shortens_the_hit() -> None:
    pool = PagePool(64, 4, BOTH)
    table = pool.open()
    ids = array("q", range(200, 241))
    fill(pool, table, ids)
    lost = table.pages[1][7]
    pool._unkey(lost)  # what an eviction does
    assert pool.match(pool.open(), ids) == 40  # reads 33 .. 40: pages 8, 9
    assert pool.match(pool.open(), ids[:39]) == 28  # 36 would read 29 .. 36
    assert pool.match(pool.open(), ids[:33]) == 28


@pytest.mark.parametrize("groups", [FULL, BOTH])
def test_entry_pages_is_what_entering_takes_at_most(groups: tuple[KvGroup, ...]) -> None:
    for hit_owner_lives in (False, True):
        pool = PagePool(64, 4, groups)
        owner = pool.open()
        fill(pool, owner, PROMPT)
        if not hit_owner_lives:
            pool.release(owner)
        table, ids = pool.open(), array("q", (*PROMPT, *range(17)))
        cached = pool.match(table, ids)
        assert cached == 28
        need, free = pool.entry_pages(table, cached, len(ids), 1000), pool.free_pages
        pool.adopt(table, cached)
        assert pool.grow(table, len(ids), cached) == 0
        assert need >= free - pool.free_pages > 0
        if len(groups) == 1:
            assert need == free - pool.free_pages


def test_forgotten_pages_are_not_found_and_go_back_clean() -> None:
    pool = PagePool(64, 4, BOTH)
    table = pool.open()
    fill(pool, table, PROMPT)
    pool.forget(table)
    pool.check()
    assert pool.match(pool.open(), PROMPT) == 0
    pool.offer(table, PROMPT, 30)
    assert pool.match(pool.open(), PROMPT) == 0
    pool.release(table)
    pool.check()
    assert pool.free_pages == 63


def test_reclaimable_counts_shared_pages_once_all_owners_go() -> None:
    pool = PagePool(64, 4, FULL)
    first, second, third = (pool.open() for _ in range(3))
    for table in (first, second, third):
        fill(pool, table, PROMPT)
    assert pool.reclaimable([first]) == 1
    assert pool.reclaimable([first, second]) == 2
    assert pool.reclaimable([first, second, third]) == 10


def break_twice(pool: PagePool, table: PageTable) -> None:
    table.pages[0][1] = table.pages[0][0]


def break_leak(pool: PagePool, table: PageTable) -> None:
    table.pages[0].pop()
    table.pages[1].pop()


def break_free(pool: PagePool, table: PageTable) -> None:
    pool._free.append(table.pages[0][0])


def break_group(pool: PagePool, table: PageTable) -> None:
    other = pool.open()
    other.pages = ([table.pages[1][0]], [table.pages[0][0]])
    pool._tables.add(other)


def break_count(pool: PagePool, table: PageTable) -> None:
    pool._refs[table.pages[0][0]] += 1


def break_key(pool: PagePool, table: PageTable) -> None:
    pool._keys[table.pages[0][0]] = None


@pytest.mark.parametrize(
    "damage", [break_twice, break_leak, break_free, break_group, break_count, break_key]
)
def test_check_notices(damage: object) -> None:
    pool = PagePool(64, 4, BOTH)
    table = pool.open()
    fill(pool, table, PROMPT)
    pool.check()
    damage(pool, table)  # type: ignore[operator]
    with pytest.raises(AssertionError):
        pool.check()
