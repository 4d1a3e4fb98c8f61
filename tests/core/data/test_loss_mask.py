"""Which tokens are trained: those whose first character lies in a span, in every format, and only these count."""

from __future__ import annotations

import itertools
import json
from functools import partial

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tests.core.data.test_formats import WRITERS, write_jsonl
from tests.support.in_process import plan_of, train_here
from tests.support.runs import train
from tests.support.streams import options_of, spaced
from trainer.data import BlendSource, ConstantWeight, LaneBlend, ReadOptions, ShardSource, load_documents
from trainer.data.documents import TokenTable
from trainer.data.fingerprint import fingerprint
from trainer.data.groups import CutOptions
from trainer.data.layout import discover_direct
from trainer.data.tokenizer import IdsTokenizer
from trainer.errors import UserError
from trainer.lab.loss_mask import LossMask
from trainer.lab.tokenizer_json import load_tokenizer
from trainer.metrics import noise_scale
from trainer.tools.read_step import find_origin, read_step
from trainer.training.build import make_model

# Prompt and answer in turn; the second one trains nothing, the last one its end.
PROMPTS = ["Q: naïve 😀?\r\n", "only a prompt é", "", "Q", "a b"]
TEXTS = [*map(str.__add__, PROMPTS, ["A: ja – «é» 🙏\r\n", "", "answer", "🙏🙏 a", "c d"])]
SPANS = [[[len(prompt), len(text)]] for prompt, text in zip(PROMPTS, TEXTS, strict=True)]
SPANS[1], SPANS[4] = [], [[0, 2], [1, 2], [3, 3]]  # overlapping and empty ones


def trained_by_hand(sizes, text, spans):
    """Of tokens of these bytes of UTF-8, those that begin in a character of a span."""
    owners = [at for at, character in enumerate(text) for _ in character.encode()]
    begins = np.cumsum([0, *sizes[:-1]]) if sizes else []
    return [any(start <= owners[byte] < end for start, end in spans) for byte in begins]


@pytest.mark.parametrize("suffix", WRITERS)
@pytest.mark.parametrize("tokenizer", ["bytes", "json"])
def test_a_token_is_trained_if_its_first_character_lies_in_a_span(tmp_path, suffix, tokenizer):
    if tokenizer == "json":
        tokenizer = str(tmp_path / "tokenizer.json")
        words = pytest.importorskip("tokenizers")
        made = spaced("byte_level")
        trainer = words.trainers.BpeTrainer(vocab_size=300, initial_alphabet=words.pre_tokenizers.ByteLevel.alphabet())
        made.train_from_iterator(TEXTS * 9, trainer)
        made.post_processor = words.processors.ByteLevel(trim_offsets=True)  # which moves offsets behind a space
        made.save(tokenizer)
    tokenizer = load_tokenizer(tokenizer)
    path, eod = tmp_path / f"a{suffix}", 0
    WRITERS[suffix](path, {"text": TEXTS, "mask": SPANS})
    plain = load_documents(path, ReadOptions(tokenizer, text_eod=eod))
    found = load_documents(path, ReadOptions(tokenizer, text_eod=eod, loss_mask=LossMask("mask")))
    assert (found.tokens >> 1).tolist() == plain.tokens.tolist()
    for number, (text, spans) in enumerate(zip(TEXTS, SPANS, strict=True)):
        ids = plain.read(number, 0, int(plain.lengths[number])).tolist()
        sizes = [1] * (len(ids) - 1)
        if tokenizer.name != "bytes":
            sizes = [len(tokenizer.words.id_to_token(id)) for id in ids[:-1]]  # a character for each byte
        trained = trained_by_hand(sizes, text, spans)
        assert (TokenTable.read(found, number, 0, len(ids)) & 1 == 0).tolist() == [*trained, trained[-1]]
    WRITERS[suffix](path, {"tokens": [[5, 6, 0], [7]], "mask": [[0, 1, 0], [1]]})
    options, cut = ReadOptions(IdsTokenizer(8), loss_mask=LossMask("mask")), CutOptions("one", 4)
    before = fingerprint([], options, cut)
    assert load_documents(path, options).tokens.tolist() == [11, 12, 1, 14]
    assert fingerprint([], options, cut) == before


