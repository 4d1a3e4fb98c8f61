"""The tokenizer of an export is the one that it was trained with, as `transformers` reads it."""

from __future__ import annotations

import json

import pytest
import torch

from tests.support import models
from tests.support.in_process import program
from tests.support.runs import FULL_ROWS, train, write_tiny_config
from tests.support.streams import spaced
from trainer.config.load import load_config

transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
AutoTokenizer, PreTrainedTokenizerFast = transformers.AutoTokenizer, transformers.PreTrainedTokenizerFast
TEXT = "the and </s> of unknown the"


def start(token, tokenizer, model):
    """The ids of a prompt as documents begin."""
    return torch.tensor([[model.config.bos_token_id, *tokenizer(token).input_ids]])


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """A folder of `save_pretrained`, with a tokenizer that needs all of its files."""
    path = tmp_path_factory.mktemp("pretrained")
    words = {word: number for number, word in enumerate(["<s>", "</s>", "[UNK]", "the", "of", "and", "to", "in"])}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    ends = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>", "unk_token": "[UNK]"}
    fast = PreTrainedTokenizerFast(tokenizer_object=model, padding_side="left", **ends)
    fast.chat_template = {"default": "{{ messages[0].content }}", "other": "no {{ messages[0].content }}"}
    fast.save_pretrained(path)
    (path / "special_tokens_map.json").write_text(json.dumps(ends))  # as older versions wrote it
    models.pretrained("mamba2", path, len(words) + 1, num_hidden_layers=1)
    return path


def test_the_tokenizer_of_an_export_is_that_of_the_folder_that_the_run_began_from(pretrained, tmp_path, capsys):
    tokenizer = pretrained / "tokenizer.json"
    own = ("model.family=mamba2", f'model.args={{from="{pretrained}"}}', f"data.tokenizer={tokenizer}")
    train(write_tiny_config(tmp_path), tmp_path / "run", *own, "model.contract=false", "train.steps=1")
    for more in ((), ("--force",)):
        ended = program(["export", tmp_path / "run", "--format", "hf", "--out", tmp_path / "hf", *more], capsys)
        assert ended.returncode == 0, ended.stderr
    resolved = load_config(tmp_path / "run" / "config.resolved.toml").model
    assert (resolved.dim, resolved.num_layers) == (32, 1), "those of the folder"
    wanted, found = AutoTokenizer.from_pretrained(pretrained), AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert wanted.encode(TEXT) == [3, 5, 1, 4, 2, 3]
    assert found(TEXT).input_ids == wanted(TEXT).input_ids
    assert (found.get_vocab(), found.chat_template) == (wanted.get_vocab(), wanted.chat_template)
    assert (found.eos_token, found.pad_token, found.padding_side) == ("</s>", "</s>", "left")
    (pretrained / "tokenizer_config.json").write_text("[]")
    ended = program(["export", tmp_path / "run", "--format", "hf", "--out", tmp_path / "other"], capsys)
    assert ended.mistake.startswith("data.tokenizer: transformers cannot read it: ")


@pytest.mark.parametrize("eod", [None, 0])
@pytest.mark.parametrize("kind", ["byte_level", "metaspace", "llama", "pieces"])
def test_the_folder_generates_what_sample_does(kind, eod, tmp_path, capsys):
    """Up to the id that ends documents, if it was trained; the tokenizer then names it."""
    text, prompt = "al beta gamma delta", "al beta"
    spaced(kind).save(str(tmp_path / "tokenizer.json"))
    own = [f"data.tokenizer={tmp_path}/tokenizer.json", "model.family=transformer", "data.seq_len=64"]
    if eod is not None:
        (tmp_path / "a.jsonl").write_text(f"{json.dumps({'text': text})}\n" * 60)
        own += [f'data.source=[{{name="a", paths=["{tmp_path}/a.jsonl"]}}]', f"data.eod={eod}", FULL_ROWS]
        own += ["scheduler.warmup_steps=0", "optimizer.lr=1e-2"]
    train(write_tiny_config(tmp_path), tmp_path / "run", *own, f"train.steps={2 if eod is None else 60}")
    ended = program(["export", tmp_path / "run", "--format", "hf", "--out", tmp_path / "hf"], capsys)
    assert ended.returncode == 0, ended.stderr
    said = program(["sample", tmp_path / "run", "--prompt", prompt, "--tokens", "20", "--temperature", "0"], capsys)
    model, tokenizer = (
        each.from_pretrained(tmp_path / "hf") for each in (transformers.AutoModelForCausalLM, AutoTokenizer)
    )
    given = start(prompt, tokenizer, model)
    ids = model.generate(given, max_new_tokens=20, do_sample=False)
    end = None if eod is None else tokenizer.convert_ids_to_tokens(eod)
    assert (tokenizer.eos_token, tokenizer.pad_token) == (end, end)
    decoded = tokenizer.decode([id for id in ids[0, 1:].tolist() if id != eod])
    assert decoded == said.stdout.removesuffix("\n")
    if eod is None:
        assert len(ids[0]) == 20 + given.shape[1]
    else:
        assert (decoded.split(), ids[0, -1]) == (text.split(), eod)
        assert model.config.eos_token_id == model.generation_config.eos_token_id == eod
