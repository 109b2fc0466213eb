"""Who owns which KV page: allocate, share by prefix hash, free, evict. Ids only, not the memory.

All KV groups draw from one space of ids (a page is as large for each group), so one budget serves
full and window layers in whatever mix the sequences need. Page 0 belongs to nobody: padding, and
what fell out of a window, point there.
"""

from array import array
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from os import urandom

from adapter_store.ref import AdapterRef

_DIGEST_BYTES = 16


@dataclass(frozen=True)
class KvGroup:
    """Layers that keep the same keys. window: keys that a query sees, itself included; 0 = all.

    chunked  a query sees those since the last position that is a multiple of the window
    """

    name: str
    window: int = 0
    chunked: bool = False

    def first_block(self, position: int, page_tokens: int) -> int:
        """The first page index that a query at `position` (and so any later one) still reads."""
        if not self.window:
            return 0
        if self.chunked:
            return position // self.window * self.window // page_tokens
        return max(0, position - self.window + 1) // page_tokens


class PageTable:
    """The pages of one sequence. Only its pool changes it.

    pages    by group: page ids, index = position // page_tokens, all equally long; 0 = freed (it
             fell out of the window)
    digests  of its tokens up to the end of each full block, as far as they were needed; `hashed`
             has taken in these blocks
    keyed    blocks offered for sharing
    """

    __slots__ = ("digests", "first_live", "hashed", "keyed", "pages")

    def __init__(self, hashed: blake2b, num_groups: int) -> None:
        self.hashed = hashed
        self.digests: list[bytes] = []
        self.clear(num_groups)

    def clear(self, num_groups: int) -> None:
        """No pages. New lists: a batch may still hold the old ones."""
        self.pages: tuple[list[int], ...] = tuple([] for _ in range(num_groups))
        self.first_live = [0] * num_groups
        self.keyed = 0


