"""Known prefixes as a tree over full pages, as in SGLang's RadixAttention (Zheng et al. 2024)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from localgen.backends.cuda.kv.page_pool import PAGE_TOKENS, PagePool

PageKey = tuple[int, ...]


class _Node:
    """A page whose tokens are `key`, behind those of its parents."""

    __slots__ = ("children", "key", "page", "parent")

    def __init__(self, key: PageKey, page: int, parent: _Node | None) -> None:
        self.key, self.page, self.parent = key, page, parent
        self.children: dict[PageKey, _Node] = {}


class RadixTree:
    """Keeps the pages of known prefixes; gives back the least recently used that nobody uses.

    Who uses a page uses all before it on its path, too. Hence an idle page has none but idle
    pages behind it, and as PagePool.drop lets those become idle first, the page that has been
    idle longest is always a leaf.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._root = _Node((), -1, None)
        self._nodes: dict[int, _Node] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def match(self, tokens: Sequence[int]) -> list[int]:
        """The pages of the longest known prefix, whole pages only. Using them is to hold them."""
        node, pages = self._root, []
        for key in _page_keys(tokens, 0, len(tokens) // PAGE_TOKENS):
            child = node.children.get(key)
            if child is None:
                break
            node = child
            pages.append(node.page)
        return pages

    def insert(self, tokens: Sequence[int], pages: Sequence[int], num_known: int = 0) -> list[int]:
        """Know these full pages; the pages that hold their tokens from now on.

        Where tokens were known already, that is the page known before. The caller uses the pages
        given and shall use those returned. num_known: how many pages at the beginning are in the
        tree for sure; the pages returned are those behind them.
        """
        node, found = self._nodes[pages[num_known - 1]] if num_known else self._root, []
        for key, page in zip(
            _page_keys(tokens, num_known, len(pages)), pages[num_known:], strict=True
        ):
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = self._nodes[page] = _Node(key, page, node)
                self._pool.mark_cached(page)
            node = child
            found.append(node.page)
        return found

    def evict(self, count: int) -> None:
        """Free so many pages, or all that nobody uses."""
        for page in self._pool.least_recent_idle(count):
            node = self._nodes.pop(page)
            assert node.parent is not None
            assert not node.children, page
            del node.parent.children[node.key]
            self._pool.evict(page)

    def check(self) -> None:
        """Assert that the tree is one, and that idle pages come behind those they need.

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
        """The pages of all known prefixes."""
        return set(self._nodes)


def _page_keys(tokens: Sequence[int], first: int, last: int) -> Iterator[PageKey]:
    """The tokens of full pages, from the first up to the last, exclusive."""
    for start in range(first * PAGE_TOKENS, last * PAGE_TOKENS, PAGE_TOKENS):
        yield tuple(tokens[start : start + PAGE_TOKENS])
