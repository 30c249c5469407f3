"""The 64-bit XXH3 hash, for inputs of the only sizes that this package hashes.

Written from the algorithm's specification (https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md). Dynamo's
router uses XXH3 for its routing identities; one short text per media item does not justify a compiled dependency.
"""

from __future__ import annotations

__all__ = ["MAX_BYTES", "MIN_BYTES", "xxh3_64"]

MIN_BYTES = 17
MAX_BYTES = 96

_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
)
_PRIME_LENGTH = 0x9E3779B185EBCA87
_PRIME_AVALANCHE = 0x165667919E3779F9
_MASK = 2**64 - 1


def xxh3_64(data: bytes) -> int:
    """The hash with seed 0 of ``MIN_BYTES`` to ``MAX_BYTES`` bytes.

    Raises:
        ValueError: The input has another size, for which the algorithm takes another way.
    """
    size = len(data)
    if not MIN_BYTES <= size <= MAX_BYTES:
        reason = f"the hash takes {MIN_BYTES} to {MAX_BYTES} bytes, got {size}"
        raise ValueError(reason)
    total = size * _PRIME_LENGTH
    # Chunks of 16 bytes from both ends towards the middle, where they may overlap.
    for pair in range((size - 1) // 32 + 1):
        total += _mix(data, 16 * pair, 32 * pair) + _mix(data, size - 16 * (pair + 1), 32 * pair + 16)
    total &= _MASK
    total ^= total >> 37
    total = total * _PRIME_AVALANCHE & _MASK
    return total ^ total >> 32


def _mix(data: bytes, at: int, secret_at: int) -> int:
    """Both halves of the 128-bit product of two 8-byte words, each blended with the secret."""
    product = (_word(data, at) ^ _word(_SECRET, secret_at)) * (_word(data, at + 8) ^ _word(_SECRET, secret_at + 8))
    return product & _MASK ^ product >> 64


def _word(source: bytes, at: int) -> int:
    return int.from_bytes(source[at : at + 8], "little")
