"""The vocabulary: replies survive decoding, any text survives encoding, ids as K3 lays them out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from sgl_kimi_k3.demo import tokenizer

WORDS = tokenizer.vocabulary().words
TOKENIZER = tokenizer.build()


@given(st.lists(st.sampled_from(WORDS), max_size=60))
def test_a_reply_of_words_comes_back_as_the_same_ids(ids):
    assert TOKENIZER.encode(TOKENIZER.decode(ids)).ids == ids


@given(st.lists(st.sampled_from(WORDS), min_size=1), st.data())
def test_a_reply_cut_anywhere_comes_back_as_the_same_ids(ids, data):
    cut = data.draw(st.integers(0, len(ids)))
    assert TOKENIZER.encode(TOKENIZER.decode(ids[:cut])).ids == ids[:cut]


@given(st.text())
def test_any_text_survives(text):
    plain = TOKENIZER.encode(text).ids
    assert TOKENIZER.decode(plain, skip_special_tokens=False) == text


def test_reserved_ids_stand_where_k3_has_them():
    """163584 [BOS], +1 [EOS], +2 <|end_of_msg|>, ... +254 [UNK], +255 [PAD] in the official one."""
    known = tokenizer.vocabulary()
    base = len(known.pieces)
    official = {
        "[BOS]": 163584,
        "[EOS]": 163585,
        "<|end_of_msg|>": 163586,
        "<|open|>": 163587,
        "<|close|>": 163588,
        "<|sep|>": 163589,
        "[EOT]": 163593,
        "<|media_pad|>": 163605,
        "[UNK]": 163838,
        "[PAD]": 163839,
    }
    for text, their_id in official.items():
        ours = base + their_id - 163584
        assert TOKENIZER.token_to_id(text) == known.control(text) == ours
    assert TOKENIZER.get_vocab_size() == known.size == base + 256


def test_the_folder_loads_as_a_model_folder_does(tmp_path):
    tokenizer.write(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path, trust_remote_code=True)
    ids = loaded.apply_chat_template(
        [{"role": "user", "content": "hello"}], add_generation_prompt=True, return_dict=False
    )
    assert loaded.decode(ids).endswith(
        '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>'
    )


def test_two_builds_are_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        tokenizer.write(tmp_path / name)
    assert (tmp_path / "a/tokenizer.json").read_bytes() == (
        tmp_path / "b/tokenizer.json"
    ).read_bytes()


def test_an_unknown_control_token_is_refused():
    with pytest.raises(KeyError):
        tokenizer.vocabulary().control("<|im_end|>")
