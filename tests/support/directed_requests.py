"""One request or more for each rule of converting requests (spec 7)."""

from __future__ import annotations

from typing import Any

from support.differential import ADAPTER
from support.directed import GENERATING, TOKENS_ONLY, Directed, case
from support.request_strategies import marker
from support.samples import ENVELOPE_SAMPLING, HANDOFF, IMAGES, KWARGS, OTHER_KWARGS, features

__all__ = ["REQUESTS"]

UINT32_MAX = 2**32 - 1
PRIVATE = "_dynamo_sidecar_multimodal_prompt_token_ids"
KWARGS_MARKER = "0a6e5e38d1e6fe68" + "0" * 48
UNSAFE = ("/tmp/escape", "../escape", "nested/item", "nested\\item", ".", "..", "nul\0item")


def extra(name: str, *rules: str, args: Any, roles: tuple[str, ...] = TOKENS_ONLY, **fields: Any) -> Directed:
    """A request with these ``extra_args``."""
    return case(name, *rules, roles=roles, extra_args=args, **fields)


def legacy(name: str, *rules: str, roles: tuple[str, ...] = TOKENS_ONLY, **members: Any) -> Directed:
    """A request with a legacy envelope of these members."""
    return extra(name, *rules, args={"vllm_tito": {"sampling_params": {}, **members}}, roles=roles)


def hydrating(name: str, *rules: str, **sampling: Any) -> Directed:
    """A request with a legacy envelope of these sampling parameters."""
    return legacy(name, *rules, sampling_params=sampling)


def pictures(name: str, *rules: str, data: Any = None, **fields: Any) -> Directed:
    """A request with raw media, two images unless others are given."""
    media = {"image_url": [{"Url": url} for url in IMAGES]} if data is None else data
    return case(name, *rules, multi_modal_data=media, **fields)


def prepared(name: str, *rules: str, args: dict[str, Any] | None = None, **changes: Any) -> Directed:
    """A request with one prepared image, changed like that."""
    fields = {key: changes.pop(key) for key in ("routing", "multi_modal_data") if key in changes}
    envelope = {"sampling_params": {}, "features": features(**changes)}
    return case(name, *rules, extra_args={"vllm_tito": envelope, **(args or {})}, **fields)


SCALARS = [
    case("nothing", "R7.2", "R7.14", "R7.17"),
    case("every number", "7.2", sampling={"temperature": 0.2, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 123}),
    case("zeros", "7.2", sampling={"temperature": 0.0, "top_p": 0.0, "seed": 0, "presence_penalty": 0.0}),
    case("penalties", "7.2", sampling={"presence_penalty": 0.3, "frequency_penalty": 0.4, "repetition_penalty": 1.1}),
    case("limits", "7.2", stop={"max_tokens": 8, "min_tokens": 2, "ignore_eos": True, "stop": ["done"]}),
    case("zero limits", "7.2", stop={"max_tokens": 0, "min_tokens": 0, "ignore_eos": False, "stop": []}),
    case("stop text stays", "7.2", sampling={"include_stop_str_in_output": True}),
    case("special tokens stay", "R7.1", "7.2", output={"skip_special_tokens": False}),
    case("special tokens go", "7.2", output={"skip_special_tokens": True}),
    case("logprobs 0", "7.2", output={"logprobs": 0, "prompt_logprobs": 0}),
    case("logprobs 2 and 3", "7.2", output={"logprobs": 2, "prompt_logprobs": 3}),
    case("top_k below -1", "R7.3", sampling={"top_k": -2}),
    case("top_k -1", "R7.4", "R7.5", sampling={"top_k": -1}),
    case("top_k 0", "R7.4", "R7.5", sampling={"top_k": 0}),
    case("min_p 0", "R7.4", "R7.5", sampling={"min_p": 0.0}),
    case("largest top_k", "R7.3", sampling={"top_k": 2**31 - 1}),
    case("all logprobs", "R7.6", output={"logprobs": UINT32_MAX, "prompt_logprobs": UINT32_MAX}),
    case("too many logprobs", "R7.7", output={"logprobs": 2**31}),
    case("too many prompt logprobs", "R7.7", output={"prompt_logprobs": UINT32_MAX - 1}),
    case("largest count", "R7.7", output={"logprobs": 2**31 - 1}),
    case("stop ids", "R7.9", stop={"stop_token_ids": [3, 2, 3], "stop_token_ids_hidden": [2, 4]}),
    case("visible stop ids", "R7.10", stop={"stop_token_ids_visible": [42]}),
    case("no visible stop ids", "R7.10", stop={"stop_token_ids_visible": []}),
]

