"""A stand-in for vLLM's engine core, so that the real ``vllm-rs`` server runs without torch.

It speaks the msgpack-over-ZeroMQ protocol of release 0.32.0 to a front end that was started with
``--data-parallel-size-local 0``. Every request gets the same reply, a list of token ids read from a file, which starts
at position ``seed`` and goes round; the reply's end is an end-of-sequence token unless the request ignores it. One line
per event goes to standard output, with the wall clock's time, for tests to watch.
"""

from __future__ import annotations

import argparse
import json
import struct
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import zmq

IDENTITY = (0).to_bytes(2, "little")
RAW_VIEW = 3
STOP, LENGTH, ABORTED = 0, 1, 2
ADD, ABORT, UTILITY = b"\x00", b"\x01", b"\x03"
HANDSHAKE_TIMEOUT_MS = 30_000


def array(kind: str, fmt: str, shape: list[int], values: list[Any]) -> list[Any]:
    """One array as vLLM's serialiser writes it: dtype, shape, raw bytes in an extension."""
    return [kind, shape, msgspec.msgpack.Ext(RAW_VIEW, struct.pack(f"<{len(values)}{fmt}", *values))]


def logprob_rows(ids: list[int], count: int, vocab: int) -> list[Any]:
    """Logprobs of some positions: the scored token, then ``count`` candidates, the first of them the token itself."""
    width = count + 1
    table = [[token, *((token + offset) % vocab for offset in range(count))] for token in ids]
    values = [[-0.25, *(-0.25 * (offset + 1) for offset in range(count))] for _ in ids]
    return [
        array("<i8", "q", [len(ids), width], [one for row in table for one in row]),
        array("<f4", "f", [len(ids), width], [one for row in values for one in row]),
        array("<i8", "q", [len(ids)], [1] * len(ids)),
        None,
    ]


class Request:
    """One request in the scheduler."""

    def __init__(self, frame: list[Any], now: float) -> None:
        self.id: str = frame[0]
        self.prompt: list[int] = frame[1] or []
        params: dict[str, Any] = frame[3] or {}
        self.eos: int | None = params.get("_eos_token_id")
        self.stop_ids: list[int] = params.get("stop_token_ids") or []
        self.logprobs: int | None = params.get("logprobs")
        self.prompt_logprobs: int | None = params.get("prompt_logprobs")
        self.seed: int = params.get("seed") or 0
        self.min_tokens: int = params.get("min_tokens") or 0
        self.limit: int = params.get("max_tokens") or 16
        self.made = 0
        self.due = now


