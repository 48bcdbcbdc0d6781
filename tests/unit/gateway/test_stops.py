"""Stop strings over text cut anywhere."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from paceline.gateway.stops import StopMatcher

TEXT = st.text(alphabet="ab한é", max_size=24)
STOPS = st.lists(st.text(alphabet="ab한é", min_size=1, max_size=4), max_size=3)


def run(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    matcher = StopMatcher(stops)
    text = "".join(matcher.push(piece) for piece in pieces)
    return text + matcher.flush(), matcher.stopped


def reference(stops: list[str], text: str) -> tuple[str, bool]:
    """By definition: the first end of any stop string; of those that end there the longest."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


@given(text=TEXT, stops=STOPS, cuts=st.lists(st.integers(0, 24), max_size=6))
@example(text="aab", stops=["ab"], cuts=[1, 2])
def test_any_cut_gives_the_text_before_the_first_stop(text: str, stops: list[str], cuts: list[int]) -> None:
    at = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(at)]
    assert run(stops, pieces) == reference(stops, text)


@given(text=TEXT, stops=STOPS)
def test_nothing_of_a_stop_string_is_sent_before_it_is_decided(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    sent = ""
    for character in text:
        sent += matcher.push(character)
        assert reference(stops, text)[0].startswith(sent)