UNSUPPORTED = [
    case("no tokens", "7.5", token_ids=[]),
    case("n 2", "7.5", sampling={"n": 2}),
    case("n 1", "7.5", sampling={"n": 1, "best_of": 1, "use_beam_search": False, "length_penalty": 1.0}),
    case("best_of 2", "7.5", sampling={"best_of": 2}),
    case("beams", "7.5", sampling={"use_beam_search": True}),
    case("length penalty", "7.5", sampling={"length_penalty": 0.5}),
    case("embeddings", "7.5", prompt_embeds="encoded"),
    case("thinking budget", "7.5", stop={"max_thinking_tokens": 0}),
    case("processor options", "7.5", mm_processor_kwargs={}),
    case(
        "bootstrap",
        "7.5",
        bootstrap_info={"bootstrap_host": "127.0.0.1", "bootstrap_port": 1, "bootstrap_room": 1},
    ),
    case("identities without media", "7.5", roles=TOKENS_ONLY, multi_modal_uuids={"image_url": ["image-a"]}),
    case("two faults at once", "R7.11", sampling={"n": 2}, extra_args={"unknown": True}),
    case("a result in encode mode", "7.5", encoder_result={"x": 1}),
]

GUIDES = [
    *(
        case(f"guide {next(iter(guide))}", "7.6", sampling={"guided_decoding": guide})
        for guide in (
            {"json": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}},
            {"regex": "[a-z]+"},
            {"grammar": "root ::= 'yes'"},
            {"choice": ["yes", "no"]},
            {"structural_tag": "<answer>"},
            {"structural_tag": {"tag": "answer"}},
        )
    ),
    case("a backend", "R7.12", sampling={"guided_decoding": {"backend": "xgrammar"}}),
    case("a pattern for blanks", "R7.12", sampling={"guided_decoding": {"whitespace_pattern": " *"}}),
    case("two guides", "R7.13", sampling={"guided_decoding": {"json": {}, "regex": ".*"}}),
    case("an empty guide", "R7.14", sampling={"guided_decoding": {}}),
]

CACHE = [
    case("salt", "R7.15", routing={"cache_salt": "cache-salt"}),
    case("namespace", "R7.15", routing={"cache_namespace": "cache-salt"}),
    case("empty salt", "R7.15", routing={"cache_salt": ""}),
    case("salt that looks prefixed", "R7.16", routing={"cache_salt": "dynamo-cache-salt:caller"}),
    *(
        extra(f"bypass {number}", "7.7", args=args)
        for number, args in enumerate(
            (
                {},
                {"bypass_prefix_cache": True},
                {"bypass_prefix_cache": False},
                {"skip_reading_prefix_cache": True},
                {"bypass_prefix_cache": False, "skip_reading_prefix_cache": True},
                {"bypass_prefix_cache": 0},
                {"bypass_prefix_cache": True, "skip_reading_prefix_cache": "x"},
            )
        )
    ),
    *(
        case(f"priority {priority}", "R7.19", routing={"priority": priority})
        for priority in (-7, 7, 0, -(2**31), 2**31 - 1)
    ),
]

EXTRAS = [
    extra("no object", "R7.21", args=[]),
    extra("unknown member", "R7.22", args={"unknown": True}),
    extra("messages without media", "R7.23", args={"messages": []}),
    pictures("messages with media", "R7.23", extra_args={"messages": [], "formatted_prompt": "x"}),
    extra("salt of another", "R7.24", args={"nvext": {"cache_salt": "other"}}, routing={"cache_salt": "cache-salt"}),
    extra("same salt", "R7.24", args={"nvext": {"cache_salt": "a"}}, routing={"cache_salt": "a"}),
    extra("salt without namespace", "R7.24", args={"nvext": {"cache_salt": "a"}}),
    extra("empty salt", "R7.24", args={"nvext": {"cache_salt": ""}}),
    extra("token_in", "R7.25", args={"nvext": {"token_in": True}}),
    extra("not token_in", "R7.25", args={"nvext": {"token_in": False}}),
    extra("empty nvext", "R7.26", args={"nvext": {}}),
    extra("rest of nvext", "R7.26", args={"nvext": {"other": 1}}),
    extra("nvext no object", "R7.27", args={"nvext": 3}),
    extra("fields of the front end", "R7.28", args={"nvext": {"extra_fields": ["worker_id", "timing"]}}),
    extra("fields of the engine", "R7.28", args={"nvext": {"extra_fields": ["engine_data"]}}),
    extra("fields as text", "R7.29", args={"nvext": {"extra_fields": "worker_id"}}),
    extra("reasoning hints", "R7.30", args={"reasoning_parser_kwargs": {"a": 1}, "reasoning_ended": False}),
]

