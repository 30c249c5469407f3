"""Hypothesis strategies for preprocessed requests: one that most workers accept, with at most one flaw.

Types are as Dynamo's ``PreprocessedRequest`` has them: what it could not read would reach no worker at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from support.samples import HANDOFF, KWARGS, OTHER_KWARGS, minimal_request
from trio_sidecar.convert.features import content_hash, routing_hash

if TYPE_CHECKING:
    from collections.abc import Callable

Json = dict[str, Any]

UINT32 = st.integers(0, 2**32 - 1)
FLOAT32 = st.floats(-1e6, 1e6, width=32).filter(lambda value: value == 0 or abs(value) > 1e-6)
TEXT = st.text(max_size=12)
NAME = st.text("abcxyz-_.:0", min_size=1, max_size=8)
COUNT = st.sampled_from([0, 1, 2, 5, 2**31 - 1, 2**32 - 1])
NUMBER = st.one_of(
    st.integers(-(2**53), 2**53),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from([0.0, -0.0, 5600.0, 1e300, 2.5, 2**53, -(2**53)]),
)
SCALAR = st.one_of(st.none(), st.booleans(), NUMBER, TEXT)
JSON = st.recursive(
    SCALAR, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAME, inner, max_size=3), max_leaves=6
)
JSON_OBJECT = st.dictionaries(NAME, JSON, max_size=4)
IMAGE = st.sampled_from(["data:image/png;base64,AAAA", "https://example.com/b.png", "http://h/c", "data:,x"])


def often(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Absent as often as not."""
    return st.none() | values


def some(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Json]:
    """An object with any of the members."""
    return st.fixed_dictionaries({}, optional=fields)


SAMPLING = some(
    n=st.just(1),
    best_of=st.just(1),
    presence_penalty=FLOAT32,
    frequency_penalty=FLOAT32,
    repetition_penalty=FLOAT32,
    temperature=FLOAT32,
    top_p=FLOAT32,
    top_k=st.integers(1, 2**31 - 1),
    min_p=FLOAT32.filter(bool),
    use_beam_search=st.just(False),
    length_penalty=st.just(1.0),
    seed=st.integers(-(2**63), 2**63 - 1),
    include_stop_str_in_output=st.booleans(),
    guided_decoding=st.one_of(
        st.just({}),
        st.builds(lambda value: {"json": value}, JSON_OBJECT | st.just({"type": "object", "a": [1, 2.5, None]})),
        st.builds(lambda text: {"regex": text}, TEXT),
        st.builds(lambda text: {"grammar": text}, TEXT),
        st.builds(lambda texts: {"choice": texts}, st.lists(TEXT, max_size=3)),
        st.builds(lambda value: {"structural_tag": value}, TEXT | JSON_OBJECT),
    ),
)
STOP = some(
    max_tokens=UINT32,
    min_tokens=UINT32,
    stop=st.lists(TEXT, max_size=3),
    stop_token_ids=st.lists(st.integers(0, 50) | UINT32, max_size=4),
    stop_token_ids_hidden=st.lists(st.integers(0, 50) | UINT32, max_size=4),
    stop_token_ids_visible=st.just([]),
    ignore_eos=st.booleans(),
)
OUTPUT = some(logprobs=COUNT, prompt_logprobs=COUNT, skip_special_tokens=st.booleans())
ROUTING = some(
    dp_rank=st.integers(0, 9) | UINT32,
    prefill_dp_rank=st.integers(0, 9) | UINT32,
    priority=st.integers(-(2**31), 2**31 - 1),
    cache_salt=st.sampled_from(["", "a", "dynamo-cache-salt:a"]) | TEXT,
    lora_name=st.sampled_from(["", "served-model", "model-alias", "adapter-a"]),
)
LEGACY_SAMPLING = some(
    temperature=often(FLOAT32),
    top_p=often(FLOAT32),
    top_k=often(st.integers(1, 100)),
    min_p=often(FLOAT32.filter(bool)),
    seed=often(st.integers(-(2**63), 2**63 - 1)),
    presence_penalty=often(FLOAT32),
    frequency_penalty=often(FLOAT32),
    repetition_penalty=often(FLOAT32),
    max_tokens=often(UINT32),
    min_tokens=often(UINT32),
    stop_token_ids=often(st.lists(UINT32, max_size=3)),
    ignore_eos=often(st.booleans()),
    logprobs=often(COUNT | st.just(-1)),
    prompt_logprobs=often(COUNT | st.just(-1)),
    skip_special_tokens=often(st.booleans()),
    skip_reading_prefix_cache=often(st.booleans()),
    return_token_ids=often(st.just(True)),
)
ENVELOPE = st.fixed_dictionaries(
    {"sampling_params": LEGACY_SAMPLING},
    optional={
        "request_id": TEXT,
        "model": TEXT,
        "stream": st.booleans(),
        "stream_options": JSON_OBJECT,
        "cache_salt": TEXT,
        "priority": st.integers(-5, 5),
        "kv_transfer_params": st.none() | JSON_OBJECT,
        "token_offsets": st.none(),
        "ec_transfer_params": st.none(),
    },
)
EXTRA = some(
    bypass_prefix_cache=st.booleans(),
    skip_reading_prefix_cache=st.booleans(),
    kv_transfer_params=JSON_OBJECT,
    nvext=some(token_in=st.just(True), extra_fields=st.lists(st.sampled_from(["worker_id", "timing"]), max_size=2)),
    vllm_tito=ENVELOPE,
)
HANDOFFS = st.builds(
    lambda base, more, port: {**base, **more, **port},
    st.sampled_from([{}, HANDOFF]),
    JSON_OBJECT,
    some(remote_port=st.one_of(st.integers(0, 65535), st.sampled_from([5600.0, "5600", 5600.5, -1, None, 2**53]))),
)


