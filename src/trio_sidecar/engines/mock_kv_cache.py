"""The mock engine's KV cache: which blocks of prompts it holds, by content; no I/O."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["BlocksRemoved", "BlocksStored", "KvCache"]


@attrs.frozen(slots=True, kw_only=True)
class BlocksStored:
    """Blocks that came in, one after another.

    Attributes:
        hashes: One per block.
        parent: The block before the first; None at the beginning of a prompt.
        tokens: The tokens of all of them.
        adapter: The LoRA adapter that they were computed with; empty for none.
    """

    hashes: tuple[int, ...]
    parent: int | None
    tokens: tuple[int, ...]
    adapter: str


@attrs.frozen(slots=True)
class BlocksRemoved:
    """Blocks that had to go."""

    hashes: tuple[int, ...]


class KvCache:
    """Full blocks of prompts, the least recently used of which go first.

    Args:
        block_size: Tokens per block.
        capacity: Most blocks.
    """

    def __init__(self, block_size: int, capacity: int) -> None:
        self._block_size = block_size
        self._capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        """How many blocks there are."""
        return len(self._blocks)

    def use(self, prompt: Sequence[int], adapter: str = "") -> tuple[int, list[BlocksStored | BlocksRemoved]]:
        """Run a prompt.

        Returns:
            How many of its tokens were there, never all of them, because the last one has to be computed for the next
            to come; and what changed.
        """
        hashes = self._hashes(prompt, adapter)
        known = 0
        while known < len(hashes) and hashes[known] in self._blocks:
            known += 1
        # The end of a prompt is of less use to others than its beginning: it is to go first.
        for each in reversed(hashes):
            self._blocks[each] = None
            self._blocks.move_to_end(each)
        changes: list[BlocksStored | BlocksRemoved] = []
        removed: list[int] = []
        while len(self._blocks) > self._capacity:
            removed.append(self._blocks.popitem(last=False)[0])
        if removed:
            changes.append(BlocksRemoved(tuple(removed)))
        if known < len(hashes):
            first, end = known * self._block_size, len(hashes) * self._block_size
            parent = hashes[known - 1] if known else None
            tokens = tuple(prompt[first:end])
            stored = BlocksStored(hashes=tuple(hashes[known:]), parent=parent, tokens=tokens, adapter=adapter)
            changes.insert(0, stored)
        usable = (len(prompt) - 1) // self._block_size
        return min(known, usable) * self._block_size, changes

    def clear(self) -> bool:
        """Forget everything; whether there was anything."""
        held = bool(self._blocks)
        self._blocks.clear()
        return held

    def _hashes(self, prompt: Sequence[int], adapter: str) -> list[int]:
        """Hashes of the full blocks; each depends on all tokens before, and on the adapter."""
        size = 4 * self._block_size
        parent = adapter.encode()
        hashes = []
        content = array("I", prompt).tobytes()  # at once: a long prompt must not hold the loop up
        for start in range(0, len(content) - size + 1, size):
            digest = hashlib.blake2b(content[start : start + size], key=parent[-64:], digest_size=8).digest()
            parent = digest
            hashes.append(int.from_bytes(digest, "little"))
        return hashes