HANDOFFS = [
    case("prefill wishes", "R7.31", extra_args={"kv_transfer_params": {"do_remote_decode": False}}, roles=TOKENS_ONLY),
    extra("null handoff", "R7.31", "R7.32", args={"kv_transfer_params": None}),
    extra("list handoff", "R7.32", args={"kv_transfer_params": [1]}),
    extra("opaque handoff", "R7.32", args={"kv_transfer_params": {"connector_data": {"values": [1, True, None]}}}),
    case("no prefill result", "R7.33", prefill_result=None, roles=GENERATING),
    case("handoff a list", "R7.33", prefill_result={"disaggregated_params": []}, roles=("decode",)),
    case("handoff a text", "R7.33", prefill_result={"disaggregated_params": "invalid"}, roles=("decode",)),
    case("handoff", "R7.34", prefill_result={"disaggregated_params": HANDOFF}, roles=GENERATING),
    *(
        case(
            f"port {port!r}", "R7.34", prefill_result={"disaggregated_params": {"remote_port": port}}, roles=("decode",)
        )
        for port in (5600, 5600.0, "5600", 5600.5, -1, None, True, 2**53, 1e300)
    ),
    case(
        "handoff with nulls",
        "R7.34",
        prefill_result={"disaggregated_params": {"flags": [True, None, {"ids": [1, 2]}], "none": None}},
        roles=("decode",),
    ),
    pictures("private member", "R7.35", prefill_result={"disaggregated_params": {PRIVATE: [1, 2], "a": 1}}),
    case("private member in text", "R7.35", prefill_result={"disaggregated_params": {PRIVATE: [1]}}, roles=("decode",)),
    case("encoder result", "R7.36", encoder_result={"request_id": "encode-0", "items": [1, None]}, roles=TOKENS_ONLY),
    case("both ranks", "R7.37", "R7.38", routing={"dp_rank": 5, "prefill_dp_rank": 3}),
    case("one rank", "R7.37", "R7.38", routing={"dp_rank": 5}),
    case("forced limits", "7.10", stop={"max_tokens": 100, "min_tokens": 4}),
]

