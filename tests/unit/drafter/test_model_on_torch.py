"""The model kind on the torch runner, drafting for a target with the same weights."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.core.types import SamplingParams
from paceline.drafter.kinds import Ask, DraftSession
from paceline.drafter.main import DrafterProcess, build_kind
from paceline.drafter.model import ModelKind
from paceline.engine.runner import TorchRunner
from paceline.engine.step import Sequence as EngineSequence
from paceline.engine.step import StepItem, StepPlan
from paceline.wire.models import locate
from paceline.wire.process import ProcessContext
from paceline.wire.settings import DrafterSettings, Settings

VOCAB, KEY = 199, 0x1234_5678_9ABC_DEF0
PROMPTS = [[5, 9, 13, 9, 5], [100] * 23, list(range(1, 40))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    path = tmp_path_factory.mktemp("tiny_llama")
    LlamaForCausalLM(config).save_pretrained(path)
    vocabulary = {f"t{i}": i for i in range(VOCAB)}
    tokenizer = {"model": {"type": "BPE", "vocab": vocabulary, "merges": []}}
    (path / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    return path


def entry_of(folder: Path) -> DrafterSettings:
    return DrafterSettings(kind="model", path=str(folder), dtype="float32", device="cpu", threads=1)


@pytest.fixture
def kind(folder: Path) -> Iterator[ModelKind]:
    made = build_kind(Settings(), entry_of(folder))
    assert isinstance(made, ModelKind)
    yield made
    made.shutdown()


def start(kind: ModelKind, prompt: Sequence[int], params: SamplingParams) -> DraftSession:
    session = DraftSession(1, 1, len(prompt), len(prompt), params, KEY)
    kind.open(session)
    add(kind, session, prompt)
    return session


def add(kind: ModelKind, session: DraftSession, tokens: Sequence[int]) -> None:
    session.tokens.extend(tokens)
    kind.extend(session, tokens)


def greedy(folder: Path, prompt: list[int], new_tokens: int) -> list[int]:
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        ids = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return list(map(int, ids[0, len(prompt) :]))


def plain(folder: Path, prompt: list[int], params: SamplingParams, new_tokens: int) -> list[int]:
    """The target's own tokens, one a step."""
    runner = TorchRunner(folder, dtype="float32", device="cpu", threads=1, kv_cache_tokens=128)
    sequence = EngineSequence(
        1, list(prompt), len(prompt), params, KEY, blocks=list(range(runner.num_blocks))
    )
    for _ in range(new_tokens):
        fed = tuple(sequence.tokens[sequence.computed :])
        [result] = runner.execute(StepPlan((StepItem(sequence, sequence.computed, fed, (), 1),)))
        sequence.computed = len(sequence.tokens)
        sequence.tokens.append(result.chosen[0])
    runner.close()
    return sequence.tokens[len(prompt) :]


def assert_every_draft_is_right(
    kind: ModelKind, texts: list[tuple[list[int], list[int]]], params: SamplingParams, k: int
) -> None:
    """Rounds over all sessions at once: each commits its draft and one token more."""
    sessions = [start(kind, prompt, params) for prompt, _ in texts]
    while True:
        asks = [Ask(session, len(session.tokens), k) for session in sessions]
        done = len(sessions[0].tokens) - len(texts[0][0])
        if done + k + 1 > len(texts[0][1]):
            return
        for session, proposal, (_, output) in zip(sessions, kind.propose(asks), texts, strict=True):
            assert list(proposal.token_ids) == output[done : done + k]
            assert len(proposal.confidence) == k
            add(kind, session, output[done : done + k + 1])


def test_greedy_drafts_of_the_same_weights_are_all_accepted(kind: ModelKind, folder: Path) -> None:
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    texts = [(prompt, greedy(folder, prompt, 30)) for prompt in PROMPTS]
    assert_every_draft_is_right(kind, texts, params, 4)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, ignore_eos=True),
        SamplingParams(temperature=0.8, top_p=0.9, top_k=20, ignore_eos=True),
        SamplingParams(temperature=1.0, repetition_penalty=1.3, frequency_penalty=0.5, ignore_eos=True),
    ],
)
def test_sampled_drafts_with_the_targets_noise_are_all_accepted(
    kind: ModelKind, folder: Path, params: SamplingParams
) -> None:
    texts = [(prompt, plain(folder, prompt, params, 24)) for prompt in PROMPTS]
    assert_every_draft_is_right(kind, texts, params, 3)


def test_a_rejected_draft_leaves_no_trace(kind: ModelKind, folder: Path) -> None:
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    prompt = PROMPTS[0]
    session = start(kind, prompt, params)
    [first] = kind.propose([Ask(session, len(prompt), 6)])
    other = (first.token_ids[1] + 1) % VOCAB
    add(kind, session, [first.token_ids[0], other])
    [second] = kind.propose([Ask(session, len(session.tokens), 6)])
    assert list(second.token_ids) == greedy(folder, session.tokens.tolist(), 6)


def test_the_context_bounds_the_draft(kind: ModelKind) -> None:
    session = start(kind, [1] * 126, SamplingParams(temperature=0.0, ignore_eos=True))
    lengths = []
    for token in (1, 2, 3):
        [proposal] = kind.propose([Ask(session, len(session.tokens), 4)])
        lengths.append(len(proposal.token_ids))
        add(kind, session, [token])
    assert lengths == [2, 1, 0]


def test_the_handshake_names_vocabulary_tokenizer_and_context(
    kind: ModelKind, folder: Path, tmp_path: Path
) -> None:
    context = ProcessContext(Settings(drafters=(entry_of(folder),)), "d0", "drafter", tmp_path)
    described = DrafterProcess(context, kind).describe()
    assert (described.engine, described.vocab_size, described.max_context_tokens) == ("model", VOCAB, 128)
    assert described.tokenizer_fingerprint == locate(str(folder)).tokenizer_fingerprint
    assert (described.dtype, described.model) == ("float32", str(folder))
