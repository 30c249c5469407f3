from __future__ import annotations

import pytest

from trio_sidecar.config import DisaggregationMode
from trio_sidecar.convert.modes import RULES


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


def test_every_mode_has_rules() -> None:
    """No role is missing from the table, and aggregated requests are the ones converted so far."""
    assert set(DisaggregationMode) == set(RULES)
    assert [DisaggregationMode.AGGREGATED] == [mode for mode, rules in RULES.items() if rules.supported]