MEDIA = [
    pictures("images", "R7.39", "R7.40", "R7.42"),
    pictures("other kind", "R7.39", data={"other_url": [{"Url": "https://h/x"}]}),
    pictures("empty lists", "R7.39", data={"image_url": [{"Url": "data:,x"}], "video_url": [], "other_url": []}),
    pictures("file", "R7.40", data={"image_url": [{"Url": "file:///etc/passwd"}]}),
    pictures("path", "R7.40", data={"image_url": [{"RawUrl": "/etc/passwd"}]}),
    pictures("identity only", "R7.41", data={"image_url": [{"UuidOnly": "a"}]}),
    pictures("too few identities", "R7.43", multi_modal_uuids={"image_url": ["a"]}),
    pictures(
        "a video's identity",
        "R7.44",
        data={"video_url": [{"Url": "https://h/v"}]},
        multi_modal_uuids={"video_url": ["v"]},
    ),
    pictures(
        "a video's null", "R7.44", data={"video_url": [{"Url": "https://h/v"}]}, multi_modal_uuids={"video_url": [None]}
    ),
    *(pictures(f"unsafe {uuid!r}", "R7.45", multi_modal_uuids={"image_url": [uuid, None]}) for uuid in UNSAFE),
    pictures("hashes", "R7.46", extra_args={"mm_hashes": ["0123456789abcdef", "f" * 70]}),
    pictures(
        "hashes and nulls", "R7.46", extra_args={"mm_hashes": ["a", "b"]}, multi_modal_uuids={"image_url": [None, None]}
    ),
    pictures(
        "hashes and an empty identity",
        "R7.46",
        extra_args={"mm_hashes": ["a", "b"]},
        multi_modal_uuids={"image_url": [None, ""]},
    ),
    pictures(
        "identities of no images",
        "R7.43",
        data={"video_url": [{"Url": "https://h/v"}]},
        multi_modal_uuids={"image_url": ["a"]},
    ),
    pictures("hashes no list", "R7.47", extra_args={"mm_hashes": "a"}),
    pictures("empty hash", "R7.47", extra_args={"mm_hashes": ["a", ""]}),
    pictures("too few hashes", "R7.47", extra_args={"mm_hashes": ["a"]}),
    pictures("no hashes", "R7.47", extra_args={"mm_hashes": []}),
    pictures(
        "one identity",
        "R7.48",
        extra_args={"mm_hashes": ["a", "b"]},
        multi_modal_uuids={"image_url": ["image-a", None]},
    ),
    case("no media", "R7.50"),
    pictures("audio", "R7.50", data={"audio_url": [{"Url": "https://h/a.wav"}]}),
    pictures("video", "R7.50", data={"video_url": [{"Url": "https://h/v.mp4"}]}),
    pictures("image and audio", "R7.50", data={"image_url": [{"Url": "data:,x"}], "audio_url": [{"Url": "data:,y"}]}),
    pictures("image and video", "R7.50", data={"image_url": [{"Url": "data:,x"}], "video_url": [{"Url": "data:,y"}]}),
]

FEATURES = [
    prepared("prepared", "R7.51", "R7.52", "R7.53"),
    prepared("low bit", "R7.52", kwargs_data={"image": [OTHER_KWARGS]}),
    prepared("scoped by a base name", "R7.53", "R7.60", routing={"lora_name": "served-model"}),
    prepared("marker", "R7.54", args={"dynamo_mm_routing_hashes": [KWARGS_MARKER]}),
    prepared("wrong marker", "R7.54", args={"dynamo_mm_routing_hashes": [marker(b"other")]}),
    extra("markers without media", "R7.55", args={"dynamo_mm_routing_hashes": ["a"]}),
    prepared("too many markers", "R7.55", args={"dynamo_mm_routing_hashes": [KWARGS_MARKER] * 2}),
    prepared("raw and prepared", "R7.56", multi_modal_data={"image_url": [{"Url": "data:,x"}]}),
    prepared(
        "mask", "R7.57", mm_placeholders={"image": [{"offset": 0, "length": 3, "is_embed": [False, True, False]}]}
    ),
    prepared("short mask", "R7.57", mm_placeholders={"image": [{"offset": 0, "length": 3, "is_embed": [True]}]}),
    prepared("no hashes", "7.12", mm_hashes={}),
    prepared("other modalities", "7.12", mm_placeholders={"video": [{"offset": 0, "length": 1}]}),
    prepared(
        "depth",
        "7.12",
        mm_hashes={"depth": ["h"]},
        mm_placeholders={"depth": [{"offset": 0, "length": 1}]},
        kwargs_data={"depth": [KWARGS]},
    ),
    prepared("two hashes", "7.12", mm_hashes={"image": ["a", "b"]}),
    prepared("empty hash", "7.12", mm_hashes={"image": [""]}),
    prepared("empty place", "7.12", mm_placeholders={"image": [{"offset": 0, "length": 0}]}),
    prepared("overflow", "7.12", mm_placeholders={"image": [{"offset": 2**64 - 1, "length": 2}]}),
    prepared("beyond the prompt", "7.12", mm_placeholders={"image": [{"offset": 2, "length": 2}]}),
    prepared("empty payload", "7.12", kwargs_data={"image": [""]}),
    prepared("stray bits", "7.12", kwargs_data={"image": ["gB=="]}),
    prepared("no padding", "7.12", kwargs_data={"image": ["gA"]}),
    prepared("too large", "R7.58", kwargs_data={"image": ["A" * 22369632]}),
    prepared(
        "three kinds",
        "R7.59",
        mm_hashes={name: ["h"] for name in ("video", "image", "audio")},
        mm_placeholders={name: [{"offset": 0, "length": 1}] for name in ("video", "image", "audio")},
        kwargs_data={name: [KWARGS] for name in ("video", "image", "audio")},
    ),
    prepared("missing member", "7.12", kwargs_data=None),
    prepared("unknown member", "7.12", other={}),
    prepared("metadata", "7.12", mm_metadata={"a": 1}),
]