@st.composite
def raw_media(draw: st.DrawFn) -> Json:
    """The fields that bring raw media, with identities or the router's hashes at times."""
    images = draw(st.lists(IMAGE, min_size=1, max_size=3))
    fields: Json = {"multi_modal_data": {"image_url": [{"Url": url} for url in images]}}
    if draw(st.booleans()):
        fields["multi_modal_data"]["video_url"] = [{"Url": "https://example.com/v.mp4"}]
    identities = st.none() | st.just("") | NAME.filter(lambda name: name.strip("."))
    kind = draw(st.sampled_from(["none", "uuids", "hashes"]))
    if kind == "uuids":
        uuids = draw(st.lists(identities, min_size=len(images), max_size=len(images)))
        fields["multi_modal_uuids"] = {"image_url": uuids}
    if kind == "hashes":
        hashes = st.text("0123456789abcdef", min_size=1, max_size=70)
        fields["extra_args"] = {"mm_hashes": draw(st.lists(hashes, min_size=len(images), max_size=len(images)))}
    return fields


@st.composite
def prepared_media(draw: st.DrawFn, tokens: int) -> Json:
    """The envelope member that brings prepared media, within a prompt of so many tokens."""
    names = draw(st.lists(st.sampled_from(["image", "video", "audio"]), min_size=1, max_size=2, unique=True))
    features: Json = {"mm_hashes": {}, "mm_placeholders": {}, "kwargs_data": {}}
    for name in names:
        count = draw(st.integers(1, 2))
        features["mm_hashes"][name] = draw(st.lists(NAME, min_size=count, max_size=count))
        features["kwargs_data"][name] = [draw(st.sampled_from([KWARGS, OTHER_KWARGS, "gA=="])) for _ in range(count)]
        features["mm_placeholders"][name] = []
        for _ in range(count):
            offset = draw(st.integers(0, tokens - 1))
            length = draw(st.integers(1, tokens - offset))
            place: Json = {"offset": offset, "length": length}
            if draw(st.booleans()):
                place["is_embed"] = draw(st.lists(st.booleans(), min_size=length, max_size=length))
            features["mm_placeholders"][name].append(place)
    return features


@st.composite
def sound_requests(draw: st.DrawFn, role: str) -> Json:
    """A request that a worker in that role accepts."""
    request = minimal_request(
        sampling=draw(SAMPLING), stop=draw(STOP), output=draw(OUTPUT), routing=draw(st.none() | ROUTING)
    )
    request["token_ids"] = draw(st.lists(UINT32, min_size=1, max_size=6))
    if draw(st.booleans()):
        request["extra_args"] = draw(EXTRA)
    extra = request.get("extra_args") or {}
    media = draw(st.sampled_from(["none", "none", "raw", "prepared"])) if role != "encode" else "raw"
    if media == "raw":
        fields = draw(raw_media())
        extra = {**extra, **fields.pop("extra_args", {})}
        request.update(fields)
    if media == "prepared":
        envelope = extra.get("vllm_tito") or {"sampling_params": {}}
        extra = {**extra, "vllm_tito": {**envelope, "features": draw(prepared_media(len(request["token_ids"])))}}
    if extra:
        request["extra_args"] = extra
    if role == "decode":
        request["prefill_result"] = {"disaggregated_params": draw(HANDOFFS)}
    if role != "encode" and draw(st.booleans()):
        request["encoder_result"] = draw(JSON_OBJECT)
    return request


