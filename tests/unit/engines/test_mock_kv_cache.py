"""The mock engine's KV cache: what it holds, what it shares, what goes first."""

from __future__ import annotations

import pytest

from trio_sidecar.engines.mock_kv_cache import BlocksRemoved, BlocksStored, KvCache

PROMPT = list(range(100, 110))


def test_a_prompt_is_stored_in_full_blocks() -> None:
    """Tokens that fill no block are not stored; the same prompt again changes nothing and is cached."""
    cache = KvCache(4, 10)
    cached, (stored,) = cache.use(PROMPT)
    assert isinstance(stored, BlocksStored)
    assert (0, 2, None, tuple(PROMPT[:8]), "") == (
        cached,
        len(stored.hashes),
        stored.parent,
        stored.tokens,
        stored.adapter,
    )
    assert (8, []) == cache.use(PROMPT)
    assert 2 == len(cache)


def test_a_longer_prompt_builds_on_what_is_there() -> None:
    """Only the new blocks are stored, and they name the block before them."""
    cache = KvCache(4, 10)
    _, (first,) = cache.use(PROMPT[:4])
    cached, (second,) = cache.use(PROMPT)
    assert isinstance(first, BlocksStored)
    assert isinstance(second, BlocksStored)
    assert (4, first.hashes[-1], tuple(PROMPT[4:8])) == (cached, second.parent, second.tokens)


def test_the_last_token_is_always_computed() -> None:
    """A prompt of whole blocks is never cached completely, since its last token has to be run for the next one."""
    cache = KvCache(4, 10)
    cache.use(PROMPT[:8])
    assert (4, []) == cache.use(PROMPT[:8])


@pytest.mark.parametrize(("other", "adapter"), [([1, *PROMPT[1:]], ""), (PROMPT, "adapter-a")])
def test_only_the_same_prefix_is_shared(other: list[int], adapter: str) -> None:
    """Another first token changes all blocks, and so does another adapter."""
    cache = KvCache(4, 10)
    cache.use(PROMPT)
    cached, (stored,) = cache.use(other, adapter)
    assert isinstance(stored, BlocksStored)
    assert (0, 2) == (cached, len(stored.hashes))


def test_the_least_recently_used_blocks_go_first() -> None:
    """Beyond the capacity old blocks are removed, the end of a prompt before its beginning."""
    cache = KvCache(4, 3)
    _, (old,) = cache.use(PROMPT[:8])
    assert isinstance(old, BlocksStored)
    _, (_, removed) = cache.use([7] * 8)
    assert BlocksRemoved((old.hashes[1],)) == removed
    assert 4 == cache.use(PROMPT[:8])[0]


def test_a_cleared_cache_holds_nothing() -> None:
    """Clearing says whether there was anything to clear."""
    cache = KvCache(4, 3)
    assert not cache.clear()
    cache.use(PROMPT)
    assert cache.clear()
    assert (0, 0) == (len(cache), cache.use(PROMPT)[0])
