"""What each disaggregation mode does to a request (spec 7.10), as data."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import attrs

from trio_sidecar.config import DisaggregationMode

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["RULES", "ModeRules", "RankSource"]


class RankSource(enum.Enum):
    """Which routing fields give the data-parallel rank, first match wins."""

    DECODE = ("dp_rank",)
    PREFILL = ("prefill_dp_rank", "dp_rank")
    NONE = ()


@attrs.frozen(kw_only=True)
class ModeRules:
    """One column of the mode table.

    Attributes:
        supported: Whether this release converts requests of the mode at all.
        generates: Whether output tokens are the point; the others ask for exactly one and deliver none.
        zero_disables: Whether a top_k of -1 or 0 and a min_p of 0.0 pass; otherwise they are refused, because the
            protocol cannot tell "disabled" from "default" (R7.4, R7.5).
        envelope_whitelist: Whether unknown sampling keys of a legacy envelope are refused (R7.70 to R7.72).
        rank_source: Where the data-parallel rank comes from (R7.37).
    """

    supported: bool = False
    generates: bool
    zero_disables: bool
    envelope_whitelist: bool
    rank_source: RankSource


RULES: Mapping[DisaggregationMode, ModeRules] = {
    DisaggregationMode.AGGREGATED: ModeRules(
        supported=True,
        generates=True,
        zero_disables=False,
        envelope_whitelist=True,
        rank_source=RankSource.DECODE,
    ),
    DisaggregationMode.PREFILL: ModeRules(
        generates=False, zero_disables=True, envelope_whitelist=False, rank_source=RankSource.PREFILL
    ),
    DisaggregationMode.DECODE: ModeRules(
        generates=True, zero_disables=False, envelope_whitelist=True, rank_source=RankSource.DECODE
    ),
    DisaggregationMode.ENCODE: ModeRules(
        generates=False, zero_disables=True, envelope_whitelist=False, rank_source=RankSource.NONE
    ),
}
