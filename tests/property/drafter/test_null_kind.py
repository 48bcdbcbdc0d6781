"""Null drafts against the noise's array form, and against the rule that null verifiers follow."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.noise import noise_bits, noise_word
from paceline.core.types import SamplingParams
from paceline.drafter.kinds import Ask, DraftSession
from paceline.drafter.null import NullKind

VOCAB = 49_152

words = st.integers(0, 2**32 - 1)
keys = st.integers(0, 2**64 - 1)
positions = st.integers(0, 2**20)


@given(keys, positions, words)
def test_one_word_equals_the_array_form(key: int, position: int, token_id: int) -> None:
    [expected] = noise_bits(key, position, np.asarray([token_id], dtype=np.uint32))
    assert noise_word(key, position, token_id) == int(expected)


@given(keys, st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9), st.data())
def test_a_draft_is_the_chain_of_the_null_rule(key: int, tokens: list[int], data: st.DataObject) -> None:
    prompt_tokens = data.draw(st.integers(1, len(tokens)))
    session = DraftSession(1, 1, len(tokens), prompt_tokens, SamplingParams(), key)
    session.tokens.extend(tokens)
    [proposal] = NullKind(VOCAB).propose([Ask(session, len(tokens), 5)])
    previous, expected = tokens[-1], []
    for position in range(len(tokens) - prompt_tokens, len(tokens) - prompt_tokens + 5):
        [bits] = noise_bits(key, position, np.asarray([previous]))
        previous = 1000 + int(bits) % (VOCAB - 1000)
        expected.append(previous)
    assert list(proposal.token_ids) == expected
