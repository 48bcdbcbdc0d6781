"""Text of growing token lists."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from paceline.core.errors import PacelineError
from paceline.gateway.tokenizer import Detokenizer, TextCodec
from paceline.wire.models import read_model


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    folder = tmp_path_factory.mktemp("codec")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["한국어 한국어 the fox the fox"] * 3, trainer)
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return write(folder, tokenizer, "{{ messages[0]['content'] }}{{ eos_token }}")


def write(folder: Path, tokenizer: Tokenizer, template: str) -> TextCodec:
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 64}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": template, "eos_token": "<|end|>"})
    )
    return TextCodec(read_model(folder, "tiny"))


def text_of(codec: TextCodec, ids: list[int], prompt: list[int]) -> tuple[str, list[str]]:
    detokenizer = Detokenizer(codec, prompt)
    pieces = [detokenizer.push(token) for token in ids]
    return "".join(pieces) + detokenizer.flush(), pieces


@given(text=st.text(max_size=30), prompt=st.text(max_size=8))
def test_pieces_join_to_the_text(codec: TextCodec, text: str, prompt: str) -> None:
    ids = codec._raw.encode(text).ids
    whole, pieces = text_of(codec, ids, codec._raw.encode(prompt).ids)
    assert whole == text
    assert not any("\ufffd" in piece for piece in pieces) or "\ufffd" in text


def test_a_character_waits_for_its_last_byte(codec: TextCodec) -> None:
    ids = codec._raw.encode("🚴").ids
    assert len(ids) == 4
    _, pieces = text_of(codec, ids, [])
    assert pieces == ["", "", "", "🚴"]


def test_a_prompt_that_ends_inside_a_character_does_not_leak(codec: TextCodec) -> None:
    ids = codec._raw.encode("🚴").ids
    whole, _ = text_of(
        codec, [*ids[2:], *codec._raw.encode(" the fox").ids], [*codec._raw.encode("x").ids, *ids[:2]]
    )
    assert whole.endswith(" the fox")
    assert "x" not in whole.removesuffix(" the fox")
    assert "🚴" not in whole


def test_invalid_bytes_do_not_hold_the_text_for_ever(codec: TextCodec) -> None:
    lone = codec._raw.encode("🚴").ids[1]
    detokenizer = Detokenizer(codec, [])
    pieces = [detokenizer.push(lone) for _ in range(64)]
    assert any(pieces)
    assert set("".join(pieces) + detokenizer.flush()) == {"\ufffd"}


def test_special_tokens_have_no_text(codec: TextCodec) -> None:
    end = codec._raw.token_to_id("<|end|>")
    whole, _ = text_of(codec, [end, *codec._raw.encode("the").ids, end, *codec._raw.encode(" fox").ids], [])
    assert whole == "the fox"
    assert codec.token_bytes(end) == b"<|end|>"


@given(text=st.text(max_size=20))
def test_token_bytes_join_to_the_text(codec: TextCodec, text: str) -> None:
    ids = codec._raw.encode(text).ids
    assert b"".join(codec.token_bytes(token) for token in ids) == text.encode()


def test_sentencepiece_style_words_keep_their_space(tmp_path: Path) -> None:
    tokenizer = Tokenizer(
        models.WordLevel({"\u2581the": 0, "\u2581fox": 1, "<|end|>": 2}, unk_token="<|end|>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    codec = write(tmp_path, tokenizer, "{{ 1 }}")
    assert text_of(codec, [1], [0])[0] == " fox"
    assert text_of(codec, [0, 1, 1], [])[0] == "the fox fox"
    assert codec.token_bytes(1) == b" fox"


def test_chat_template(codec: TextCodec) -> None:
    assert codec.render([{"role": "user", "content": "hi"}]) == "hi<|end|>"


def test_a_template_cannot_reach_the_process(tmp_path: Path, codec: TextCodec) -> None:
    hostile = write(tmp_path, codec._raw, "{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(PacelineError) as caught:
        hostile.render([{"role": "user", "content": "hi"}])
    assert caught.value.field == "messages"
