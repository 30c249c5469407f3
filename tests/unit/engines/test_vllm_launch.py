"""Starting vLLM: its environment, its thread, its processes, and the words for what goes wrong."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import trio

from trio_sidecar.config import VllmSettings
from trio_sidecar.engines import vllm_child, vllm_launch
from trio_sidecar.engines.vllm_binding import load_binding, one_line, status_of
from trio_sidecar.engines.vllm_child import first_report
from trio_sidecar.engines.vllm_facts import facts_of
from trio_sidecar.engines.vllm_launch import EngineThread, check_model, prepare_environment, use_one_backend
from trio_sidecar.engines.vllm_shared import SharedVllm
from trio_sidecar.errors import IncompatibleEngine, InvalidConfig, SidecarError, StatusCode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

from contextlib import asynccontextmanager


def config(**parallel: Any) -> Any:
    """What a ``VllmConfig`` says after the start."""
    model = SimpleNamespace(
        model="/m",
        max_model_len=256,
        max_logprobs=20,
        get_vocab_size=lambda: 512,
        get_diff_sampling_param=lambda: {"temperature": 0.5, "top_k": 3},
    )
    plain = {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 1,
        "data_parallel_size": 4,
        "data_parallel_size_local": 2,
        "data_parallel_index": 2,
        "local_engines_only": False,
        "world_size": 2,
    }
    return SimpleNamespace(
        model_config=model,
        parallel_config=SimpleNamespace(**(plain | parallel)),
        cache_config=SimpleNamespace(block_size=16, num_gpu_blocks=100, effective_attention_block_size=32),
        scheduler_config=SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=2048),
        lora_config=SimpleNamespace(max_loras=2),
        instance_id="abc",
    )


def test_facts_of_a_configuration() -> None:
    """Names, sizes and capabilities; what this vLLM does not have is absent, not an error."""
    facts = facts_of(config(), version="0.32.0", served_names=["a", "b"], tokenizer_size=500)
    assert ("a", ["b"], "/m") == (
        facts.model.served_model_name,
        facts.model.served_model_aliases,
        facts.model.model_id,
    )
    assert ({"top_k": 3}, range(4), 0, True, 511) == (
        facts.defaults,
        facts.ranks,
        facts.rank_offset,
        facts.supports_lora,
        facts.max_prompt_id,
    )
    server = facts.server
    assert ("0.32.0", "vllm", "abc", 256, 16, 100, 8, 2048, 2, 32) == (
        server.engine_version,
        server.api_version,
        server.instance_id,
        server.max_model_len,
        server.kv_block_size,
        server.total_kv_blocks,
        server.max_running_requests,
        server.max_batched_tokens,
        server.max_loras,
        server.effective_attention_block_size,
    )
    assert not facts.sleep_mode
    assert server.rl_capabilities is not None
    assert not server.rl_capabilities.weight_transfer_enabled
    assert "/m" == facts_of(config(), version="", served_names=[], tokenizer_size=0).served_names[0]


def test_ranks_of_an_engine_that_is_one_of_several() -> None:
    """With hybrid load balancing the ranks begin where this node's do, and vLLM counts from there."""
    facts = facts_of(config(local_engines_only=True), version="", served_names=[], tokenizer_size=0)
    assert (range(2, 4), 2) == (facts.ranks, facts.rank_offset)
    assert facts.server.parallelism is not None
    assert (2, 2, 4) == (
        facts.server.parallelism.data_parallel_rank,
        facts.server.parallelism.data_parallel_size_local,
        facts.server.parallelism.data_parallel_size,
    )


def test_one_backend_for_structured_output() -> None:
    """``auto`` means xgrammar; what the user has chosen stays."""
    for chosen, expected in (("auto", "xgrammar"), ("guidance", "guidance")):
        found = SimpleNamespace(structured_outputs_config=SimpleNamespace(backend=chosen))
        use_one_backend(found)
        assert expected == found.structured_outputs_config.backend


