"""The envelope ``extra_args.vllm_tito`` that front ends of the 1.4 line send (spec 7.13).

It carries sampling parameters in vLLM's own shape. A typed field of the request always wins; the envelope fills only
what the front end left absent.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from trio_sidecar.convert.fields import MAX_UINT32, Section, describe
from trio_sidecar.errors import InvalidRequest

__all__ = ["ENVELOPE", "FEATURES", "Envelope", "check_members", "check_sampling_keys", "hydrate", "read_envelope"]

ENVELOPE = "vllm_tito"
FEATURES = "features"

_ALLOWED_MEMBERS = frozenset(
    {
        "request_id",
        "sampling_params",
        "model",
        "stream",
        "stream_options",
        "cache_salt",
        "priority",
        "kv_transfer_params",
        FEATURES,
    }
)
_NULL_MEMBERS = frozenset(
    {"assistant_tokens_mask", "token_offsets", "content_parts", "return_token_ids", "ec_transfer_params"}
)

_SAMPLING = {
    "temperature": Section.float32,
    "top_p": Section.float32,
    "top_k": Section.int32,
    "min_p": Section.float32,
    "seed": Section.int64,
    "presence_penalty": Section.float32,
    "frequency_penalty": Section.float32,
    "repetition_penalty": Section.float32,
}
_STOP = {"max_tokens": Section.uint32, "min_tokens": Section.uint32, "ignore_eos": Section.flag}
_OUTPUT_COUNTS = ("logprobs", "prompt_logprobs")

_BYPASS = "skip_reading_prefix_cache"
_RETURN_IDS = "return_token_ids"
_ALLOWED_SAMPLING = frozenset(
    {*_SAMPLING, *_STOP, *_OUTPUT_COUNTS, "stop_token_ids", "skip_special_tokens", _BYPASS, _RETURN_IDS}
)


@attrs.frozen
class Envelope:
    """A legacy envelope whose shape has been checked.

    Attributes:
        members: The whole envelope.
        sampling: Its sampling parameters.
    """

    members: Section
    sampling: Section

    @property
    def bypass_prefix_cache(self) -> bool | None:
        """Whether it asks to skip reading the prefix cache (R7.69)."""
        return self.sampling.flag(_BYPASS)

    @property
    def kv_transfer_params(self) -> object:
        """Its handoff payload, None if it has none (R7.68)."""
        return self.members.get("kv_transfer_params")

    @property
    def features(self) -> object:
        """Its prepared media, None if it has none (spec 7.12)."""
        return self.members.get(FEATURES)


def read_envelope(extra_args: object) -> Envelope | None:
    """The envelope in ``extra_args``, None if there is none (R7.61)."""
    if not isinstance(extra_args, Mapping) or ENVELOPE not in extra_args:
        return None
    raw = extra_args[ENVELOPE]
    path = f"extra_args.{ENVELOPE}"
    if not isinstance(raw, Mapping):
        reason = f"{path} must be a JSON object, got {describe(raw)}"
        raise InvalidRequest(reason)
    members = Section(raw, path)
    if members.get("sampling_params") is None:
        reason = f"{path}.sampling_params is required"
        raise InvalidRequest(reason)
    return Envelope(members, members.section("sampling_params"))


def hydrate(envelope: Envelope, stop: Section, sampling: Section, output: Section) -> tuple[Section, Section, Section]:
    """The three typed sections, with absent fields filled from the envelope (R7.64 to R7.67)."""
    source = envelope.sampling
    sampling_fill = {key: read(source, key) for key, read in _SAMPLING.items() if sampling.get(key) is None}
    stop_fill: dict[str, object] = {key: read(source, key) for key, read in _STOP.items() if stop.get(key) is None}
    if stop.get("stop_token_ids") is None and stop.get("stop_token_ids_hidden") is None:
        stop_fill["stop_token_ids"] = source.uint32s("stop_token_ids")
    output_fill: dict[str, object] = {
        key: _logprob_count(source, key) for key in _OUTPUT_COUNTS if output.get(key) is None
    }
    if output.get("skip_special_tokens") is None:
        output_fill["skip_special_tokens"] = source.flag("skip_special_tokens")
    return (
        Section({**stop.values, **stop_fill}, stop.path),
        Section({**sampling.values, **sampling_fill}, sampling.path),
        Section({**output.values, **output_fill}, output.path),
    )


def _logprob_count(source: Section, key: str) -> int | None:
    value = source.get(key)
    if value is None:
        return None
    if type(value) is not int or value < -1:
        raise source.refuse(key, f"-1 for all, or an integer from 0 to {MAX_UINT32}")
    if value > MAX_UINT32:
        reason = f"{source.name(key)} exceeds u32: at most {MAX_UINT32}, got {describe(value)}"
        raise InvalidRequest(reason)
    return MAX_UINT32 if value == -1 else value


def check_sampling_keys(envelope: Envelope) -> None:
    """Refuse sampling keys that would be lost (R7.70, R7.71); null counts as absent."""
    source = envelope.sampling
    if source.flag(_RETURN_IDS) is False:
        reason = f"{source.name(_RETURN_IDS)} must be true, got false"
        raise InvalidRequest(reason)
    for key, value in source.values.items():
        if key not in _ALLOWED_SAMPLING and value is not None:
            reason = f"{source.name(key)} is not supported; allowed are {_listing(_ALLOWED_SAMPLING)}"
            raise InvalidRequest(reason)


def check_members(envelope: Envelope) -> None:
    """Refuse members that are unknown, or that may only be null (R7.62)."""
    for key, value in envelope.members.values.items():
        if key in _NULL_MEMBERS:
            if value is not None:
                raise envelope.members.refuse(key, "null")
        elif key not in _ALLOWED_MEMBERS:
            name = envelope.members.name(key)
            reason = f"{name} is not supported; allowed are {_listing(_ALLOWED_MEMBERS)}"
            raise InvalidRequest(reason)


def _listing(names: frozenset[str]) -> str:
    return ", ".join(sorted(names))
