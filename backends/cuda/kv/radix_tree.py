"""Prefix tree over full pages, as in SGLang's RadixAttention (Zheng et al. 2024)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from localgen.backends.cuda.kv.page_pool import PAGE_TOKENS, PagePool

# the tokens of a page; before those of a first page, the salt of its sequences
PageKey = tuple[int | str, ...]


class _Node:
    """A page with the tokens `key`, following the pages of its ancestors."""

    __slots__ = ("children", "key", "page", "parent")

    def __init__(self, key: PageKey, page: int, parent: _Node | None) -> None:
        self.key, self.page, self.parent = key, page, parent
        self.children: dict[PageKey, _Node] = {}


class RadixTree:
    """Keeps the pages of cached prefixes, with LRU eviction of unused ones.

    A sequence that uses a page also uses all its ancestors. So the descendants of an idle page are
    idle, and since PagePool.release makes them idle first, the least recently used idle page is
    always a leaf.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._root = _Node((), -1, None)
        self._nodes: dict[int, _Node] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def match(self, tokens: Sequence[int], salt: str = "") -> list[int]:
        """Return the pages of the longest cached prefix with this salt, full pages only.

        The caller has to acquire them before use.
        """
        node, pages = self._root, []
        for key in _page_keys(tokens, salt, 0, len(tokens) // PAGE_TOKENS):
            child = node.children.get(key)
            if child is None:
                break
            node = child
            pages.append(node.page)
        return pages

    def insert(
        self, tokens: Sequence[int], pages: Sequence[int], num_known: int = 0, salt: str = ""
    ) -> list[int]:
        """Insert full pages; returns the pages that hold their tokens from now on.

        Where the tree already has a page for the same tokens, that page is returned instead. The
        caller must hold the given pages, and acquire the returned ones. num_known: number of
        leading pages that are already in the tree; the returned pages are those after them.
        """
        node, found = self._nodes[pages[num_known - 1]] if num_known else self._root, []
        for key, page in zip(
            _page_keys(tokens, salt, num_known, len(pages)), pages[num_known:], strict=True
        ):
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = self._nodes[page] = _Node(key, page, node)
                self._pool.mark_cached(page)
            node = child
            found.append(node.page)
        return found

    def prefix_of(self, page: int) -> tuple[list[int], list[int], str]:
        """Tokens, pages and salt of the cached prefix that ends with this page."""
        nodes = [self._nodes[page]]
        while (parent := nodes[-1].parent) is not None and parent is not self._root:
            nodes.append(parent)
        nodes.reverse()
        tokens = [token for node in nodes for token in node.key if not isinstance(token, str)]
        return tokens, [node.page for node in nodes], str(nodes[0].key[0])

    def evict(self, count: int) -> None:
        """Free up to `count` idle pages, least recently used first."""
        for page in self._pool.least_recent_idle(count):
            node = self._nodes.pop(page)
            assert node.parent is not None
            assert not node.children, page
            del node.parent.children[node.key]
            self._pool.evict(page)

    def check(self) -> None:
        """Assert that the tree is consistent and that a page becomes idle before its ancestors.

        For tests.
        """
        order = {
            page: i for i, page in enumerate(self._pool.least_recent_idle(self._pool.num_idle))
        }
        seen = 0
        waiting = [self._root]
        while waiting:
            node = waiting.pop()
            for key, child in node.children.items():
                assert child.parent is node
                assert child.key == key
                assert self._nodes[child.page] is child
                if node.page in order:
                    assert order[child.page] < order[node.page]
            seen += len(node.children)
            waiting += node.children.values()
        assert seen == len(self._nodes)

    @property
    def pages(self) -> set[int]:
        """The pages of all cached prefixes."""
        return set(self._nodes)


def _page_keys(tokens: Sequence[int], salt: str, first: int, last: int) -> Iterator[PageKey]:
    """Yield the key of each full page from page `first` to `last`, exclusive."""
    for start in range(first * PAGE_TOKENS, last * PAGE_TOKENS, PAGE_TOKENS):
        key = tuple(tokens[start : start + PAGE_TOKENS])
        yield key if start else (salt, *key)
