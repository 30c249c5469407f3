from __future__ import annotations

import pytest

from trio_sidecar.config import DisaggregationMode
from trio_sidecar.convert.modes import RULES, KvSource, Terminal


@pytest.mark.rule("7.10", "R7.4", "R7.5")
@pytest.mark.parametrize(
    ("mode", "generates", "zero_disables", "envelope_whitelist", "rank"),
    [
        (DisaggregationMode.AGGREGATED, True, False, True, ("dp_rank",)),
        (DisaggregationMode.PREFILL, False, True, False, ("prefill_dp_rank", "dp_rank")),
        (DisaggregationMode.DECODE, True, False, True, ("dp_rank",)),
        (DisaggregationMode.ENCODE, False, True, False, ()),
    ],
    ids=lambda value: getattr(value, "value", None),
)
def test_the_mode_table(
    mode: DisaggregationMode, generates: bool, zero_disables: bool, envelope_whitelist: bool, rank: tuple[str, ...]
) -> None:
    """Every mode has the rules of the specification's table."""
    rules = RULES[mode]
    assert (generates, zero_disables, envelope_whitelist) == (
        rules.generates,
        rules.zero_disables,
        rules.envelope_whitelist,
    )
    assert rank == rules.rank_source.value


@pytest.mark.rule("7.10", "8.8", "8.9", "R7.50")
@pytest.mark.parametrize(
    ("mode", "kv", "encoder_result", "prompt_ids", "media_only", "terminal"),
    [
        (DisaggregationMode.AGGREGATED, KvSource.CALLER, True, False, (), Terminal.ANSWER),
        (DisaggregationMode.PREFILL, KvSource.CALLER_FORCED, True, True, (), Terminal.KV_HANDOFF),
        (DisaggregationMode.DECODE, KvSource.PREFILL_RESULT, True, False, (), Terminal.ANSWER),
        (DisaggregationMode.ENCODE, KvSource.NONE, False, False, ("image", "video"), Terminal.EC_HANDOFF),
    ],
    ids=lambda value: getattr(value, "value", None),
)
def test_the_handoffs_of_the_mode_table(
    mode: DisaggregationMode,
    kv: KvSource,
    encoder_result: bool,
    prompt_ids: bool,
    media_only: tuple[str, ...],
    terminal: Terminal,
) -> None:
    """Every mode takes and makes the payloads of the specification's table."""
    rules = RULES[mode]
    assert (kv, encoder_result, prompt_ids, media_only, terminal) == (
        rules.kv_source,
        rules.takes_encoder_result,
        rules.prompt_ids_with_media,
        rules.media_only,
        rules.terminal,
    )


def test_every_mode_has_rules() -> None:
    """No role is missing from the table."""
    assert set(DisaggregationMode) == set(RULES)