@pytest.mark.rule("FR-113")
def test_the_environment_of_vllm(tmp_path: Path) -> None:
    """Processes are spawned and know their owner; logs are ours unless the user configures vLLM's."""
    environ: dict[str, str] = {}
    prepare_environment(environ, VllmSettings(model="m"), tmp_path / "report")
    expected = {
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_CONFIGURE_LOGGING": "0",
        "TRIO_SIDECAR_VLLM_OWNER": str(os.getpid()),
        "TRIO_SIDECAR_VLLM_REPORT": str(tmp_path / "report"),
    }
    assert expected == environ
    own = {"VLLM_WORKER_MULTIPROC_METHOD": "fork", "VLLM_LOGGING_CONFIG_PATH": "x"}
    environ = dict(own)
    prepare_environment(environ, VllmSettings(model="m", debug=True), tmp_path / "report")
    assert own.items() <= environ.items()
    assert "VLLM_CONFIGURE_LOGGING" not in environ
    assert "TRIO_SIDECAR_VLLM_DEBUG" in environ


def test_a_model_path_that_does_not_exist(tmp_path: Path) -> None:
    """Is refused at once; repositories and what exists are vLLM's to judge."""
    with pytest.raises(InvalidConfig, match="/no/such/model"):
        check_model("/no/such/model")
    check_model(str(tmp_path))
    check_model("org/name")


async def test_the_engine_thread_is_one_and_stays() -> None:
    """Functions run one after another in the same thread; results and errors come back; a cancel stops waiting."""
    thread = EngineThread()
    first = await thread.run(threading.get_ident)
    assert first == await thread.run(threading.get_ident)
    assert first != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        await thread.run(lambda: 1 // 0)
    gate = threading.Event()
    with trio.move_on_after(0.01) as scope:
        await thread.run(gate.wait)
    assert scope.cancelled_caught
    gate.set()
    assert 7 == await thread.run(lambda: 7)
    thread.close()


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("one\n  two", "one two"),
        ("", "ValueError"),
        ("1 validation error for C\n  Value error, too long [type=value_error, input=1]\nmore", "too long"),
        ("1 validation error for C\nfield\n  Input should be less [type=x]", "field: Input should be less"),
    ],
)
def test_one_line_of_an_error(message: str, expected: str) -> None:
    """Of pydantic's reports the first complaint, of others all words."""
    assert expected == one_line(ValueError(message))


def test_a_vllm_that_cannot_be_used_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says what was found and what is needed."""
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(IncompatibleEngine, match=r"cannot be used: .*vllm.*; needed is vLLM 0\.32 or 0\.33"):
        load_binding()


def test_unknown_errors_are_internal() -> None:
    """What is no error of the caller is INTERNAL."""
    assert StatusCode.INTERNAL == status_of(RuntimeError("x")).status


CHILD = """
import multiprocessing, os, sys, time
from trio_sidecar.engines.vllm_child import plugin
def target():
    plugin()
    print(os.getpid(), flush=True)
    time.sleep(60)
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    context.Process(target=target).start()
    time.sleep(60)
"""


@pytest.mark.rule("FR-040")
def test_vllm_processes_die_with_their_owner(tmp_path: Path) -> None:
    """SIGKILL of the owner leaves nobody behind (FR-023)."""
    script = tmp_path / "owner.py"
    script.write_text(CHILD)
    environ = os.environ | {"TRIO_SIDECAR_VLLM_OWNER": "1", "TRIO_SIDECAR_VLLM_REPORT": str(tmp_path / "report")}
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, env=environ) as owner:
        assert owner.stdout is not None
        child = int(owner.stdout.readline())
        descriptor = os.pidfd_open(child)
        owner.send_signal(signal.SIGKILL)
    assert wait_for_end(descriptor)


def wait_for_end(descriptor: int) -> bool:
    """Whether a process ends within five seconds."""
    import select  # noqa: PLC0415

    try:
        return bool(select.select([descriptor], [], [], 5)[0])
    finally:
        os.close(descriptor)


def test_other_processes_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an owner, or in a process that nobody started with multiprocessing, the plugin does nothing."""
    handler = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(vllm_child, "end_quickly", lambda: pytest.fail("this process is nobody's"))
    vllm_child.plugin()
    monkeypatch.setenv("TRIO_SIDECAR_VLLM_OWNER", "1")
    vllm_child.plugin()
    assert handler is signal.getsignal(signal.SIGINT)