class PagePool:
    """Pages 1 .. num_pages - 1, each free, cached (no owner, but its content may be found again) or
    owned by tables.

    A block is found again by the hash of all tokens up to its end. The chain starts from cache salt
    and adapter, and is keyed with a secret of the process: nobody can prepare two prompts that
    collide, or learn of another salt's pages.
    """

    def __init__(
        self,
        num_pages: int,
        page_tokens: int,
        groups: tuple[KvGroup, ...],
        prefix_cache: bool = True,
    ) -> None:
        if num_pages < 2 or page_tokens < 1 or not groups:
            raise ValueError(
                f"a pool needs 2 pages, 1 token a page and 1 group at least, not "
                f"{num_pages}, {page_tokens}, {len(groups)}"
            )
        self.num_pages = num_pages
        self.page_tokens = page_tokens
        self.groups = groups
        self.prefix_cache = prefix_cache
        self._keyed_state = blake2b(digest_size=_DIGEST_BYTES, key=urandom(32))
        self._refs = [0] * num_pages
        self._keys: list[tuple[int, bytes] | None] = [None] * num_pages
        self._cached: list[dict[bytes, int]] = [{} for _ in groups]
        self._free = list(range(num_pages - 1, 0, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached, oldest first
        self._tables: set[PageTable] = set()

    @property
    def free_pages(self) -> int:
        """Pages that an allocation may take, cached ones included."""
        return len(self._free) + len(self._idle)

    def open(self, cache_salt: str = "", adapter: AdapterRef | None = None) -> PageTable:
        """An empty table: it shares pages only with those of the same salt and adapter content."""
        fields = (
            (adapter.adapter_id, adapter.uri, adapter.revision, adapter.base) if adapter else ()
        )
        identity = repr((cache_salt, fields)).encode()  # repr quotes: no two tuples look alike
        hashed = self._keyed_state.copy()
        # Its hash, not itself: where its bytes end and the first block's begin is beyond doubt.
        hashed.update(blake2b(identity, digest_size=_DIGEST_BYTES).digest())
        return PageTable(hashed, len(self.groups))

    def peak_pages(self, num_tokens: int, max_chunk: int) -> int:
        """Pages that a sequence holds at most while it computes `num_tokens` tokens in chunks."""
        blocks = self._blocks(num_tokens)
        return sum(min(blocks, self._bound(group, max_chunk, blocks)) for group in self.groups)

    def longest(self, max_chunk: int, limit: int) -> int:
        """Tokens of the longest sequence that fits while it is alone, `limit` at most. The last one
        is sampled, and never computed."""

        def is_too_long(num_tokens: int) -> bool:
            return self.peak_pages(num_tokens, max_chunk) >= self.num_pages

        return min(limit, 1 + bisect_left(range(1, limit), True, key=is_too_long))

    def match(self, table: PageTable, token_ids: "array[int]") -> int:
        """Tokens of the longest cached prefix that every group can serve.

        Never all of them: at least the last is computed, for its logits.
        """
        if not self.prefix_cache:
            return 0
        # One more than a hit may have, where the prompt ends with a block: `offer` wants it soon.
        self._extend_digests(table, token_ids, len(token_ids) // self.page_tokens)
        hit = (len(token_ids) - 1) // self.page_tokens
        windows = []
        for group, cached in zip(self.groups, self._cached, strict=True):
            if group.window:
                windows.append((group, cached))
                continue
            for block in range(hit):
                if table.digests[block] not in cached:
                    hit = block
                    break
        shorter = True
        while shorter and hit:
            shorter = False
            for group, cached in windows:
                first = group.first_block(hit * self.page_tokens, self.page_tokens)
                for block in range(hit - 1, first - 1, -1):
                    if table.digests[block] not in cached:
                        hit, shorter = block, True
                        break
        return hit * self.page_tokens

    def entry_pages(
        self, table: PageTable, num_cached: int, num_tokens: int, max_chunk: int
    ) -> int:
        """Free pages taken at most by a hit of `num_cached` and computing up to `num_tokens`."""
        blocks, hit = self._blocks(num_tokens), num_cached // self.page_tokens
        total = 0
        for group, cached in zip(self.groups, self._cached, strict=True):
            first = group.first_block(num_cached, self.page_tokens)
            shared = 0
            for digest in table.digests[first:hit]:
                shared += self._refs[cached[digest]] > 0
            total += min(blocks - first, self._bound(group, max_chunk, blocks)) - shared
        return total

    def adopt(self, table: PageTable, num_cached: int) -> None:
        """Give an empty table the pages of a hit that `match` found just now."""
        self._tables.add(table)
        hit = num_cached // self.page_tokens
        if not hit:
            return
        for g, (group, cached) in enumerate(zip(self.groups, self._cached, strict=True)):
            first = group.first_block(num_cached, self.page_tokens)
            found = [cached[digest] for digest in table.digests[first:hit]]
            for page in found:
                if not self._refs[page]:
                    del self._idle[page]
                self._refs[page] += 1
            table.pages[g].extend([0] * first + found)
            table.first_live[g] = first
        table.keyed = hit

    def grow(self, table: PageTable, num_tokens: int, first_query: int) -> int:
        """Make the table hold `num_tokens` tokens, the next queries starting at `first_query`.

        Gives the number of pages that are missing; 0 = done, else nothing was added. Pages that no
        query from `first_query` on reads are freed first: earlier steps may be in flight, but a
        stream runs steps in order.
        """
        held = len(table.pages[0])
        added = self._blocks(num_tokens) - held
        if added <= 0:
            return 0
        for g, group in enumerate(self.groups):
            if not group.window:
                continue
            pages, live = table.pages[g], table.first_live[g]
            dead = min(group.first_block(first_query, self.page_tokens), held)
            for block in range(live, dead):
                self._drop(pages[block])
                pages[block] = 0
            table.first_live[g] = max(live, dead)
        missing = added * len(self.groups) - self.free_pages
        if missing > 0:
            return missing
        taken = self._take(added * len(self.groups))
        for g, pages in enumerate(table.pages):
            pages += taken[g * added : (g + 1) * added]
        self._tables.add(table)
        return 0

    def offer(self, table: PageTable, token_ids: "array[int]", num_computed: int) -> None:
        """Let others find the full pages of the first `num_computed` tokens from now on."""
        if not self.prefix_cache:
            return
        first, last = table.keyed, num_computed // self.page_tokens
        if first >= last:
            return
        self._extend_digests(table, token_ids, last)
        keys = self._keys
        for g, (cached, pages) in enumerate(zip(self._cached, table.pages, strict=True)):
            begin = max(first, table.first_live[g])
            for digest, page in zip(table.digests[begin:last], pages[begin:last], strict=True):
                if digest not in cached:
                    cached[digest] = page
                    keys[page] = (g, digest)
        table.keyed = last

    def release(self, table: PageTable) -> None:
        """Give all pages back. What was offered is found until its room is needed, tail first."""
        refs, keys, free, idle = self._refs, self._keys, self._free, self._idle
        for pages, live in zip(table.pages, table.first_live, strict=True):
            for page in reversed(pages[live:]):
                if refs[page] > 1:
                    refs[page] -= 1
                    continue
                refs[page] = 0
                if keys[page] is None:
                    free.append(page)
                else:
                    idle[page] = None
        self._tables.discard(table)
        table.clear(len(self.groups))

    def forget(self, table: PageTable) -> None:
        """Nobody finds the table's pages any more: their content is not to be trusted."""
        for g, pages in enumerate(table.pages):
            for page in pages[table.first_live[g] :]:
                self._unkey(page)
        table.keyed = len(table.pages[0])

    def reclaimable(self, tables: Iterable[PageTable]) -> int:
        """Pages that are free once all these tables are released."""
        owned = Counter(
            page
            for table in tables
            for g, pages in enumerate(table.pages)
            for page in pages[table.first_live[g] :]
        )
        return sum(self._refs[page] == count for page, count in owned.items())

    def check(self) -> None:
        """AssertionError with the numbers if a page leaked, is in two states, or miscounted."""
        owned: Counter[int] = Counter()
        group_of: dict[int, int] = {}
        for table in self._tables:
            assert len({len(pages) for pages in table.pages}) == 1, "groups of unequal length"
            seen: set[int] = set()
            for g, pages in enumerate(table.pages):
                live = table.first_live[g]
                assert not any(pages[:live]), f"freed blocks still named: {pages[:live]}"
                for page in pages[live:]:
                    assert 0 < page < self.num_pages, f"page {page} of {self.num_pages}"
                    assert page not in seen, f"page {page} twice in one table"
                    assert group_of.setdefault(page, g) == g, f"page {page} in two groups"
                    seen.add(page)
            owned.update(seen)
        free, idle = set(self._free), set(self._idle)
        assert len(free) == len(self._free), "a page is free twice"
        assert not free & idle, f"free and cached: {free & idle}"
        assert not (free | idle) & owned.keys(), f"free and owned: {(free | idle) & owned.keys()}"
        total = len(free) + len(idle) + len(owned)
        assert total == self.num_pages - 1, (
            f"{len(free)} free + {len(idle)} cached + {len(owned)} owned of {self.num_pages - 1}"
        )
        for page, count in enumerate(self._refs):
            assert count == owned[page], f"page {page}: {count} counted, {owned[page]} owners"
        keyed = {page: key for page, key in enumerate(self._keys) if key is not None}
        found = {page: (g, d) for g, c in enumerate(self._cached) for d, page in c.items()}
        assert keyed == found, f"{len(keyed)} pages bear a key, {len(found)} are found by one"
        assert idle <= keyed.keys() and not free & keyed.keys(), "cached means keyed, free not"

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_tokens)

    def _bound(self, group: KvGroup, max_chunk: int, blocks: int) -> int:
        """Blocks alive at once: what a chunk's first query reads, and the chunk."""
        return (max_chunk + group.window - 2) // self.page_tokens + 2 if group.window else blocks

    def _extend_digests(self, table: PageTable, token_ids: "array[int]", num_blocks: int) -> None:
        """Hash up to `num_blocks` blocks, each with all before it. They are kept for ever."""
        digests, size = table.digests, self.page_tokens
        known = len(digests)
        if known >= num_blocks:
            return
        update, digest = table.hashed.update, table.hashed.digest
        for first in range(known * size, num_blocks * size, size):
            update(token_ids[first : first + size])
            digests.append(digest())

    def _take(self, count: int) -> list[int]:
        """`count` pages with one owner each: free ones, then the oldest cached ones."""
        taken = self._free[: -count - 1 : -1]
        del self._free[len(self._free) - len(taken) :]
        refs, keys, cached = self._refs, self._keys, self._cached
        for _ in range(count - len(taken)):
            page, _ = self._idle.popitem(last=False)
            key = keys[page]
            assert key is not None, f"page {page} is cached, and found by no key"
            del cached[key[0]][key[1]]
            keys[page] = None
            taken.append(page)
        for page in taken:
            refs[page] = 1
        return taken

    def _drop(self, page: int) -> None:
        self._refs[page] -= 1
        if not self._refs[page]:
            if self._keys[page] is None:
                self._free.append(page)
            else:
                self._idle[page] = None

    def _unkey(self, page: int) -> None:
        key = self._keys[page]
        if key is not None:
            del self._cached[key[0]][key[1]]
            self._keys[page] = None
