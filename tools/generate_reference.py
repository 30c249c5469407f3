"""Write the tables of flags and variables into docs/configuration.md, and that of the errors into docs/errors.md.

``generate_reference.py --write`` does; without the flag it only says whether they agree with the classes.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from trio_sidecar import errors
from trio_sidecar.config import (
    DoctorSettings,
    FrontendSettings,
    HostSettings,
    LogSettings,
    MockSettings,
    ServerSettings,
    TopSettings,
    UpSettings,
    VllmSettings,
    WorkerSettings,
    options_of,
)
from trio_sidecar.config.fields import show_default

if TYPE_CHECKING:
    import attrs

ROOT = Path(__file__).parent.parent
TABLES: dict[str, tuple[type[attrs.AttrsInstance], ...]] = {
    "worker": (WorkerSettings,),
    "up": (UpSettings,),
    "engine mock": (ServerSettings, MockSettings),
    "engine vllm": (VllmSettings,),
    "frontend": (FrontendSettings,),
    "doctor": (DoctorSettings,),
    "top": (TopSettings,),
    "common": (HostSettings, LogSettings),
}
FILES = ("docs/configuration.md", "docs/errors.md")


def table(classes: tuple[type[attrs.AttrsInstance], ...]) -> str:
    """A Markdown table of the options of settings classes."""
    rows = ["| flag | variable | default | meaning |", "|---|---|---|---|"]
    for cls in classes:
        for source in options_of(cls):
            option = source.option
            flag = f"`{option.flag}`" if option.flag else ""
            variable = f"`{option.env}`" if option.env else ""
            default = "required" if source.required else f"`{shown}`" if (shown := show_default(source)) else ""
            allowed = f" One of {', '.join(f'`{choice}`' for choice in option.choices)}." if not option.switch else ""
            text = (option.help + (allowed if option.choices else "")).replace("|", "\\|").replace("<", "&lt;")
            rows.append(f"| {flag} | {variable} | {default} | {text} |")
    return "\n".join(rows)


def error_table() -> str:
    """A Markdown table of the errors, in the order of the module."""
    rows = ["| error | meaning | kind for Dynamo | gRPC status | may succeed elsewhere |", "|---|---|---|---|---|"]
    for name, cls in vars(errors).items():
        if not (inspect.isclass(cls) and issubclass(cls, errors.SidecarError)) or cls is errors.SidecarError:
            continue
        first, _, _ = (inspect.getdoc(cls) or "").partition("\n\n")
        meaning = re.sub(r":class:`(\w+)`", r"`\1`", " ".join(first.split()))
        made = cls() if cls is errors.DeadEngine else cls  # that class does not know its kind, only its instances do
        told = cls.__init__ is errors.RpcError.__init__  # which status
        classified = "see below | its own" if told else f"`{made.kind.value}` | `{made.status.name}`"
        rows.append(f"| `{name}` | {meaning} | {classified} | {'yes' if cls.retryable else ''} |")
    rows += ["", "| gRPC status of a call | kind for Dynamo |", "|---|---|"]
    rows += [f"| `{status.name}` | `{status.kind.value}` |" for status in errors.StatusCode if status]
    return "\n".join(rows)


def updated(text: str) -> str:
    """A text with every table between ``<!-- flags: NAME -->`` and ``<!-- /flags -->`` made anew; errors too."""

    def fill(found: re.Match[str]) -> str:
        return f"<!-- flags: {found[1]} -->\n\n{table(TABLES[found[1]])}\n\n<!-- /flags -->"

    text = re.sub(r"<!-- flags: ([\w ]+) -->.*?<!-- /flags -->", fill, text, flags=re.DOTALL)
    made = f"<!-- errors -->\n\n{error_table()}\n\n<!-- /errors -->"
    return re.sub(r"<!-- errors -->.*?<!-- /errors -->", lambda _: made, text, flags=re.DOTALL)


def main() -> int:
    """Compare or write; 1 if a file does not agree."""
    stale = []
    for name in FILES:
        path = ROOT / name
        text = path.read_text(encoding="utf-8")
        if updated(text) != text:
            stale.append(name)
            if "--write" in sys.argv[1:]:
                path.write_text(updated(text), encoding="utf-8")
    print("\n".join(f"{name} does not agree with the classes" for name in stale) or "all tables agree")  # noqa: T201
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
