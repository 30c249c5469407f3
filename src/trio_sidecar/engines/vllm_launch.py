"""Starting and stopping vLLM without blocking the loop (Trio-flavoured).

vLLM is imported, built and shut down in one thread of its own, which lives as long as the engine: the kernel kills
vLLM's processes when the *thread* that started them ends, and a thread from a pool may end at any time. The processes
are spawned, not forked, because a fork would copy the loop, its threads and its signal handling.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import queue
import signal
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import attrs
import outcome
import structlog
import trio

from trio_sidecar.engines.vllm_binding import load_binding, one_line, randomises_ids
from trio_sidecar.engines.vllm_child import DEBUG_VARIABLE, OWNER_VARIABLE, REPORT_VARIABLE, first_report
from trio_sidecar.engines.vllm_facts import facts_of
from trio_sidecar.errors import InvalidConfig, SidecarError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, MutableMapping

    from trio_sidecar.config import VllmSettings
    from trio_sidecar.engines.vllm_binding import ParsedArgs, VllmBinding
    from trio_sidecar.engines.vllm_facts import VllmFacts

__all__ = ["EngineStartFailed", "EngineThread", "RunningVllm", "VllmLauncher", "check_model", "prepare_environment"]

T = TypeVar("T")

KILL_SECS = 5.0
"""How long killed processes may take to be gone, and vLLM to notice."""

MODEL = "MODEL"
NO_DEVICE = "Failed to infer device type"
"""What vLLM says where it finds no platform of its own."""

OUTPUT_LOGGER = "vllm.v1.engine.async_llm"
"""Where vLLM logs the death of its engine, with a traceback."""

log = structlog.get_logger("trio_sidecar.engines.vllm")


class EngineStartFailed(SidecarError):
    """vLLM could not be started; says why in one line."""


@attrs.frozen(slots=True, kw_only=True)
class RunningVllm:
    """A vLLM that has started.

    Attributes:
        llm: ``AsyncLLM``.
        binding: vLLM's classes.
        facts: What the engine is.
        parsed: The arguments that it was started with.
    """

    llm: Any
    binding: VllmBinding
    facts: VllmFacts
    parsed: ParsedArgs


@attrs.define(eq=False, kw_only=True)
class Job(Generic[T]):
    """One function for the engine's thread.

    Attributes:
        ended: Whether it has returned.
        result: What it has returned or raised; None before.
    """

    fn: Callable[[], T]
    token: trio.lowlevel.TrioToken
    ended: trio.Event = attrs.field(factory=trio.Event, init=False)
    result: outcome.Outcome[T] | None = attrs.field(default=None, init=False)

    def run(self) -> None:
        """Run it, in the thread."""
        self.result = outcome.capture(self.fn)
        with suppress(trio.RunFinishedError):
            self.token.run_sync_soon(self.ended.set)


class EngineThread:
    """One thread that runs one function after another for Trio tasks."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # A daemon: a vLLM that does not return must not keep the process.
        self._thread = threading.Thread(target=self._run, name="vllm-engine", daemon=True)
        self._thread.start()

    async def run(self, fn: Callable[[], T]) -> T:
        """Run a function there and wait for it; if cancelled, stop waiting, while the function goes on."""
        job = self.submit(fn)
        await job.ended.wait()
        assert job.result is not None  # noqa: S101 - for mypy; it has ended
        return job.result.unwrap()

    def submit(self, fn: Callable[[], T]) -> Job[T]:
        """Run a function there."""
        job = Job(fn=fn, token=trio.lowlevel.current_trio_token())
        self._jobs.put(job.run)
        return job

    def close(self) -> None:
        """Let it end when its functions have returned."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


class VllmLauncher:
    """Starts vLLM as the settings say, again after each stop."""

    def __init__(self, settings: VllmSettings) -> None:
        self._settings = settings
        self._thread = EngineThread()
        self._directory = tempfile.TemporaryDirectory(prefix="trio-sidecar-vllm-")
        self._report = Path(self._directory.name) / "report.jsonl"

    async def start(self) -> RunningVllm:
        """Import and build vLLM; takes seconds to minutes. A cancel kills vLLM's processes.

        Raises:
            InvalidConfig: vLLM refuses an argument.
            IncompatibleEngine: This vLLM is not supported.
            EngineStartFailed: It cannot start.
        """
        self._report.unlink(missing_ok=True)
        prepare_environment(os.environ, self._settings, self._report)
        began = trio.current_time()
        log.info("vllm_starting", model=self._settings.model)
        handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
        result = await self._build()
        for signum, handler in handlers.items():
            if signal.getsignal(signum) is not handler:
                # vLLM's own start-up must not decide how this process ends.
                signal.signal(signum, handler)
        try:
            running = result.unwrap()
        except SidecarError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever kept vLLM from starting
            # The line says it all; whoever wants the traceback asks for it.
            raise self._failure(error) from (error if self._settings.debug else None)
        seconds = round(trio.current_time() - began, 1)
        log.info("vllm_started", version=running.binding.version, model=running.facts.model_id, seconds=seconds)
        return running

    async def _build(self) -> outcome.Outcome[RunningVllm]:
        """Build in the engine's thread; if cancelled, kill what has started, so that building fails, and see it end."""
        job = self._thread.submit(lambda: _build(self._settings))
        try:
            await job.ended.wait()
        except trio.Cancelled:
            kill_children()
            with trio.move_on_after(KILL_SECS, shield=True):
                await job.ended.wait()  # noqa: ASYNC102 - shielded, with a limit
            if job.result is not None and isinstance(job.result, outcome.Value):
                await self.stop(job.result.value)  # noqa: ASYNC102 - shielded inside
            raise
        assert job.result is not None  # noqa: S101 - for mypy; it has ended
        return job.result

    async def stop(self, running: RunningVllm) -> None:
        """Shut vLLM down within the budget, then by force; in a shield."""
        budget = self._settings.shutdown_secs
        with trio.move_on_after(budget + KILL_SECS, shield=True) as scope:
            await self._thread.run(lambda: running.llm.shutdown(timeout=budget))
        # Its finaliser would call it again, perhaps when the interpreter is half gone.
        running.llm.shutdown = _do_nothing
        if scope.cancelled_caught or multiprocessing.active_children():
            killed = kill_children()
            log.warning("vllm_killed", processes=killed, budget_secs=budget)
        else:
            log.info("vllm_stopped")

    def close(self) -> None:
        """Give back the thread and the directory."""
        self._thread.close()
        self._directory.cleanup()

    def _failure(self, error: Exception) -> EngineStartFailed:
        reason = first_report(self._report) or f"{type(error).__name__}: {one_line(error)}"
        log.debug("vllm_start_failed_at", exc_info=error)
        return EngineStartFailed(f"vLLM cannot start {self._settings.model!r}: {explained(reason)}")


