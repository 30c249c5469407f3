"""What the codec raises: which message, which field, and what was wrong."""

from __future__ import annotations

from trio_sidecar.errors import SidecarError

__all__ = ["CodecError", "DecodeError", "EncodeError"]


class CodecError(SidecarError, ValueError):
    """A message could not be turned into bytes, or bytes into a message.

    Attributes:
        message: Name of the message class in which it happened, the innermost one.
        field: Name of the field, or None where no single field is to blame.
        reason: What was wrong, and what is allowed.
    """

    def __init__(self, message: str, field: str | None, reason: str) -> None:
        self.message = message
        self.field = field
        self.reason = reason
        super().__init__(f"{message}.{field}: {reason}" if field else f"{message}: {reason}")


class EncodeError(CodecError):
    """A field holds a value that its protobuf type cannot carry."""


class DecodeError(CodecError):
    """The bytes are not an encoding of the message."""
