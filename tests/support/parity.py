"""A client that knows neither server: it asks by the contract and puts answers into one form that can be compared."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import attrs
import grpc
from google.protobuf.json_format import MessageToDict

from support.grpc_stubs import stubs

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

SECONDS = 30
TOLERANCE = 1e-4
"""How far two logprobs may be apart: batches of different sizes are added up in a different order."""
PARALLEL = ("token_ids", "logprobs", "ranks", "candidate_tokens")
"""Fields of an output with one entry per token, where they were asked for."""
MAX_MESSAGE = 256 << 20


def request(prompt: str | Sequence[int] = (), /, **fields: Any) -> Any:
    """A ``GenerateRequest`` of plain values: a text or token ids, then fields, messages as dicts."""
    if prompt:
        fields |= {"text": prompt} if isinstance(prompt, str) else {"token_ids": {"ids": list(prompt)}}
    return stubs().message("GenerateRequest")(**fields)


def as_dict(message: Any) -> dict[str, Any]:
    """A message with all its fields, unset scalars included, as plain values."""
    plain: dict[str, Any] = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return plain


@attrs.frozen(slots=True, kw_only=True)
class Answer:
    """What one server said to one request.

    Attributes:
        code: Name of the status.
        detail: Its text, which no client should depend on.
        prompt: ``PromptInfo`` as plain values; None if none came.
        output: All outputs in one; None if none came.
        sizes: Tokens per message that had outputs.
    """

    code: str
    detail: str = ""
    prompt: dict[str, Any] | None = None
    output: dict[str, Any] | None = None
    sizes: tuple[int, ...] = ()

    @property
    def said(self) -> dict[str, Any]:
        """The output of an answer that must have come."""
        assert self.code == "OK", (self.code, self.detail)
        assert self.output is not None
        return self.output

    @property
    def finish(self) -> dict[str, Any]:
        """How it ended."""
        return dict(self.said["finish_info"])

    @property
    def end(self) -> tuple[str, str, Any]:
        """The reason, and which stop reason with its value; blank without."""
        finish = self.finish
        stops = [(name, finish[name]) for name in ("stop_token_id", "eos_token_id", "stop_string") if name in finish]
        assert len(stops) <= 1
        return (finish["finish_reason"], *(stops[0] if stops else ("", None)))

    @property
    def comparable(self) -> dict[str, Any]:
        """What two servers, or two ways of asking one, must agree on."""
        return {"code": self.code, "prompt": self.prompt, "output": self.output}


@attrs.frozen(slots=True, kw_only=True)
class Server:
    """One server.

    Attributes:
        metrics_port: Where vLLM's own numbers are; 0 if nowhere.
    """

    name: str
    channel: grpc.Channel
    metrics_port: int = 0

    def call(self, path: str) -> Any:
        """A method's callable."""
        return stubs().call(self.channel, path)

    def open(self, message: Any, **options: Any) -> Any:
        """Start a stream; the caller iterates."""
        return self.call("vllm.Inference/GenerateStream")(message, timeout=SECONDS, **options)

    def unary(self, message: Any, **options: Any) -> Answer:
        """Ask for all at once."""
        try:
            response = self.call("vllm.Inference/Generate")(message, timeout=SECONDS, **options)
        except grpc.RpcError as error:
            return refusal(error)
        return Answer(
            code="OK",
            prompt=as_dict(response.prompt_info) if response.HasField("prompt_info") else None,
            output=as_dict(response.outputs) if response.HasField("outputs") else None,
            sizes=(response.outputs.num_tokens,),
        )

    def stream(self, message: Any, **options: Any) -> Answer:
        """Ask for a stream, and read it to its end."""
        return read(self.open(message, **options))

    def control(self, name: str, /, **fields: Any) -> tuple[str, dict[str, Any]]:
        """Call ``vllm.Control``: the status, and the answer."""
        message = stubs().message(f"{name}Request")(**fields)
        try:
            response = self.call(f"vllm.Control/{name}")(message, timeout=SECONDS)
        except grpc.RpcError as error:
            return refusal(error).code, {}
        return "OK", as_dict(response)

    def health(self, service: str) -> str:
        """The health of a service, or the status that refuses to tell."""
        message = stubs().message("grpc.health.v1.HealthCheckRequest")(service=service)
        try:
            response = self.call("grpc.health.v1.Health/Check")(message, timeout=SECONDS)
        except grpc.RpcError as error:
            return refusal(error).code
        return str(as_dict(response)["status"])

    def watch(self, service: str) -> Any:
        """A stream of the health of a service."""
        message = stubs().message("grpc.health.v1.HealthCheckRequest")(service=service)
        return self.call("grpc.health.v1.Health/Watch")(message, timeout=SECONDS)


