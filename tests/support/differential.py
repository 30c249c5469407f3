"""The same request to our worker and to the Rust sidecar, each before a recorder of its own, and what came of it."""

from __future__ import annotations

import enum
import itertools
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import attrs
from google.protobuf import unknown_fields

from support import peers, tiny_model
from support.ingress import NO_END, Answer, Ingress, ingress
from support.recorder import Recorder, Reply, Seen, recording
from trio_sidecar import wire

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.processes import Child
    from trio_sidecar.config import DisaggregationMode

COMPONENTS = {"agg": "backend", "prefill": "prefill", "decode": "backend", "encode": "encode"}
MODEL, ALIAS, ADAPTER = "served-model", "model-alias", "adapter-a"
OF_THE_HANDOFF = ("request_id", "model", "token_ids", "lora_name", "kv", "priority")
BARE = "temperature: 1 sampling { num_sequences: 1 } decoding { } stopping { max_new_tokens: 1 } "
BARE += "response { output_text: true output_token_ids: true }"
"""All else that an engine is told when it is to fetch a handoff and no more."""

ABSENT = "absent"
TAKEN = "taken"


class Side(enum.Enum):
    """Which worker."""

    OURS = "ours"
    RUST = "rust"


@attrs.frozen(slots=True)
class Case:
    """One comparison.

    Attributes:
        request: What Dynamo's preprocessor would send.
        reply: What the engine answers, if it is asked.
    """

    request: dict[str, Any]
    reply: Reply


@attrs.frozen(slots=True)
class Observed:
    """What one worker made of a case.

    Attributes:
        seen: The requests that its engine got.
        answer: What its client got.
    """

    seen: list[Seen]
    answer: Answer


@attrs.frozen(slots=True)
class Difference:
    """One value that is not the same.

    Attributes:
        path: Where it is, such as ``request.sampling.top_k`` or ``chunks[0].text``.
        ours: Ours, as text; "absent" if it is not there.
        rust: The Rust sidecar's.
    """

    path: str
    ours: str
    rust: str


class Pair:
    """Both workers in one role."""

    def __init__(self, mode: DisaggregationMode, recorders: dict[Side, Recorder], clients: dict[Side, Ingress]) -> None:
        self.mode = mode
        self._recorders = recorders
        self._clients = clients
        self._numbers = itertools.count()

    def observe(self, case: Case) -> dict[Side, Observed]:
        """Put the case to both; the request id is the same on both sides."""
        request_id = f"case-{next(self._numbers)}"
        for side in Side:
            self._recorders[side].replies[request_id] = case.reply
            self._clients[side].send(request_id, case.request)
        observed: dict[Side, Observed] = {}
        for side in Side:
            answered, answer = self._clients[side].receive()
            assert request_id == answered
            assert answer.error is None or NO_END not in answer.error, f"{side.value}: {answer.error}"
            seen = self._recorders[side].taken(request_id)
            observed[side] = Observed([] if _only_fetched(answer, seen) else seen, answer)
            del self._recorders[side].replies[request_id]
        return observed


def model_answers(model: Path) -> dict[str, bytes]:
    """What the engine says about itself."""
    parallelism = wire.ParallelismInfo(
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        data_parallel_size=1,
        decode_context_parallel_size=1,
        world_size=1,
    )
    answers = {
        "GetModelInfo": wire.ModelInfo(
            model_id=str(model),
            served_model_name=MODEL,
            served_model_aliases=[ALIAS],
            supports_text_input=True,
            supports_token_ids_input=True,
            supports_lora=True,
            supports_multimodal=True,
        ),
        "GetServerInfo": wire.ServerInfo(
            engine_version="test-vllm",
            api_version="vllm",
            instance_id="test-instance",
            parallelism=parallelism,
            max_model_len=8192,
            kv_block_size=16,
            total_kv_blocks=4096,
            max_running_requests=128,
            max_batched_tokens=2048,
            max_loras=4,
        ),
        "GetKvEventSources": wire.GetKvEventSourcesResponse(),
        "ListLoras": wire.ListLorasResponse(
            adapters=[wire.LoraAdapter(lora_id=1, lora_name=ADAPTER, source_path="/adapters/a")]
        ),
        "Abort": wire.AbortResponse(),
    }
    return {name: bytes(answer) for name, answer in answers.items()}


@contextmanager
def pair(mode: DisaggregationMode, directory: Path) -> Iterator[Pair]:
    """Start both workers in a role; ready once both answer."""
    tiny_model.make_model_directory(directory / "model", context_length=1024)
    recorders: dict[Side, Recorder] = {}
    clients: dict[Side, Ingress] = {}
    workers: dict[Side, Child] = {}
    arguments = ["--disaggregation-mode", mode.value, "--grpc-connections", "1"]
    starts = {
        Side.OURS: (peers.start_worker, [*arguments, "--coalesce", "off"]),
        Side.RUST: (peers.start_rust_sidecar, arguments),
    }
    with ExitStack() as cleanup:
        for side, (start, flags) in starts.items():
            recorders[side] = cleanup.enter_context(recording(model_answers(directory / "model")))
            discovery = directory / f"discovery-{side.value}"
            worker = start(
                recorders[side].endpoint,
                discovery=discovery,
                log_dir=directory / "logs",
                arguments=flags,
                DYN_LORA_ENABLED="true",
            )
            cleanup.callback(worker.close, seconds=1)
            workers[side] = worker
        for side in Side:
            endpoint = f"dynamo.{COMPONENTS[mode.value]}.generate"
            log = directory / f"client-{side.value}.log"
            client = ingress(endpoint, discovery=directory / f"discovery-{side.value}", worker=workers[side], log=log)
            clients[side] = cleanup.enter_context(client)
        yield Pair(mode, recorders, clients)