LEGACY = [
    extra("envelope no object", "R7.61", args={"vllm_tito": 1}),
    extra("no sampling", "R7.61", args={"vllm_tito": {}}),
    legacy("sampling no object", "R7.61", sampling_params=[]),
    legacy("unknown member", "R7.62", other=1),
    legacy("null members", "R7.62", token_offsets=None, content_parts=None, return_token_ids=None),
    legacy("no null", "R7.62", content_parts=[]),
    legacy(
        "ignored members",
        "R7.63",
        request_id="x",
        model="y",
        stream=True,
        stream_options={},
        cache_salt="z",
        priority=3,
    ),
    hydrating("everything", "R7.64", **ENVELOPE_SAMPLING),
    hydrating("nulls", "R7.64", **dict.fromkeys(ENVELOPE_SAMPLING)),
    extra(
        "typed values win",
        "R7.64",
        args={"vllm_tito": {"sampling_params": ENVELOPE_SAMPLING}},
        sampling={"temperature": 0.4},
        stop={"stop_token_ids": [7]},
    ),
    extra(
        "hidden stop ids win",
        "R7.65",
        args={"vllm_tito": {"sampling_params": ENVELOPE_SAMPLING}},
        stop={"stop_token_ids_hidden": [7]},
    ),
    *(hydrating(f"logprobs {count!r}", "R7.66", logprobs=count) for count in (-1, 0, 2**32, -2, 1.5, "2")),
    hydrating("wrong type", "R7.67", max_tokens="8"),
    hydrating("huge number", "R7.67", temperature=1e300),
    legacy("handoff", "R7.68", kv_transfer_params={"from": "legacy"}),
    legacy("null handoff", "R7.64", "R7.68", kv_transfer_params=None),
    extra(
        "two handoffs",
        "R7.68",
        args={
            "kv_transfer_params": {"from": "canonical"},
            "vllm_tito": {"sampling_params": {}, "kv_transfer_params": {"from": "legacy"}},
        },
    ),
    hydrating("skip the cache", "R7.69", skip_reading_prefix_cache=True),
    extra(
        "bypass wins",
        "R7.69",
        args={
            "bypass_prefix_cache": False,
            "vllm_tito": {"sampling_params": {"skip_reading_prefix_cache": True}},
        },
    ),
    *(hydrating(f"return ids {value}", "R7.70", return_token_ids=value) for value in (True, False, None)),
    hydrating("logit bias", "R7.71", "R7.72", logit_bias={"42": 1.0}),
    hydrating("null logit bias", "R7.71", logit_bias=None),
    hydrating("prefill ignores", "R7.72", skip_special_tokens=False, max_tokens=100),
    hydrating(
        "compatibility",
        "R7.73",
        max_tokens=8,
        min_tokens=2,
        ignore_eos=True,
        logprobs=2,
        prompt_logprobs=3,
        skip_special_tokens=False,
        return_token_ids=True,
    ),
]

LORA = [
    case("base names", "R7.76", routing={"lora_name": "served-model"}),
    case("alias", "R7.76", routing={"lora_name": "model-alias"}),
    case("no adapter", "R7.75", routing={"lora_name": ""}),
    case("adapter", "R7.75", routing={"lora_name": ADAPTER}),
    prepared("scoped by an adapter", "R7.53", routing={"lora_name": ADAPTER}),
    prepared(
        "marker and adapter",
        "R7.54",
        routing={"lora_name": ADAPTER},
        args={"dynamo_mm_routing_hashes": [KWARGS_MARKER]},
    ),
    case("unknown adapter", "R7.77", routing={"lora_name": "unknown-adapter"}),
]

REQUESTS = [
    *SCALARS,
    *UNSUPPORTED,
    *GUIDES,
    *CACHE,
    *EXTRAS,
    *HANDOFFS,
    *MEDIA,
    *FEATURES,
    *LEGACY,
    *LORA,
]