def refusal(error: grpc.RpcError) -> Answer:
    """An error as an answer."""
    return Answer(code=error.code().name, detail=error.details() or "")


def read(stream: Any) -> Answer:
    """Read a stream to its end, and check the shape that every stream has (wire-and-server 4)."""
    messages = []
    code, detail = "OK", ""
    try:
        messages.extend(stream)
    except grpc.RpcError as error:
        code, detail = error.code().name, error.details() or ""
    for at, message in enumerate(messages):
        assert ("prompt_info", at != 0) == ("prompt_info", not message.HasField("prompt_info"))
        assert ("outputs", at != 0) == ("outputs", message.HasField("outputs"))
    outputs = [as_dict(message.outputs) for message in messages[1:]]
    ends = [at for at, output in enumerate(outputs) if "finish_info" in output]
    assert (ends == [len(outputs) - 1]) if code == "OK" else (ends == [])
    return Answer(
        code=code,
        detail=detail,
        prompt=as_dict(messages[0].prompt_info) if messages else None,
        output=joined(outputs) if outputs else None,
        sizes=tuple(output["num_tokens"] for output in outputs),
    )


def joined(outputs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Deltas in one, as a unary answer has them; each delta's arrays must fit its tokens."""
    whole = dict(outputs[-1])
    whole["num_tokens"] = sum(output["num_tokens"] for output in outputs)
    whole["text"] = "".join(output["text"] for output in outputs)
    for name in PARALLEL:
        assert all(len(output[name]) in {0, output["num_tokens"]} for output in outputs), name
        whole[name] = [entry for output in outputs for entry in output[name]]
        assert len(whole[name]) in {0, whole["num_tokens"]}, name
    return whole


def difference(left: Any, right: Any, path: str = "") -> str:
    """Where two plain values differ first, floats apart by more than the tolerance; empty if they do not."""
    if isinstance(left, dict) and isinstance(right, dict):
        if left.keys() != right.keys():
            return f"{path}: {sorted(left)} against {sorted(right)}"
        found = (difference(left[key], right[key], f"{path}.{key}") for key in left)
    elif isinstance(left, list) and isinstance(right, list):
        if len(left) != len(right):
            return f"{path}: {len(left)} against {len(right)} entries: {left!r:.300} against {right!r:.300}"
        found = (difference(*each, f"{path}[{at}]") for at, each in enumerate(zip(left, right, strict=True)))
    elif isinstance(left, float) and isinstance(right, float):
        same = math.isclose(left, right, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
        return "" if same or left == right else f"{path}: {left} against {right}"
    else:
        return "" if left == right else f"{path}: {left!r:.300} against {right!r:.300}"
    return next((one for one in found if one), "")


@attrs.frozen(slots=True, kw_only=True)
class Pair:
    """The two servers."""

    ours: Server
    theirs: Server

    def __iter__(self) -> Iterator[Server]:
        """Each in turn."""
        return iter((self.ours, self.theirs))

    def agree(self, message: Any, *, metadata: Mapping[str, str] | None = None) -> Answer:
        """Ask both servers, both ways; all four answers must be the same, and usable.

        Returns:
            Our streamed answer.
        """
        options: dict[str, Any] = {"metadata": tuple(metadata.items())} if metadata else {}
        answers = {}
        for server in self:
            answers[f"{server.name}, streamed"] = server.stream(message, **options)
            answers[f"{server.name}, at once"] = server.unary(message, **options)
        name, first = next(iter(answers.items()))
        for other, answer in answers.items():
            apart = difference(without_cached(first.comparable), without_cached(answer.comparable))
            assert not apart, f"{name} ({first.detail}) against {other} ({answer.detail}): {apart}"
        if first.code == "OK":
            assert first.said["num_tokens"] == first.finish["num_output_tokens"]
        return first

    def refuse(self, message: Any, code: str, *, metadata: Mapping[str, str] | None = None) -> Answer:
        """Ask both servers, both ways; all must refuse with the code before any message.

        Returns:
            Our streamed answer.
        """
        answer = self.agree(message, metadata=metadata)
        assert (code, None, None) == (answer.code, answer.prompt, answer.output), answer.detail
        return answer

    def control(self, name: str, /, **fields: Any) -> tuple[str, dict[str, Any]]:
        """Call both; both must answer the same."""
        ours, theirs = (server.control(name, **fields) for server in self)
        assert ours == theirs
        return ours


def without_cached(plain: dict[str, Any]) -> dict[str, Any]:
    """An answer without its cached tokens, which depend on what the server was asked before."""
    output = plain["output"]
    if output is None or "finish_info" not in output:
        return plain
    finish = {key: value for key, value in output["finish_info"].items() if key != "num_cached_tokens"}
    return plain | {"output": output | {"finish_info": finish}}