class Core:
    """The scheduler: one token per request and period."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.period = 1 / options.tokens_per_second if options.tokens_per_second else 0.0
        self.reply: list[int] = json.loads(Path(options.reply).read_text())
        self.options = options
        self.active: dict[str, Request] = {}
        self.paused = False
        self.encode = msgspec.msgpack.Encoder().encode
        self.decode = msgspec.msgpack.Decoder().decode
        self.context = zmq.Context()

    def note(self, event: str, *ids: str) -> None:
        """Tell the test what happened."""
        print(f"{event} at={time.time():.4f} active={len(self.active)} {' '.join(ids)}", flush=True)  # noqa: T201

    def connect(self, kind: int, address: str, *, named: bool = False) -> zmq.Socket[bytes]:
        """Open one socket towards the front end."""
        socket = self.context.socket(kind)
        socket.linger = 0
        if named:
            socket.setsockopt(zmq.IDENTITY, IDENTITY)
        socket.connect(address)
        return socket

    def shake_hands(self) -> None:
        """Introduce this core, learn the addresses, report the limits."""
        shake = self.connect(zmq.DEALER, f"tcp://127.0.0.1:{self.options.handshake_port}", named=True)
        greeting = {"local": True, "headless": True, "parallel_config_hash": None}
        shake.send(self.encode({"status": "HELLO", **greeting}))
        if not shake.poll(HANDSHAKE_TIMEOUT_MS):
            sys.exit("the front end sent no INIT")
        addresses = self.decode(shake.recv())["addresses"]
        self.inbox = self.connect(zmq.DEALER, addresses["inputs"][0], named=True)
        self.inbox.send(self.encode(self.limits()))
        self.outbox = self.connect(zmq.PUSH, addresses["outputs"][0])
        shake.send(self.encode({"status": "READY", **greeting}))
        self.shake = shake
        self.note("READY")

    def limits(self) -> dict[str, Any]:
        """What an engine core of 0.32.0 tells the front end about itself."""
        sizes = ("world", "data_parallel", "tensor_parallel", "pipeline_parallel", "decode_context_parallel")
        return {
            **{f"{name}_size": 1 for name in sizes},
            "max_model_len": self.options.max_model_len,
            "num_gpu_blocks": 4096,
            "block_size": 16,
            "dp_stats_address": None,
            "dtype": "float32",
            "vllm_version": "0.32.0",
            "data_parallel_rank": 0,
            "max_num_seqs": 256,
            "max_num_batched_tokens": 2048,
            "instance_id": "vllm-core-mock",
            "supports_lora": False,
            "max_loras": 0,
            "kv_cache_size_tokens": 65536,
            "kv_cache_max_concurrency": 64.0,
            "kv_events_config": None,
            "weight_transfer_backend": None,
            "enable_sleep_mode": False,
            "supports_draft_weight_updates": False,
            "effective_attention_block_size": 16,
        }

    def send(self, outputs: list[list[Any]], *, finished: list[str] | None = None, utility: Any = None) -> None:
        """Send one batch of outputs, or the answer to one utility call."""
        batch = [0, outputs, None, time.monotonic(), utility, finished, None, None, None]
        self.outbox.send(self.encode(batch))

    def drop(self, ids: list[str]) -> list[str]:
        """Abort requests; those that have ended already are not mentioned."""
        gone = [one for one in ids if self.active.pop(one, None)]
        if gone:
            self.send([[one, [], None, None, None, ABORTED] for one in gone], finished=gone)
        return gone

    def answer_utility(self, call: int, method: str, arguments: list[Any]) -> None:
        """Answer a control call of the front end."""
        result: Any = None
        if method == "get_supported_tasks":
            result = ["generate"]
        elif method == "pause_scheduler":
            self.paused = True
            if (arguments or ["abort"])[0] == "abort":
                self.drop(list(self.active))
        elif method == "resume_scheduler":
            self.paused = False
        elif method == "is_scheduler_paused":
            result = self.paused
        elif method == "get_weight_version":
            result = "default"
        elif method in {"reset_prefix_cache", "wake_up"}:
            result = True
        elif method == "is_sleeping":
            result = False
        self.send([], utility=[call, None, [None, result]])

    def take(self, kind: bytes, frames: list[bytes]) -> None:
        """Handle one message of the front end."""
        if kind == ADD:
            request = Request(self.decode(frames[0]), time.monotonic())
            self.active[request.id] = request
            self.note("ADD", request.id)
        elif kind == ABORT:
            self.note("ABORT", *self.drop(self.decode(frames[0])))
        elif kind == UTILITY:
            _client, call, method, arguments = self.decode(frames[0])
            self.answer_utility(call, method, arguments)

    def step(self, request: Request) -> list[Any]:
        """Make the next token of one request."""
        token = self.reply[(request.seed + request.made) % len(self.reply)]
        if (
            request.made
            and (request.seed + request.made) % len(self.reply) == 0
            and request.eos is not None
            and request.made >= request.min_tokens
        ):
            token = request.eos
        first = request.made == 0
        request.made += 1
        finish: int | None = None
        stop_reason: int | None = None
        if token == request.eos:
            finish = STOP
        elif token in request.stop_ids and request.made >= request.min_tokens:
            finish, stop_reason = STOP, token
        elif request.made >= request.limit:
            finish = LENGTH
        rows = None if request.logprobs is None else logprob_rows([token], request.logprobs, self.options.vocab)
        prompt_rows = None
        if first and request.prompt_logprobs is not None and len(request.prompt) > 1:
            prompt_rows = logprob_rows(request.prompt[1:], request.prompt_logprobs, self.options.vocab)
        stats = None
        if first:
            size = len(request.prompt)
            stats = {
                "num_prompt_tokens": size,
                "num_computed_tokens": size,
                "num_cached_tokens": 0,
                "num_local_cached_tokens": 0,
                "num_external_cached_tokens": 0,
            }
        return [request.id, [token], rows, prompt_rows, None, finish, stop_reason, None, None, None, None, stats]

    def make_tokens(self) -> None:
        """One scheduler step: a token for whoever is due."""
        now = time.monotonic()
        outputs: list[list[Any]] = []
        finished: list[str] = []
        for request in list(self.active.values()):
            if request.due > now:
                continue
            request.due = max(request.due + self.period, now)
            output = self.step(request)
            outputs.append(output)
            if output[5] is not None:
                finished.append(request.id)
                del self.active[request.id]
        if outputs:
            self.send(outputs, finished=finished or None)
        if finished:
            self.note("END", *finished)

    def run(self) -> None:
        """Serve until the process is killed."""
        self.shake_hands()
        while True:
            wait_ms = 1000.0
            if self.active and not self.paused:
                soonest = min(request.due for request in self.active.values())
                wait_ms = max(0.0, soonest - time.monotonic()) * 1000
            if self.inbox.poll(int(wait_ms + 0.999)):
                while self.inbox.poll(0):
                    kind, *frames = self.inbox.recv_multipart()
                    self.take(kind, frames)
            if not self.paused:
                self.make_tokens()


def main() -> None:
    """Read the flags and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--handshake-port", type=int, required=True)
    parser.add_argument("--reply", required=True, help="file with a JSON list of token ids")
    parser.add_argument("--tokens-per-second", type=float, default=0.0, help="per request; 0 means as fast as possible")
    parser.add_argument("--vocab", type=int, default=512)
    parser.add_argument("--max-model-len", type=int, default=1024)
    Core(parser.parse_args()).run()


if __name__ == "__main__":
    main()