def explained(reason: str) -> str:
    """A reason of vLLM's, in words of ours before it where its own help nobody."""
    if NO_DEVICE in reason:
        return (
            "there is no device that this build of vLLM runs on, such as a GPU with its driver; "
            f"trio-sidecar doctor --engine vllm MODEL looks for one ({reason})"
        )
    return reason


def _build(settings: VllmSettings) -> RunningVllm:
    """In the engine's thread."""
    binding = load_binding()
    if not settings.debug:
        logging.getLogger(OUTPUT_LOGGER).addFilter(_without_traceback)
    parsed = binding.parse(settings.model, settings.arguments)
    config = parsed.engine_args.create_engine_config()
    use_one_backend(config)
    llm = binding.async_llm.from_vllm_config(
        config,
        enable_log_requests=parsed.engine_args.enable_log_requests,
        disable_log_stats=parsed.engine_args.disable_log_stats,
    )
    tokenizer = llm.tokenizer
    facts = facts_of(
        llm.vllm_config,
        version=binding.version,
        served_names=parsed.served_names,
        tokenizer_size=0 if tokenizer is None else tokenizer_size(tokenizer),
        reasoning_parser=parsed.reasoning_parser,
        tool_call_parser=parsed.tool_call_parser,
        unique_ids=randomises_ids(),
    )
    return RunningVllm(llm=llm, binding=binding, facts=facts, parsed=parsed)


def _without_traceback(record: logging.LogRecord) -> bool:
    """Leave an error in the log, but not where in vLLM it was noticed; that an engine has died is logged by us."""
    record.exc_info = None
    return True


def use_one_backend(config: Any) -> None:
    """Make ``auto`` mean xgrammar for structured output, as in vLLM's server: no fallback that differs by schema."""
    structured = getattr(config, "structured_outputs_config", None)
    if structured is not None and structured.backend == "auto":
        structured.backend = "xgrammar"


def tokenizer_size(tokenizer: Any) -> int:
    """How many ids a tokenizer knows, gaps included."""
    highest = getattr(tokenizer, "max_token_id", None)
    return len(tokenizer) if highest is None else int(highest) + 1


def _do_nothing(timeout: float | None = None) -> None:
    """Stands for a shutdown that has happened."""


def check_model(model: str) -> None:
    """Refuse a local path that does not exist, before vLLM takes it for a repository.

    Raises:
        InvalidConfig: Names the path.
    """
    looks_local = model.startswith(("/", "./", "../", "~")) or model in (".", "..")
    if looks_local and not Path(model).expanduser().exists():
        raise InvalidConfig(MODEL, f"{model!r} does not exist")


def prepare_environment(environ: MutableMapping[str, str], settings: VllmSettings, report: Path) -> None:
    """Tell vLLM and its processes, through their environment, how to behave; what the user has set stays."""
    environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # stdout is for what a command is asked to print
    if not _user_configures_logging(environ):
        environ["VLLM_CONFIGURE_LOGGING"] = "0"  # in this process ours applies, in the others vllm_child's
    environ[OWNER_VARIABLE] = str(os.getpid())
    environ[REPORT_VARIABLE] = str(report)
    if settings.debug:
        environ[DEBUG_VARIABLE] = "1"


def _user_configures_logging(environ: Mapping[str, str]) -> bool:
    return "VLLM_LOGGING_CONFIG_PATH" in environ or environ.get("VLLM_CONFIGURE_LOGGING") == "1"


def kill_children() -> int:
    """Kill every process that multiprocessing has started from here; returns how many."""
    children = multiprocessing.active_children()
    for child in children:
        child.kill()
    return len(children)
