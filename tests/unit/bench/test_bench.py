"""The benchmarks' own parts: stamps, prepared messages, what the server reads, figures and bounds."""

from __future__ import annotations

from typing import Any

import pytest

from trio_sidecar import wire
from trio_sidecar.wire.codec import decode, encode
from trio_sidecar_bench import gate, hot_path, messages, report, stamps
from trio_sidecar_bench.cli import main
from trio_sidecar_bench.loads import LOADS, QUICK


@pytest.mark.parametrize("start", [0, 12_345_678, (1 << 24) - 40, 987_654_321_000])
def test_stamps_measure_across_the_wrap(start: int) -> None:
    """A token's age is the time since its stamp, to 16 µs, also when the clock's cut-off part has wrapped."""
    token = stamps.stamp(start)
    assert 1 << 20 <= token < 1 << 21  # three bytes on the wire
    assert abs(stamps.age(token, start + 5000) - 5000) <= 16
    assert abs(stamps.between(token, stamps.stamp(start + 7000)) - 7000) <= 16


def _asked(prompt: list[int], **changes: Any) -> messages.Ask:
    request = wire.GenerateRequest(
        request_id="r",
        token_ids=wire.TokenIds(ids=prompt),
        sampling=wire.RandomSampling(seed=20_000 | messages.LOCKSTEP),
        stopping=wire.StoppingCriteria(max_new_tokens=7),
        **changes,
    )
    return messages.read_request(encode(request))


@pytest.mark.parametrize("prompt", [[1], [0, 127, 128, 1 << 31], list(range(100_000))])
def test_server_reads_requests(prompt: list[int]) -> None:
    """The server finds the pace in the seed, and counts the prompt without decoding it."""
    ask = _asked(prompt)
    assert messages.Ask(prompt_tokens=len(prompt), tokens=7, interval_us=20_000, lockstep=True, candidates=None) == ask


def test_server_reads_logprobs() -> None:
    """A request for logprobs is told from one without."""
    top = wire.CandidateTokens(top_n=5)
    assert _asked([1], response=wire.ResponseOptions(output_logprobs=True, output_candidates=top)).candidates == 5


@pytest.mark.parametrize("candidates", [None, 5])
def test_messages_are_answers(candidates: int | None) -> None:
    """What the server sends are answers that a worker takes: prompt, token, end."""
    first, token, last = (
        decode(wire.GenerateResponse, data[5:])
        for data in (
            messages.first_message(3),
            messages.token_message(1_000_000, candidates),
            messages.last_message(1_000_000, candidates, 9),
        )
    )
    assert first.prompt_info is not None
    assert first.prompt_info.num_prompt_tokens == 3
    assert token.outputs is not None
    assert [stamps.stamp(1_000_000)] == token.outputs.token_ids
    assert (0 if candidates is None else 1) == len(token.outputs.candidate_tokens)
    assert last.outputs is not None
    assert last.outputs.finish_info is not None
    assert last.outputs.finish_info.num_output_tokens == 9


def _figures(cpu: float, server: float = 0.1) -> dict[str, Any]:
    times = {"p50": 1500, "p99": 3000}
    return {
        "tokens": 1000,
        "chunks": 500,
        "ended": 10,
        "errors": 0,
        "seconds": 2.0,
        "cpu": {"worker": cpu, "server": server, "loadgen": 0.2},
        "ttft_us": times,
        "delay_us": times,
        "gap_added_us": {},
        "rss_kib": 2048,
    }


def test_table_shows_medians_and_ratios() -> None:
    """A load's table has the median of the rounds and the median ratio round by round."""
    rounds = {
        "ours": [_figures(0.1), _figures(0.2), _figures(0.3)],
        "rust": [_figures(0.1), _figures(0.1), _figures(0.1)],
    }
    table = report.load_tables({"64x50": rounds})
    ours = next(line.split() for line in table.splitlines() if line.startswith("ours"))
    head = next(line for line in table.splitlines() if line.startswith("64x50"))
    assert "3200 tokens/s offered" in table
    assert "CPU/rust" in head
    assert "200" == ours[2]  # µs per token
    assert "2" == ours[-1]


def test_busy_server_is_told() -> None:
    """A server that takes half a core makes the figures suspect, and the report says so."""
    assert "never the bottleneck" in report.server_line({"flood": {"ours": [_figures(1.0, 0.4)]}})
    assert "BUSY" in report.server_line({"flood": {"ours": [_figures(1.0, 1.2)]}})


def test_quick_loads_exist() -> None:
    """The short run and the gate name loads and paths that there are."""
    assert set(QUICK) <= set(LOADS)
    assert {bound.load for bound in gate.BOUNDS} <= set(LOADS)
    assert {bound.path for bound in gate.BOUNDS} <= set(hot_path.PATHS)


def test_unknown_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown load is refused with a message that lists what there is."""
    with pytest.raises(SystemExit) as ended:
        main(["--loads", "storm"])
    assert ended.value.code == 2
    assert "load 'storm' is unknown; there are flood" in capsys.readouterr().err
