"""Stop strings in a text that arrives in pieces."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["StopStrings"]


class StopStrings:
    """Looks for stop strings, also across pieces, and holds back what may turn out to be the start of one.

    The match that is complete first wins; of two that end together, the one listed first. Unless stop strings stay in
    the text, the last ``longest - 1`` characters are always withheld, as vLLM does.
    """

    __slots__ = ("_hold", "_include", "_stops", "_unreleased", "_window")

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        self._stops = stops
        self._include = include
        self._hold = max(map(len, stops)) - 1
        self._window = ""
        """The end of the text: all that is withheld, and what a match may still reach back to."""
        self._unreleased = 0
        """How many characters at the end of the window were not given out."""

    def push(self, piece: str, *, match: bool) -> tuple[str, str | None]:
        """Add text.

        Args:
            piece: The new text; may be empty.
            match: Whether a stop string that ends in this piece counts.

        Returns:
            The text to give out now, and the stop string that was found. After a match nothing more may be pushed.
        """
        self._window += piece
        self._unreleased += len(piece)
        found = self._find(len(piece)) if match and piece else None
        released_to = len(self._window) - self._unreleased
        if found is not None:
            start, stop = found
            cut = start + len(stop) if self._include else start
            self._unreleased = 0
            return self._window[released_to:cut], stop
        keep = 0 if self._include else min(self._hold, self._unreleased)
        text = self._window[released_to : len(self._window) - keep]
        self._unreleased = keep
        self._window = self._window[max(0, len(self._window) - self._hold) :]
        return text, None

    def flush(self) -> str:
        """Give out what was withheld; the text has ended without a match."""
        text = self._window[len(self._window) - self._unreleased :]
        self._unreleased = 0
        return text

    def _find(self, new: int) -> tuple[int, str] | None:
        """Start and text of the match that ends first within the last ``new`` characters."""
        best: tuple[int, str] | None = None
        best_end = len(self._window) + 1
        for stop in self._stops:
            start = self._window.find(stop, max(0, len(self._window) - new - len(stop) + 1))
            if start >= 0 and start + len(stop) < best_end:
                best, best_end = (start, stop), start + len(stop)
        return best
