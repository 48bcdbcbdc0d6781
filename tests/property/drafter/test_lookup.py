"""n-gram and suffix drafting against brute force over the plain token list."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from paceline.core.types import SamplingParams
from paceline.drafter.kinds import Ask, DraftSession, InlineKind, Proposal
from paceline.drafter.ngram import NgramKind
from paceline.drafter.suffix import SuffixKind

MAX_MATCH, MAX_CANDIDATES = 16, 32

# Few ids and lengths below the candidate bound for most pairs: matches of all lengths occur.
streams = st.lists(st.integers(0, 3), min_size=1, max_size=120)
drafts = st.integers(1, 16)


def start(kind: InlineKind | NgramKind | SuffixKind, tokens: list[int], prompt_tokens: int) -> DraftSession:
    session = DraftSession(1, 1, len(tokens), prompt_tokens, SamplingParams(), 0)
    kind.open(session)  # type: ignore[union-attr]
    add(kind, session, tokens)
    return session


def add(kind: InlineKind | NgramKind | SuffixKind, session: DraftSession, tokens: list[int]) -> None:
    session.tokens.extend(tokens)
    kind.extend(session, tokens)  # type: ignore[union-attr]


def propose(kind: NgramKind | SuffixKind, session: DraftSession, k: int) -> Proposal:
    return kind.propose([Ask(session, len(session.tokens), k)])[0]


def match_length(query: list[int], text: list[int], end: int) -> int:
    """Tokens before ``end`` in ``text`` that equal the end of ``query``."""
    n = 0
    while n < min(MAX_MATCH, len(query), end) and query[-1 - n] == text[end - 1 - n]:
        n += 1
    return n


def occurrences(query: list[int], text: list[int]) -> list[tuple[int, int]]:
    """(match length, position after it) of the newest occurrences of at least two tokens."""
    found = [(match_length(query, text, end), end) for end in range(len(text) - 1, 1, -1)]
    return [(n, end) for n, end in found if n >= 2][:MAX_CANDIDATES]


def brute_ngram(tokens: list[int], k: int) -> tuple[list[int], int]:
    found = occurrences(tokens, tokens)
    if not found:
        return [], 0
    longest = max(n for n, _ in found)
    position = next(end for n, end in found if n == longest)
    text = list(tokens)
    for i in range(k):
        text.append(text[position + i])
    return text[len(tokens) :], longest


@given(streams, drafts)
def test_ngram_is_the_most_recent_longest_match(tokens: list[int], k: int) -> None:
    kind = NgramKind()
    proposal = propose(kind, start(kind, tokens, 1), k)
    expected, length = brute_ngram(tokens, k)
    assert list(proposal.token_ids) == expected
    assert proposal.confidence == bytes([round(255 * length / (length + 1))]) * len(expected)


def brute_suffix(texts: list[list[int]], query: list[int], k: int) -> list[int]:
    """Walks all equally long matches together, by majority; texts in order of precedence."""
    found = [(n, end, text) for text in texts for n, end in occurrences(query, text)]
    if not found:
        return []
    longest = max(n for n, _, _ in found)
    branches = [text[end:] for n, end, text in found if n == longest]
    out: list[int] = []
    chance = 1.0
    while branches and len(out) < k:
        counts = Counter(branch[0] for branch in branches)
        best = max(counts.values())
        token = next(branch[0] for branch in branches if counts[branch[0]] == best)
        chance *= best / len(branches)
        if chance < 0.1:
            break
        out.append(token)
        branches = [branch[1:] for branch in branches if branch[0] == token and len(branch) > 1]
    return out


@given(streams, drafts)
def test_suffix_follows_the_majority_of_the_longest_matches(tokens: list[int], k: int) -> None:
    kind = SuffixKind()
    proposal = propose(kind, start(kind, tokens, 1), k)
    assert list(proposal.token_ids) == brute_suffix([tokens], tokens, k)
    assert len(proposal.confidence) == len(proposal.token_ids)


@given(streams, streams, drafts)
def test_suffix_also_knows_the_output_of_a_finished_session(
    past: list[int], tokens: list[int], k: int
) -> None:
    kind = SuffixKind()
    prompt_tokens = 1 + len(past) // 3
    kind.close(start(kind, past, min(prompt_tokens, len(past))))
    # The separator behind a stored output is its end: position len(output) is a place without a next token,
    # which brute force expresses by an id that ends every branch.
    output = past[prompt_tokens:]
    proposal = propose(kind, start(kind, tokens, 1), k)
    assert list(proposal.token_ids) == brute_with_end([tokens, output], tokens, k)


def brute_with_end(texts: list[list[int]], query: list[int], k: int) -> list[int]:
    end_id = -1
    out = brute_suffix([texts[0], [*texts[1], end_id]], query, k)
    return out[: out.index(end_id)] if end_id in out else out


@given(streams, st.lists(st.integers(1, 5), max_size=20), drafts)
def test_incremental_equals_from_scratch(tokens: list[int], cuts: list[int], k: int) -> None:
    for make in (NgramKind, SuffixKind):
        whole, grown = make(), make()
        at_once = start(whole, tokens, 1)
        piecewise = start(grown, [], 1)
        position = 0
        for cut in [*cuts, len(tokens)]:
            add(grown, piecewise, tokens[position : position + cut])
            position += cut
        assert propose(grown, piecewise, k) == propose(whole, at_once, k)
