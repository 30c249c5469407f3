"""Settings of the live view."""

from __future__ import annotations

import attrs

from trio_sidecar.config.fields import Option, check_duration, duration, parse_bool, setting


@attrs.frozen(slots=True, kw_only=True)
class TopSettings:
    """The live view.

    Attributes:
        interval_secs: Between two samples.
        once: Print the figures of one interval and end.
    """

    interval_secs: float = setting(
        Option(
            flag="--interval-secs", env=None, parse=duration, metavar="SECONDS", help="Seconds between two samples."
        ),
        default=1.0,
        check=check_duration,
    )
    once: bool = setting(
        Option(
            flag="--once",
            env=None,
            parse=parse_bool,
            switch=True,
            help="Print the figures of one interval and end; for scripts, and where there is no terminal.",
        ),
        default=False,
    )
