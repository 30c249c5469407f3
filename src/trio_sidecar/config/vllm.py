"""Settings of an engine that is a vLLM in this process."""

from __future__ import annotations

import attrs

from trio_sidecar.config.fields import (
    Option,
    check_duration,
    check_not_empty,
    duration,
    parse_bool,
    setting,
    whole_number,
)

MAX_RESTARTS = 1_000_000


def _check_budget(value: float, source: str) -> None:
    check_duration(value, source, zero=True)


@attrs.frozen(slots=True, kw_only=True)
class VllmSettings:
    """A vLLM in this process.

    Attributes:
        model: Path or repository.
        arguments: vLLM's own, as they would follow the model in ``vllm serve``.
        shutdown_secs: At the end, how long vLLM may take before its processes are killed.
        restart_engine: How often an engine that has died is replaced; then, or at 0, this process fails.
        debug: Show tracebacks of vLLM's processes.
    """

    model: str = attrs.field()
    arguments: tuple[str, ...] = ()
    shutdown_secs: float = setting(
        Option(
            flag="--shutdown-secs",
            env="TRIO_SIDECAR_VLLM_SHUTDOWN_SECS",
            parse=duration,
            metavar="SECONDS",
            help="At the end, how long vLLM may take before its processes are killed.",
        ),
        default=15.0,
        check=_check_budget,
    )
    restart_engine: int = setting(
        Option(
            flag="--restart-engine",
            env="TRIO_SIDECAR_RESTART_ENGINE",
            parse=whole_number(0, MAX_RESTARTS),
            metavar="COUNT",
            help="How often a vLLM that has died is started again; then, or at 0, the command fails.",
        ),
        default=0,
    )
    debug: bool = setting(
        Option(
            flag="--debug",
            env="TRIO_SIDECAR_DEBUG",
            parse=parse_bool,
            switch=True,
            help="Show tracebacks, those of vLLM's processes too.",
        ),
        default=False,
    )

    def __attrs_post_init__(self) -> None:
        """Check what no parser has checked."""
        check_not_empty(self.model, "MODEL")
