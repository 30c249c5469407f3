"""Settings: frozen attrs classes, checked when they are made.

Each field carries its flag, its variable, its parser and its help in its metadata (:mod:`trio_sidecar.config.fields`);
the command line, the environment and the reference table in the README are derived from that.
"""

from trio_sidecar.config.fields import CLOCK_RANGE_SECS, Option, OptionSource, options_of, resolve
from trio_sidecar.config.mock import MockReply, MockSettings, parse_engine_args
from trio_sidecar.config.process import (
    DoctorSettings,
    FrontendSettings,
    HostKind,
    HostSettings,
    LogFormat,
    LogLevel,
    LogSettings,
    RouterMode,
    ServerSettings,
    UpSettings,
    WorkerKind,
)
from trio_sidecar.config.tls import ClientTlsSettings, ServerTlsSettings
from trio_sidecar.config.top import TopSettings
from trio_sidecar.config.transport import TransportSettings
from trio_sidecar.config.vllm import VllmSettings
from trio_sidecar.config.worker import DisaggregationMode, WorkerSettings, namespace_with_suffix

__all__ = [
    "CLOCK_RANGE_SECS",
    "ClientTlsSettings",
    "DisaggregationMode",
    "DoctorSettings",
    "FrontendSettings",
    "HostKind",
    "HostSettings",
    "LogFormat",
    "LogLevel",
    "LogSettings",
    "MockReply",
    "MockSettings",
    "Option",
    "OptionSource",
    "RouterMode",
    "ServerSettings",
    "ServerTlsSettings",
    "TopSettings",
    "TransportSettings",
    "UpSettings",
    "VllmSettings",
    "WorkerKind",
    "WorkerSettings",
    "namespace_with_suffix",
    "options_of",
    "parse_engine_args",
    "resolve",
]