@pytest.mark.parametrize(("text", "trained"), [("ab\n", 3), ("ab", 3), ("a\n", 2), ("\n", 0), ("", 0)])
def test_an_eod_is_trained_as_the_token_before_it_whether_the_text_has_it_or_not(tmp_path, text, trained):
    spans = [[0, 2]] if "b" in text else [[0, 1]] if "a" in text else []
    write_jsonl(tmp_path / "a.jsonl", {"text": [text, "ab"], "mask": [spans, [[0, 2]]]})
    options = ReadOptions(load_tokenizer("bytes"), text_eod=10, loss_mask=LossMask("mask"))
    found = load_documents(tmp_path / "a.jsonl", options)
    assert np.count_nonzero(found.tokens & 1 == 0) == trained + 3


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"text": "né", "mask": [[0, 3]]}, r"\[0, 3\] is no span of a text of 2 characters; count Unicode"),
        ({"text": "ab", "mask": [[0, 1.5]]}, "is not a list of .start, end."),
        ({"text": "ab", "mask": [[False, True]]}, "is not a list of .start, end."),
        ({"text": "ab", "spans": []}, r"has no field mask \(its fields: text, spans\); name one that it has"),
        ({"tokens": [1, 2], "mask": [1]}, "is not a list of 0 and 1, one for each of 2 ids"),
        ({"text": "\ud800", "mask": []}, "unpaired surrogate"),
    ],
)
def test_what_is_no_mask_is_refused_with_its_line(tmp_path, record, message):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "a", "mask": [[0, 1]]}) + "\n" + json.dumps(record))
    with pytest.raises(UserError, match=rf"a\.jsonl: line 2: .*{message}"):
        load_documents(tmp_path / "a.jsonl", ReadOptions(load_tokenizer("bytes"), loss_mask=LossMask("mask")))


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_a_file_without_the_field_of_the_mask_is_refused_with_its_columns(tmp_path, suffix):
    WRITERS[suffix](tmp_path / f"a{suffix}", {"text": TEXTS, "spans": SPANS})
    with pytest.raises(UserError, match=r"has no field mask \(its fields: text, spans\)"):
        load_documents(tmp_path / f"a{suffix}", ReadOptions(load_tokenizer("bytes"), loss_mask=LossMask("mask")))


CONFIG = """
train = { steps = 2, micro_batches = 2, device = "cpu", clip_grad_norm = 0, compile = false }
data.seq_len = 64
data.align = "document"
data.eod = 255
data.mixing = { batch_size = 4, repeat = false }
data.source = [{ name = "chat", paths = ["a.jsonl"], loss_mask = "mask" }]
model = { dim = 16, num_layers = 2 }
metrics.log_interval = 1
"""


ONE_STREAM = ("data.align='auto'", "data.mixing.batching_mode='per_stream'")


@pytest.mark.parametrize(("ranks", "sets"), [(1, ()), (1, ONE_STREAM), pytest.param(2, (), marks=pytest.mark.slow)])
def test_loss_and_noise_scale_are_those_of_the_trained_tokens_by_plain_torch(tmp_path, monkeypatch, ranks, sets):
    """The first step reads all documents, of which each has a row; the second has nothing to read."""
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "a.jsonl", {"text": TEXTS, "mask": SPANS})
    (tmp_path / "x.toml").write_text(CONFIG)
    windows, measure = [], noise_scale.estimate
    monkeypatch.setattr(
        noise_scale, "estimate", lambda *sums, **how: windows.append(measure(*sums, **how)) or windows[-1]
    )
    start = train_here if ranks == 1 else partial(train, nproc=ranks)
    start(tmp_path / "x.toml", tmp_path / "run", *sets)
    plan = plan_of(tmp_path / "x.toml")
    torch.manual_seed(plan.config.run.seed)
    model, num_read, sums = make_model(plan), 0, {}
    for text, spans in zip(TEXTS, SPANS, strict=True):
        ids = [*text.encode(), 255]
        trained = trained_by_hand([1] * (len(ids) - 1), text, spans)
        trained.append(trained[-1])
        logits = model(torch.tensor([[256, *ids[:-1]]]), state=None).logits[0]
        losses = F.cross_entropy(logits, torch.tensor(ids), reduction="none")
        loss = losses[torch.tensor(trained)].sum()
        gradient = torch.cat([each.flatten() for each in torch.autograd.grad(loss, [*model.parameters()])])
        sums[f"{text}\ufffd"] = float(loss), sum(trained), gradient.double()
        num_read += len(ids)
    total, num_trained, gradient = map(sum, zip(*sums.values(), strict=True))
    row = next(map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()))["metrics"]
    assert row["loss"] == pytest.approx(total / num_trained, rel=1e-5)
    assert row["grad_norm"] == pytest.approx(float(gradient.norm()) / num_trained, rel=1e-4)
    found = [row[name] for name in ("tokens_seen", "data/trained", "data/fill")]
    assert found == [num_trained, num_trained / num_read, num_read / 512 / ranks]
    read = read_step(find_origin(tmp_path / "run", 1, trust_code=False), 1, with_text=True)
    shown = {each["text"]: each["trained"] for row in read for each in row["documents"]}
    # With h the gradient of a micro-batch's sum and n its trained tokens, of which a row has w, the noise is
    # (sum |h|^2 - sum n^2 |G|^2) / sum w^2, where |G|^2 = (|sum h|^2 - sum |h|^2) / ((sum n)^2 - sum n^2).
    micros = {}
    for of in read:
        for each in of["documents"]:
            micros.setdefault((of["shard"], of["micro_batch"]), []).append(sums[each["text"]][1:])
    tokens = np.array([sum(w for w, _ in rows) for rows in micros.values()])
    squares = np.array([float(sum(h for _, h in rows).square().sum()) for rows in micros.values()])
    mean = (float(gradient.square().sum()) - squares.sum()) / (num_trained**2 - np.square(tokens).sum())
    noise = (squares.sum() - np.square(tokens).sum() * mean) / sum(w**2 for _, w, _ in sums.values())
    found = [each for each in windows if isinstance(each, noise_scale.Window)]
    assert bool(found) == bool(sets)  # lanes of so few documents continue each other's
    for window in found:
        assert (window.grad_sq, window.tr_sigma) == pytest.approx((mean, noise), rel=1e-4)
    answers = [["A: ja – «é» 🙏\r\n"], [], ["answer"], ["🙏🙏 a"], ["a "]]
    assert [[part.rstrip("�") for part in shown[f"{text}�"]] for text in TEXTS] == answers
    write_jsonl(tmp_path / "a.jsonl", {"text": TEXTS, "mask": [[] for _ in TEXTS]})
    with pytest.raises(UserError, match="source chat: loss_mask: mask lets no token be trained"):
        train_here(tmp_path / "x.toml", tmp_path / "nothing")


