"""Text that comes token by token is the text that comes at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.spaced import spaced
from trainer.data.tokenizer import BytesTokenizer, IdsTokenizer, load_tokenizer, prompt_ids
from trainer.errors import UserError
from trainer.lab.samples import TextStream


def pieces_of(tokenizer, ids, prompt=()):
    stream = TextStream(tokenizer, prompt)
    return [*map(stream.push, ids), stream.flush()]


@given(st.binary(max_size=60))
def test_bytes_come_out_as_the_whole_would(data):
    pieces = pieces_of(BytesTokenizer(), data)
    assert "".join(pieces) == data.decode("utf-8", errors="replace")
    assert pieces_of(BytesTokenizer(), "aé€".encode()) == ["a", "", "é", "", "", "€", ""]


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    tokenizers = pytest.importorskip("tokenizers")
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["the cat and the dog and the end"] * 9, trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return load_tokenizer(str(path))


@given(text=st.text(alphabet="the and\n €é😀dog", max_size=40), cut=st.integers(0, 2))
def test_a_tokenizer_json_streams_what_it_decodes_also_half_a_character_at_the_end(byte_level, text, cut):
    ids = byte_level.encode(text)
    assert byte_level.decode(ids) == text
    ids = ids[: max(len(ids) - cut, 0)]
    assert "".join(pieces_of(byte_level, ids.tolist())) == byte_level.decode(ids)


@pytest.mark.parametrize("kind", ["metaspace", "llama", "pieces", "plain"])
def test_no_space_is_lost_after_the_prompt_or_between_tokens(kind, tmp_path):
    pytest.importorskip("tokenizers")
    spaced(kind).save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"))
    text = "alpha beta gamma delta" if kind == "pieces" else "al beta gamma delta"
    ids = tokenizer.encode(text).tolist()
    for cut in range(len(ids)):
        prompt = ids[:cut]
        assert tokenizer.decode(prompt) + "".join(pieces_of(tokenizer, ids[cut:], [tokenizer.bos_id, *prompt])) == text


def test_ids_are_written_as_numbers_and_prompts_of_ids_are_read():
    assert "".join(pieces_of(IdsTokenizer(50), [3, 4], [50, 7, 49])) == " 3 4"
    assert prompt_ids(IdsTokenizer(50), "7 49", "--prompt") == [50, 7, 49]
    assert prompt_ids(BytesTokenizer(), "ab", "--prompt") == [256, 97, 98]
    for prompt in ("7 50", "seven"):
        with pytest.raises(UserError, match="--prompt: "):
            prompt_ids(IdsTokenizer(50), prompt, "--prompt")
