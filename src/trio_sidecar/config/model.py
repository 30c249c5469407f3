"""What a worker says about its model, as far as it can be checked before anything starts."""

from __future__ import annotations

from pathlib import Path

from trio_sidecar.errors import InvalidConfig

__all__ = ["ENDPOINT_TYPES", "check_endpoint_types", "parse_endpoint_types", "parse_template"]

ENDPOINT_TYPES = (
    "chat",
    "completions",
    "embedding",
    "embeddings",
    "image",
    "images",
    "audio",
    "audios",
    "video",
    "videos",
    "tensor",
)
"""What Dynamo 1.6 takes, in any case of letters."""


def parse_endpoint_types(text: str, source: str) -> tuple[str, ...]:
    """A comma-separated list, in lower case, in the order given.

    Raises:
        InvalidConfig: An entry is empty, or Dynamo does not know it.
    """
    types = tuple(part.strip().lower() for part in text.split(","))
    check_endpoint_types(types, source)
    unknown = [part for part in types if part not in ENDPOINT_TYPES]
    if unknown:
        raise InvalidConfig(source, f"{unknown[0][:60]!r} is not allowed; use {', '.join(ENDPOINT_TYPES)}")
    return types


def parse_template(text: str, source: str) -> str:
    """The path of a file that is there; Dynamo would look for it only when the engine is up.

    Raises:
        InvalidConfig: It cannot be read.
    """
    if text:
        try:
            with Path(text).open("rb"):
                pass
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise InvalidConfig(source, f"cannot read {text!r}: {reason}") from error
    return text


def check_endpoint_types(value: object, source: str) -> None:
    """Check that a value is a list of names; which names there are is the command line's to check.

    Raises:
        InvalidConfig: It is not.
    """
    if not isinstance(value, tuple) or not value or not all(isinstance(part, str) and part for part in value):
        raise InvalidConfig(source, "must be a comma-separated list of endpoint types such as chat,completions")