@pytest.mark.parametrize(("wanted", "frozen"), [("", False), ("vllm_child.end_quickly()", True)])
def test_a_process_ends_without_a_last_search_for_garbage(wanted: str, *, frozen: bool) -> None:
    """With a vLLM in it that would take seconds; what was registered earlier to run at the end runs later."""
    script = f"""
import atexit, gc
from trio_sidecar.engines import vllm_child, vllm_launch
atexit.register(lambda: print(gc.get_freeze_count() > 0))
{wanted}
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert f"{frozen}\n" == done.stdout


def test_the_reason_of_a_failure_reaches_the_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first error that a process logs is reported in one line; in debug mode its log keeps the traceback."""
    report = tmp_path / "report"
    assert None is first_report(report)
    reporter = vllm_child._Reporter(report, debug=True)
    try:
        raise ValueError("no\nmemory")
    except ValueError:
        record = logging.LogRecord("vllm", logging.ERROR, "", 0, "failed", (), sys.exc_info())
    assert reporter.filter(record)
    assert record.exc_info is not None
    reporter.filter(logging.LogRecord("vllm", logging.ERROR, "", 0, "again", (), None))
    assert "ValueError: no memory" == first_report(report)
    assert {"type": "ValueError", "message": "no\nmemory"} == json.loads(report.read_text())


def test_a_missing_device_is_explained() -> None:
    """The words of vLLM for a GPU that is not there name a variable for more logs; other reasons stay as they are."""
    explained = vllm_launch.explained("RuntimeError: Failed to infer device type, please set the environment variable")
    assert explained.startswith("there is no device that this build of vLLM runs on, such as a GPU with its driver")
    assert "RuntimeError: Failed to infer device type" in explained
    assert "ValueError: no memory" == vllm_launch.explained("ValueError: no memory")


class EngineFails(SidecarError):
    """For tests."""


@asynccontextmanager
async def engine(log: list[str], *, fails: trio.Event | None = None) -> AsyncIterator[Any]:
    """An engine that notes its life, and may fail."""
    log.append("open")
    failed = False
    async with trio.open_nursery() as nursery:

        async def fail() -> None:
            nonlocal failed
            if fails is not None:
                await fails.wait()
                failed = True
                nursery.cancel_scope.cancel()

        nursery.start_soon(fail)
        try:
            yield "engine"
        finally:
            log.append("close")
        nursery.cancel_scope.cancel()
    if failed:
        raise EngineFails


async def test_a_shared_engine_is_started_once() -> None:
    """Both openings see the same one; it ends after the last."""
    log: list[str] = []
    async with trio.open_nursery() as nursery:
        shared = SharedVllm(nursery, lambda: engine(log))
        for bootstrap in (True, False):
            async with shared.open(bootstrap=bootstrap) as opened:
                assert "engine" == opened  # type: ignore[comparison-overlap]
        assert ["open"] == log
        shared.close()
    assert ["open", "close"] == log


async def test_a_shared_engine_that_fails_ends_its_users() -> None:
    """The block is cancelled, and the engine's error comes out of it, alone."""
    fails = trio.Event()
    async with trio.open_nursery() as nursery:
        shared = SharedVllm(nursery, lambda: engine([], fails=fails))

        async def use() -> None:
            async with shared.open(bootstrap=False):
                fails.set()
                await trio.sleep_forever()

        with pytest.raises(EngineFails):
            await use()


@pytest.mark.rule("FR-040")
async def test_a_start_that_is_cancelled_ends_the_engine() -> None:
    """Whoever opens it first may be stopped meanwhile; the engine does not stay (FR-051)."""
    ended: list[str] = []

    @asynccontextmanager
    async def slow() -> AsyncIterator[Any]:
        try:
            await trio.sleep(3600)
        finally:
            ended.append("ended")
        yield None

    async with trio.open_nursery() as nursery:
        shared = SharedVllm(nursery, slow)
        with trio.move_on_after(0.01) as scope:
            async with shared.open(bootstrap=True):
                pytest.fail("opened")
    assert scope.cancelled_caught
    assert ["ended"] == ended