def compare(ours: Observed, rust: Observed) -> list[Difference]:
    """Everything that is not the same; only the fact, where one of them refuses the request and the other does not."""
    outcomes = (_outcome(ours), _outcome(rust))
    if outcomes.count(TAKEN) == 1:
        return [Difference("outcome", *outcomes)]
    values = {Side.OURS: _values(ours), Side.RUST: _values(rust)}
    found: list[Difference] = []
    missing: tuple[str, ...] = ()
    for path in sorted(values[Side.OURS].keys() | values[Side.RUST].keys()):
        ours_value, rust_value = (values[side].get(path, ABSENT) for side in Side)
        same = _kind(ours_value) == _kind(rust_value) if path == "error" else ours_value == rust_value
        if same or path.startswith(missing):
            continue
        found.append(Difference(path, ours_value, rust_value))
        if ABSENT in (ours_value, rust_value):
            # What is in it is missing with it.
            missing = (*missing, f"{path}.", f"{path}[")
    return found


def _only_fetched(answer: Answer, seen: list[Seen]) -> bool:
    """Whether a decode request was refused, and its engine heard of nothing but the handoff; see ``refused-decode``."""
    if answer.error is None or not _plain(answer.error).startswith("InvalidRequest"):
        return False
    return {_beside_the_handoff(one.message) for one in seen} <= {BARE}


def _beside_the_handoff(message: Any) -> str:
    rest = type(message)()
    rest.CopyFrom(message)
    for name in OF_THE_HANDOFF:
        rest.ClearField(name)
    return " ".join(str(rest).split())


def _outcome(observed: Observed) -> str:
    """Whether the request was taken; the error if it never got as far as the engine."""
    error = observed.answer.error
    return TAKEN if observed.seen or error is None else _plain(error)


def _plain(error: str) -> str:
    """``InvalidRequest: n must be 1``, whichever exception brought it.

    The class says no more than the first word of its text, and of some errors that word is missing in the text.
    """
    name, _, text = error.partition(": ")
    return f"InvalidRequest: {text.removeprefix('InvalidRequest: ')}" if name == "InvalidArgument" else text


def _kind(error: str) -> str:
    """The first word of a plain error: the others are everybody's own."""
    return error.partition(":")[0]


def _values(observed: Observed) -> dict[str, str]:
    """All that was observed, as one text per path."""
    values: dict[str, str] = {}
    for number, seen in enumerate(observed.seen):
        name = "request" if not number else f"request[{number}]"
        values[name] = "sent"
        _flatten_message(name, seen.message, values)
        for key, value in seen.metadata.items():
            values[f"metadata.{key}"] = value
    for number, chunk in enumerate(observed.answer.chunks):
        name = f"chunks[{number}]"
        values[name] = "received"
        for key, value in (chunk or {}).items():
            _flatten_json(f"{name}.{key}", value, values)
    if observed.answer.error is not None:
        values["error"] = _plain(observed.answer.error)
    return values


def _flatten_json(path: str, value: object, values: dict[str, str]) -> None:
    if value is None:
        return
    if isinstance(value, dict) and value:
        for key, member in value.items():
            # Inside payloads null is a value.
            _flatten_json(f"{path}.{key}", "null" if member is None else member, values)
    elif isinstance(value, list) and value:
        for position, member in enumerate(value):
            _flatten_json(f"{path}[{position}]", "null" if member is None else member, values)
    else:
        values[path] = repr(value)


def _flatten_message(path: str, message: Any, values: dict[str, str]) -> None:
    assert not len(unknown_fields.UnknownFieldSet(message)), f"{path} has unknown fields"
    if message.DESCRIPTOR.full_name == "google.protobuf.Struct":
        values[path] = "object"
        for key, value in sorted(message.fields.items()):
            _flatten_message(f"{path}.{key}", value, values)
        return
    for field, value in message.ListFields():
        name = f"{path}.{field.name}"
        items = list(value) if field.is_repeated else [value]
        if name == "request.media":
            # Engines match media to the prompt kind by kind.
            items.sort(key=lambda item: int(item.modality))
        for position, item in enumerate(items):
            where = f"{name}[{position}]" if field.is_repeated else name
            if field.type == field.TYPE_MESSAGE:
                values[where] = "message"
                _flatten_message(where, item, values)
            else:
                values[where] = repr(item)
