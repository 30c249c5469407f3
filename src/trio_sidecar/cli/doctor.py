"""The command that says what is broken."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from trio_sidecar.cli.vllm import ENGINE_FLAG
from trio_sidecar.config import DoctorSettings, LogLevel, LogSettings, TransportSettings, options_of, resolve
from trio_sidecar.config.transport import ENDPOINT_FLAG
from trio_sidecar.errors import InvalidConfig

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Flags = Mapping[str, str | bool]
    Environ = Mapping[str, str]

REMOTE = "remote"
ENGINE_HELP = (
    "Look at the machine of an engine in our own process: mock; or vllm, and after it MODEL and any of vLLM's own "
    "arguments, to generate 16 tokens on the device."
)


def doctor(flags: Flags, environ: Environ, rest: Sequence[str] = ()) -> int:
    """Say what is broken between here and a served model, layer by layer; exit code 0, 1 with warnings, 2 if broken."""
    settings = resolve(DoctorSettings, flags=flags, environ=environ)
    engine = flags.get(ENGINE_FLAG)
    from trio_sidecar.bridge import run  # noqa: PLC0415
    from trio_sidecar.doctor import Questions, examine  # noqa: PLC0415
    from trio_sidecar.observe.logging import configure_logging  # noqa: PLC0415

    configure_logging(LogSettings(level=LogLevel.ERROR))  # the rest is in the report
    questions = Questions(
        environment=environ,
        transport=_transport(flags, environ),
        engine=engine if isinstance(engine, str) and engine != REMOTE else "",
        arguments=tuple(rest),
        seconds=settings.timeout_secs,
        engine_seconds=settings.engine_timeout_secs,
    )
    report = run(examine, questions)
    sys.stdout.write(json.dumps(report.as_json(), indent=2) if settings.json else report.tree())
    sys.stdout.write("\n")
    return report.exit_code


def _transport(flags: Flags, environ: Environ) -> TransportSettings | InvalidConfig | None:
    """The endpoint that a worker would use; why it cannot be, or None if there is none."""
    variable = next(found.option.env for found in options_of(TransportSettings) if found.option.flag == ENDPOINT_FLAG)
    if ENDPOINT_FLAG not in flags and not (variable and environ.get(variable)):
        return None
    try:
        return resolve(TransportSettings, flags=flags, environ=environ)
    except InvalidConfig as error:
        return error