def test_rows_hold_the_same_tokens_whatever_is_trained_and_go_on_in_the_middle_of_a_document(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", {"text": TEXTS, "mask": SPANS})

    def rows_of(mask):
        how = {"namespace": "a", "seq_len": 5, "max_group_cells": 2}
        options = options_of({"tokenizer": load_tokenizer("bytes"), "loss_mask": mask, **how})
        source = BlendSource("a", ShardSource(discover_direct([tmp_path / "a.jsonl"]), *options), ConstantWeight(1.0))
        return LaneBlend([source], seed=0, rows=2, row_tokens=5, runs_on=True, tokenizer=options[1].tokenizer)

    rows, state = rows_of(LossMask("mask")), None
    for plain in itertools.islice(rows_of(None), 40):
        masked, resumed = next(rows), rows_of(LossMask("mask"))
        if state is not None:
            resumed.load_state_dict(state)
        assert next(resumed)["targets"].tolist() == masked["targets"].tolist()
        assert masked["tokens"].tolist() == plain["tokens"].tolist()
        is_trained = masked["targets"] >= 0
        assert (masked["targets"] == np.where(is_trained, plain["targets"], -100)).all()
        state = rows.state_dict()
    assert any(place and place.offset for place in rows.places)


def test_a_set_of_an_evaluation_is_masked_as_training_or_said_not_to_be(tmp_path, monkeypatch, capsys, verb):
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "a.jsonl", {"text": TEXTS, "mask": SPANS})
    write_jsonl(tmp_path / "b.jsonl", {"text": TEXTS})
    sets = "eval.every=2", "eval.source=[{name='own', paths=['a.jsonl']}]"
    (tmp_path / "x.toml").write_text(CONFIG)
    train_here(tmp_path / "x.toml", tmp_path / "run", *sets)
    assert "eval source own: all tokens count, and training has loss_mask = mask" in capsys.readouterr().err
    for change in ("loss_mask='mask'", "format='jsonl'"):
        other = [f"eval.source=[{{name='own', paths=['a.jsonl'], {change}}}]", "checkpoint.resume=auto"]
        with pytest.raises(UserError, match=f"another config: eval.source.own.{change.partition('=')[0]}: "):
            train_here(tmp_path / "x.toml", tmp_path / "run", sets[0], *other)
    write_jsonl(tmp_path / "none.jsonl", {"text": TEXTS, "mask": [[] for _ in TEXTS]})
    own = "eval.source=[{name='own', paths=['none.jsonl'], loss_mask='mask'}]"
    train_here(tmp_path / "x.toml", tmp_path / "nothing", sets[0], own)
    assert "own: no target is known" in capsys.readouterr().err
    ended = verb("eval", "run", "--json", "--source", "as=a.jsonl", "--source", "other=b.jsonl")
    found = json.loads(ended.stdout)["metrics"]
    assert "--source as: loss_mask = mask, as in training" in ended.stderr
    assert "--source other: all tokens count, without loss_mask: b.jsonl: line 1: has no field mask" in ended.stderr
    assert found["eval/other/loss"] != found["eval/as/loss"]


def test_steps_without_a_trained_token_are_counted_at_the_end(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "a.jsonl", {"text": ["a" * 640], "mask": [[[0, 64]]]})
    (tmp_path / "x.toml").write_text(CONFIG)
    train_here(tmp_path / "x.toml", tmp_path / "run", "train.micro_batches=1", "data.mixing.batch_size=1")
    assert "1 step trained no token" in capsys.readouterr().err
