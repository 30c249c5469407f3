from __future__ import annotations

import pytest

from trio_sidecar.convert.xxh3 import MAX_BYTES, MIN_BYTES, xxh3_64


@pytest.mark.rule("R7.54")
@pytest.mark.parametrize(
    ("size", "digest"),
    [
        (17, 0xEAB8A05663E5E451),
        (31, 0xD594B7D758EEDFE5),
        (32, 0x714A8D2CEFE994D1),
        (33, 0x8C7DD4127BBD9FB2),
        (48, 0x72B41EA2A25BAD3E),
        (64, 0x895F676D4BCE2E93),
        (65, 0x689FD8C3930F8E4D),
        (72, 0xF11DF25B3D27271F),
        (95, 0x9E47029C86445A00),
        (96, 0xF95FAC39833AA3C8),
    ],
)
def test_known_hashes(size: int, digest: int) -> None:
    """The hash is that of the reference implementation, on each of its ways and at their borders."""
    assert digest == xxh3_64(bytes(number * 37 % 256 for number in range(size)))


@pytest.mark.parametrize("size", [0, MIN_BYTES - 1, MAX_BYTES + 1])
def test_other_sizes_are_refused(size: int) -> None:
    """A size that the algorithm treats otherwise is an error instead of a wrong hash."""
    with pytest.raises(ValueError, match=f"17 to 96 bytes, got {size}"):
        xxh3_64(bytes(size))