def member(section: str, key: str, values: st.SearchStrategy[Any]) -> st.SearchStrategy[Callable[[Json], None]]:
    """A flaw: another value in a place; the section is a dotted path, empty for the top."""

    def flaw(value: Any) -> Callable[[Json], None]:
        def apply(request: Json) -> None:
            target = request
            for name in filter(None, section.split(".")):
                if not isinstance(target.get(name), dict):
                    target[name] = {"sampling_params": {}} if name == "vllm_tito" else {}
                target = target[name]
            target[key] = value

        return apply

    return values.map(flaw)


LEGACY = "extra_args.vllm_tito"
FLAWS = st.one_of(
    member("", "token_ids", st.just([])),
    member("sampling_options", "n", st.integers(0, 3)),
    member("sampling_options", "best_of", st.integers(0, 3)),
    member("sampling_options", "use_beam_search", st.just(True)),
    member("sampling_options", "length_penalty", FLOAT32),
    member("sampling_options", "top_k", st.integers(-3, 0)),
    member("sampling_options", "min_p", st.just(0.0)),
    member(
        "sampling_options",
        "guided_decoding",
        st.sampled_from([{"backend": "xgrammar"}, {"whitespace_pattern": " *"}, {"json": {}, "regex": ".*"}]),
    ),
    member("stop_conditions", "stop_token_ids_visible", st.just([42])),
    member("stop_conditions", "max_thinking_tokens", st.sampled_from([0, 5])),
    member("output_options", "logprobs", st.sampled_from([2**31, 2**32 - 2])),
    member("output_options", "prompt_logprobs", st.sampled_from([2**31, 2**32 - 2])),
    member("", "mm_processor_kwargs", JSON_OBJECT),
    member("", "multi_modal_uuids", st.sampled_from([{"image_url": ["a"]}, {"video_url": ["v"]}, {"audio_url": []}])),
    member("", "encoder_result", JSON_OBJECT),
    member("", "extra_args", JSON),
    member("extra_args", "mm_hashes", JSON),
    member("extra_args", "unknown", SCALAR),
    member("extra_args", "messages", JSON),
    member("extra_args", "bypass_prefix_cache", SCALAR),
    member("extra_args", "skip_reading_prefix_cache", SCALAR),
    member("extra_args", "kv_transfer_params", JSON),
    member("extra_args", "dynamo_mm_routing_hashes", st.lists(NAME, max_size=2) | JSON),
    member("extra_args", "nvext", JSON),
    member("extra_args.nvext", "cache_salt", SCALAR),
    member("extra_args.nvext", "token_in", SCALAR),
    member("extra_args.nvext", "extra_fields", SCALAR | st.lists(st.sampled_from(["worker_id", "engine_data"]))),
    member("extra_args.nvext", "other", SCALAR),
    member("extra_args", "vllm_tito", JSON),
    member(LEGACY, "sampling_params", JSON),
    member(LEGACY, "features", JSON),
    member(LEGACY, "content_parts", SCALAR),
    member(LEGACY, "other", SCALAR),
    member(LEGACY + ".sampling_params", "logit_bias", SCALAR),
    member(LEGACY + ".sampling_params", "return_token_ids", SCALAR),
    member(LEGACY + ".sampling_params", "logprobs", SCALAR | st.sampled_from([-2, 2**32, 1.5])),
    member(LEGACY + ".sampling_params", "max_tokens", SCALAR),
    member(LEGACY + ".sampling_params", "stop_token_ids", JSON),
    member(LEGACY + ".sampling_params", "temperature", SCALAR),
    member(LEGACY + ".sampling_params", "skip_reading_prefix_cache", SCALAR),
    member("prefill_result", "disaggregated_params", JSON),
    member("multi_modal_data", "image_url", st.just([{"Url": "file:///etc/passwd"}])),
    member("multi_modal_data", "audio_url", st.just([{"Url": "https://h/a.wav"}])),
    member("multi_modal_data", "other_url", st.just([{"Url": "https://h/a"}])),
    member("routing", "lora_name", st.just("unknown-adapter")),
)


@st.composite
def requests(draw: st.DrawFn, role: str) -> Json:
    """A sound request, or one with a flaw."""
    request = draw(sound_requests(role))
    if draw(st.integers(0, 2)) == 0:
        draw(FLAWS)(request)
    return request


def marker(payload: bytes, modality: str = "image") -> str:
    """What the router calls a prepared item."""
    return routing_hash(content_hash(modality, payload))
