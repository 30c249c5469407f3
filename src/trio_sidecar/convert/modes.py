"""What each disaggregation mode does to a request and to its answers (spec 7.10, 8.7 to 8.9), as data."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import attrs

from trio_sidecar.config import DisaggregationMode

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["RULES", "KvSource", "ModeRules", "RankSource", "Terminal"]


class RankSource(enum.Enum):
    """Which routing fields give the data-parallel rank, first match wins."""

    DECODE = ("dp_rank",)
    PREFILL = ("prefill_dp_rank", "dp_rank")
    NONE = ()


class KvSource(enum.Enum):
    """Where the KV transfer parameters that the engine gets come from."""

    CALLER = enum.auto()
    """The caller's, as they are."""
    CALLER_FORCED = enum.auto()
    """The caller's, with the order to keep the blocks for a decode worker (R7.31)."""
    PREFILL_RESULT = enum.auto()
    """What the prefill worker handed over; the caller's are ignored (R7.33)."""
    NONE = enum.auto()


class Terminal(enum.Enum):
    """What the engine's terminal has to bring."""

    ANSWER = enum.auto()
    """The end of the text, perhaps with a payload for a connector."""
    KV_HANDOFF = enum.auto()
    """KV transfer parameters for a decode worker (8.8)."""
    EC_HANDOFF = enum.auto()
    """Encoder parameters for a prefill or an aggregated worker, and no token (8.9)."""


@attrs.frozen(kw_only=True)
class ModeRules:
    """One column of the mode table.

    Attributes:
        generates: Whether output tokens are the point; the others ask for exactly one and deliver none.
        kv_source: Where the KV transfer parameters come from.
        takes_encoder_result: Whether an encoder's result may come with the request, and is then sent on.
        prompt_ids_with_media: Whether media make the engine return the expanded prompt.
        rank_source: Where the data-parallel rank comes from (R7.37).
        envelope_whitelist: Whether unknown sampling keys of a legacy envelope are refused (R7.70 to R7.72).
        zero_disables: Whether a top_k of -1 or 0 and a min_p of 0.0 pass; otherwise they are refused, because the
            protocol cannot tell "disabled" from "default" (R7.4, R7.5).
        media_only: Media keys without which a request makes no sense, and beside which no other may come (R7.50);
            empty where media are not needed and any may come.
        terminal: What the engine's terminal has to bring.
    """

    generates: bool
    kv_source: KvSource
    takes_encoder_result: bool = True
    prompt_ids_with_media: bool = False
    rank_source: RankSource
    envelope_whitelist: bool
    zero_disables: bool
    media_only: tuple[str, ...] = ()
    terminal: Terminal = Terminal.ANSWER


RULES: Mapping[DisaggregationMode, ModeRules] = {
    DisaggregationMode.AGGREGATED: ModeRules(
        generates=True,
        kv_source=KvSource.CALLER,
        rank_source=RankSource.DECODE,
        envelope_whitelist=True,
        zero_disables=False,
    ),
    DisaggregationMode.PREFILL: ModeRules(
        generates=False,
        kv_source=KvSource.CALLER_FORCED,
        prompt_ids_with_media=True,
        rank_source=RankSource.PREFILL,
        envelope_whitelist=False,
        zero_disables=True,
        terminal=Terminal.KV_HANDOFF,
    ),
    DisaggregationMode.DECODE: ModeRules(
        generates=True,
        kv_source=KvSource.PREFILL_RESULT,
        rank_source=RankSource.DECODE,
        envelope_whitelist=True,
        zero_disables=False,
    ),
    DisaggregationMode.ENCODE: ModeRules(
        generates=False,
        kv_source=KvSource.NONE,
        takes_encoder_result=False,
        rank_source=RankSource.NONE,
        envelope_whitelist=False,
        zero_disables=True,
        media_only=("image", "video"),
        terminal=Terminal.EC_HANDOFF,
    ),
}
