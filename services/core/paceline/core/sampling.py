"""The acceptance rule of coupled sampling, and how a stale proposal is trimmed."""

from __future__ import annotations

from collections.abc import Sequence


def accepted_length(draft: Sequence[int], chosen: Sequence[int]) -> int:
    """Number of draft tokens accepted: the longest prefix on which the target chose the same.

    ``chosen`` holds the target's own token at each of the ``len(draft) + 1`` verified positions. The round
    commits ``chosen[: n + 1]``: the accepted prefix plus one token of the target's (the correction, or the
    bonus when all were accepted). Each committed token is an exact sample of the target whatever was drafted.
    """
    n = 0
    for proposed, y in zip(draft, chosen, strict=False):
        if proposed != y:
            break
        n += 1
    return n


def trim(proposal: Sequence[int], committed_since_base: Sequence[int]) -> Sequence[int] | None:
    """What is left of a proposal after the tokens committed since its base, or None if it went another way.

    Simulated at 2 ms round trip and k = 4, dropping every stale proposal yields 1.00x of plain decoding,
    trimming 1.49x to 2.20x (design section 3).
    """
    n = len(committed_since_base)
    if n > len(proposal) or list(proposal[:n]) != list(committed_since_base):
        return None
    return proposal[n:]
