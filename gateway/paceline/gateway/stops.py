"""Stop strings in a stream of text: what may be sent now, and whether one was completed."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Holds back text that may turn out to be the start of a stop string.

    The stop string that is completed first wins (of several, the longest), so the result does not depend on
    how the text was cut into pieces. Text works in whole characters, hence none is ever cut.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """Takes new text, returns what is safe to send; ``stopped`` is set once a stop string is complete."""
        if self.stopped:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        matches = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if matches:
            self.stopped = True
            self._held = ""
            return text[: min(matches)[1]]
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back, once no more text follows."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a proper beginning of ``stop``."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
