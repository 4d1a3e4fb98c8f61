"""What an evaluation reads: all documents or drawn ones, the same numbers in expectation, and a standard error that holds."""

from __future__ import annotations

import copy
import json
import math
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support import in_process
from tests.support.runs import held_out_documents, held_out_texts, write_tiny_config
from trainer.arrays import keyed_generator
from trainer.distributed.env import RankInfo
from trainer.distributed.strategy import Strategy
from trainer.lab.auxiliary import AuxiliaryLoss, AuxiliaryLosses
from trainer.metrics.best_effort import Diagnostics
from trainer.metrics.noise_scale import t_quantile
from trainer.objective import Auxiliary
from trainer.tools import evaluation_sample
from trainer.tools.evaluation_sample import Sample
from trainer.training.build import evaluated_rows, make_model, model_and_loss
from trainer.training.evaluator import Evaluator, eval_sets
from trainer.training.plan import Plan

CPU, FRACTION = torch.device("cpu"), 0.5
HOLDOUT = (f"eval.holdout_fraction={FRACTION}", "eval.every=1", "eval.depth=true", "ledger.capacity=4096")


def population(num: int, seed: int, spread: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """(losses, tokens) of documents whose lengths have a long tail, and whose loss per token falls with length."""
    generator = np.random.default_rng(seed)
    tokens = np.ceil(generator.lognormal(5, spread, num)).astype(np.int64)
    return tokens * (3 - 0.3 * np.log(tokens) + generator.normal(0, 0.5, num)), tokens


@pytest.mark.parametrize(("num", "spread"), [(8, 0.5), (16, 0.5), (100, 0.0), (100, 0.5)])
def test_the_error_of_a_ratio_over_documents_covers_what_all_of_them_give(num, spread):
    losses, tokens = population(400, 1, spread)
    truth, generator, found, errors = losses.sum() / tokens.sum(), np.random.default_rng(2), [], []
    for _ in range(1000):
        own = generator.permutation(400)[:num]
        found.append(losses[own].sum() / tokens[own].sum() - truth)
        errors.append(Sample({}, num, num / 400).error(losses[own], tokens[own].astype(float)))
    assert abs(np.mean(found)) < 0.25 * np.std(found)  # the bias of a ratio, which vanishes with their number
    assert 0.92 <= np.mean(np.abs(found) <= 1.96 * np.array(errors)) <= 0.98


def test_the_error_over_drawn_files_covers_where_files_differ():
    generator = np.random.default_rng(3)
    tokens = np.ceil(generator.lognormal(5, 0.5, 4000))
    files = generator.integers(0, 100, 4000)
    losses = tokens * (2 + generator.normal(0, 0.5, 100)[files] + generator.normal(0, 0.3, 4000))
    truth, covered = losses.sum() / tokens.sum(), []
    for _ in range(1000):
        those = np.flatnonzero(np.isin(files, generator.permutation(100)[:25]))
        those = generator.choice(those, 200, replace=False)
        sums = [np.bincount(files[those], each[those]) for each in (losses, tokens)]
        covered.append(abs(sums[0].sum() / sums[1].sum() - truth) <= 1.96 * Sample({}, 25, 0.0).error(*sums))
    assert 0.91 <= np.mean(covered) <= 0.99, np.mean(covered)


@pytest.mark.parametrize("num", [1, 4, 5])
def test_fewer_than_five_documents_say_nothing_of_the_others(num):
    error = Sample({}, num, 0.1).error(np.arange(float(num)), np.full(num, 2.0))
    assert math.isnan(error) == (num < 5)


def plan_of(directory: Path, *overrides: str, ranks: int = 1) -> Plan:
    return in_process.plan_of(write_tiny_config(directory), *HOLDOUT, *overrides, ranks=ranks)


def evaluate(plan: Plan, model: torch.nn.Module, sets: Sequence[Any], info: RankInfo = RankInfo(), **parts: Any):  # noqa: B008
    """The numbers of an evaluation of these sets; `parts`: some of the evaluator's, by name."""
    own = {"auxiliary": Auxiliary(), "diagnostics": Diagnostics(), "strategy": Strategy(), **parts}
    row_model, loss = model_and_loss(model, plan, CPU)
    further = own["auxiliary"], info, CPU, own["strategy"], own["diagnostics"], sets
    found = Evaluator(plan, model, row_model, loss, *further).run(1)
    assert found
    return found


def evaluated(plan: Plan, model: torch.nn.Module, **parts: Any) -> tuple[dict[str, float], str]:
    sets = eval_sets(plan, RankInfo(), CPU)
    return evaluate(plan, model, sets, **parts), sets[0].read


def odd(targets: torch.Tensor) -> torch.Tensor:
    return 4.0 * (targets % 2)


def every_document(directory: Path) -> list[str]:
    write_tiny_config(directory)
    files = sorted((directory / "corpus").rglob("*.jsonl"))
    return [json.loads(line)["text"] for file in files for line in file.read_text().splitlines()]


def from_zero(plan: Plan, model: torch.nn.Module, ids: Iterable[int], size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits and targets of a document in pieces of so many tokens, each from a zero state and in one forward."""
    targets = torch.tensor(list(ids))
    inputs = torch.cat([torch.tensor([plan.tokenizer.bos_id]), targets])[:-1]
    state = torch.zeros(1, model.state_width, dtype=next(model.parameters()).dtype)
    for tokens, wanted in zip(inputs.split(size), targets.split(size), strict=True):
        with torch.no_grad():
            yield model(tokens[None], state=state).logits[0], wanted


def parts_of(plan: Plan, model: torch.nn.Module, text: bytes) -> list[tuple[int, float]]:
    """(tokens, loss) of a document, which no evaluation cuts."""
    assert model.state_width > 0
    ((logits, wanted),) = from_zero(plan, model, text, len(text))
    return [(len(wanted), float(F.cross_entropy(logits, wanted, reduction="sum")))]


@pytest.mark.parametrize(
    ("batches", "overrides"),
    [(60, ("data.max_group_cells=2",)), (16, ("objective.token_ce=0.5",)), (8, ("objective.chunk_tokens=16",))],
    ids=["whole", "to a depth", "chunks to a depth"],
)
def test_loss_and_error_are_those_of_the_drawn_documents_own_losses(tmp_path, batches, overrides):
    plan = plan_of(tmp_path, f"eval.batches={batches}", "objective.z_loss=0", *overrides)
    torch.manual_seed(0)
    model, seen, original = make_model(plan), [], Sample.error
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sample, "error", lambda self, *sums: seen.append((self, *sums)) or original(self, *sums))
        model.embedding.eval()  # as its user keeps it
        found, read = evaluated(plan, model)
    assert (model.training, model.embedding.training) == (True, False)
    ((_, losses, sizes),) = seen
    texts, num = held_out_texts(tmp_path, FRACTION), len(losses)
    assert 8 <= num < len(texts)
    depth, share = 10**9, num / len(texts)
    if batches < 60:
        depth, share = (batches * 4 // 8) * plan.config.data.seq_len, 0.0
        assert f", each to a depth of {depth:,} tokens" in read
    assert read.startswith(f"{num} of {len(texts)} documents, {int(sizes.sum()):,} of {sum(map(len, texts)):,} tokens")
    weight = plan.config.objective.token_ce
    assert found["eval_loss"] == pytest.approx(weight * losses.sum() / sizes.sum(), rel=1e-6)
    # Each unit is one of the documents, none twice.
    left = [part for text in texts for part in parts_of(plan, model.eval(), text[:depth])]
    for length, loss in sorted(zip(sizes.tolist(), losses.tolist(), strict=True)):
        match = min(left, key=lambda each: (each[0] != length, abs(each[1] - loss)))
        assert match == (length, pytest.approx(loss, rel=1e-5))
        left.remove(match)
    # Cochran (1977), section 6.4, with the correction for a finite set, widened as for so few.
    residuals = losses - losses.sum() / sizes.sum() * sizes
    effective = sizes.sum() ** 2 / np.square(sizes).sum()
    error = math.sqrt(np.square(residuals).sum() * effective / (effective - 1)) / sizes.sum()
    error *= math.sqrt(1 - share) * t_quantile(1.96, effective - 1) / 1.96
    assert found["eval_loss_se"] == pytest.approx(weight * error, rel=1e-6)


def test_of_any_alignment_and_number_of_ranks_the_losses_are_those_of_whole_documents_read_uncut(tmp_path):
    sets = ("eval.depth=false", "eval.batches=1000000", "metrics.per_source=true", "objective.z_loss=0")
    rows = 'data.mixing={batching_mode="per_row", batch_size=4, num_streams_mixed=2}'
    torch.manual_seed(0)
    found: dict[str, dict[str, float]] = {}
    by_document: list[dict[tuple[str, int], float]] = []
    for align, ranks in (("stream", 1), ("document", 1), ("stream", 3)):
        plan = plan_of(tmp_path, *sets, rows, f'data.align="{align}"', ranks=ranks)
        if not found:
            model = make_model(plan).double().eval()
        sums, documents = dict[str, float](), dict[tuple[str, int], float]()
        for rank in range(ranks):
            (own,) = eval_sets(plan, RankInfo(rank, rank, ranks), CPU)
            micros = list(own.batches(None))
            assert all(("resets" in micro.inputs) == (align == "stream") for micro in micros)
            sizes = [len(micro.targets) for micro in micros]
            assert sizes == sorted(sizes, reverse=True)  # the last documents run without empty rows
            assert (sizes[0], sizes[-1]) == (4, 1)
            share = sum(int((micro.targets != -100).sum()) for micro in micros) / sum(
                map(len, held_out_texts(tmp_path, FRACTION))
            )
            each = evaluate(plan, model, [own])
            documents |= {where[1:]: nats for where, nats, _ in own.riders[0].found.values()}
            for key in each if ranks == 1 else ("eval_loss", "eval_accuracy"):
                sums[key] = sums.get(key, 0.0) + share * each[key]
        found[f"{align} {ranks}"] = sums
        by_document.append(documents)
    known = [part for text in held_out_texts(tmp_path, FRACTION) for part in parts_of(plan, model, text)]
    loss = sum(loss for _, loss in known) / sum(tokens for tokens, _ in known)
    own_losses = dict(zip(held_out_documents(tmp_path, FRACTION), (loss for _, loss in known), strict=True))
    assert by_document == [pytest.approx(own_losses, rel=1e-6)] * 3
    assert [each["eval_loss"] for each in found.values()] == pytest.approx([loss] * 3, rel=1e-6)
    assert {"eval_modality/a/loss", "eval_token_type/text/loss"} & found["stream 1"].keys()
    assert found["stream 1"] == pytest.approx(found["document 1"], rel=1e-6)


def test_over_draws_the_loss_of_drawn_documents_is_that_of_all(tmp_path, monkeypatch):
    """And so are losses and metrics of the model. A run's seed draws the same documents as any other."""
    torch.manual_seed(0)
    plan = plan_of(tmp_path, "eval.batches=1000000")
    model = make_model(plan)

    def add(module: Any, args: Any, given: dict[str, Any], output: Any) -> Any:
        return output._replace(metrics={"my/number": 1.0}, losses={"by_rows": odd(given["tokens"])[:, 0]})

    model.register_forward_hook(add, with_kwargs=True)
    auxiliary = AuxiliaryLosses({"by_rows": AuxiliaryLoss("rows")}, ["my/number"])
    whole, read = evaluated(plan, model, auxiliary=auxiliary)
    assert (read[:4], whole.get("eval_loss_se")) == ("all ", None)
    drawn = [eval_sets(plan_of(tmp_path, "eval.batches=60", f"run.seed={seed}"), RankInfo(), CPU)[0] for seed in (1, 2)]
    assert {*drawn[0].sample.units} == {*drawn[1].sample.units}
    (off,) = eval_sets(plan_of(tmp_path, "eval.batches=9", "data.source.second.weight=0"), RankInfo(), CPU)
    assert {source for source, _, _ in off.sample.names.values()} == {"first"}
    plan, rows = plan_of(tmp_path, "eval.batches=60"), []
    for draw in range(8):
        monkeypatch.setattr(evaluation_sample, "keyed_generator", partial(keyed_generator, draw))
        rows.append(evaluated(plan, model, auxiliary=auxiliary)[0])
    assert {row["eval_my/number"] for row in (whole, *rows)} == {1.0}
    for key, spread in (("eval_objective/token_ce", 2.5), ("eval_objective/by_rows", 0.0)):
        deviations = np.array([row[key] - whole[key] for row in rows])
        assert abs(deviations.mean()) < 3 * deviations.std() / math.sqrt(len(rows))
        if spread:
            errors = np.array([row["eval_loss_se"] for row in rows])
            assert (np.abs(deviations) <= spread * errors).mean() >= 0.8
    assert evaluated(plan, model, auxiliary=auxiliary)[0] == rows[-1]  # the same documents at every start


def test_by_default_all_is_read_where_that_is_cheap_and_the_draw_is_the_same_for_any_number_of_ranks(tmp_path):
    long = "train.steps=2000"
    cheap, dear = plan_of(tmp_path, "eval.every=1000", long), plan_of(tmp_path, "eval.every=200", long)
    small = [f"data.source.{name}.mixing.batch_size=2" for name in ("first", "second")]
    assert evaluated_rows(plan_of(tmp_path, *small)) == 2, "not the 4 of [data.mixing]"
    (everything,) = eval_sets(cheap, RankInfo(), CPU)
    assert (everything.sample, everything.read[:4]) == (None, "all ")
    (alone,) = eval_sets(dear, RankInfo(), CPU)
    wide = plan_of(tmp_path, "eval.every=200", long, ranks=3)
    ranks = [eval_sets(wide, RankInfo(rank, rank, 3), CPU)[0] for rank in range(3)]
    assert {each.read for each in ranks} == {alone.read}
    read = [int((micro.targets != -100).sum()) for each in (alone, *ranks) for micro in each.batches(None)]
    num = len(list(alone.batches(None)))
    assert sum(read[:num]) == sum(read[num:])
    # Cells: 15 % of those that 200 steps of two micro-batches of four rows train on, those that continue a document
    # being run twice.
    by_depth = [micro.carry.cell_index[(micro.targets != -100).any(1).numpy()] for micro in alone.batches(None)]
    cells = np.concatenate(by_depth)
    assert 0.7 * 240 < len(cells) + np.count_nonzero(cells) < 1.1 * 240
    (once,) = eval_sets(dear, RankInfo(), CPU, type("Bare", (), {"state_width": 0}))
    assert 0.7 * 240 < sum(int((micro.targets != -100).any(1).sum()) for micro in once.batches(None)) < 1.1 * 240
    (twice,) = eval_sets(plan_of(tmp_path, "eval.every=200", "train.ema=0.9", long), RankInfo(), CPU)
    by_depth = [micro.carry.cell_index[(micro.targets != -100).any(1).numpy()] for micro in twice.batches(None)]
    cells = np.concatenate(by_depth)
    assert 0.7 * 120 < len(cells) + np.count_nonzero(cells) < 1.1 * 120, "it is repeated with averaged weights"
    (least,) = eval_sets(plan_of(tmp_path, "eval.every=1", long), RankInfo(), CPU)
    assert re.match(r"8 of \d+ documents, [12]\d\d of .*, each to a depth of 32 tokens$", least.read)
    # Of few documents, each gets its part of the budget of 60 cells, and the error is not that of a set that was read whole.
    (few,) = eval_sets(plan_of(tmp_path, "eval.every=50", long, "eval.holdout_fraction=0.1"), RankInfo(), CPU)
    num, depth = map(int, re.match(r"(\d) of \1 documents, .*, each to a depth of (\d+) tokens$", few.read).groups())
    assert num < 8
    assert depth == ((60 // num - 1) // 2 + 1) * 16
    assert few.sample.share == 0


def test_of_too_many_bytes_only_drawn_files_are_counted_and_the_error_is_over_files(tmp_path, monkeypatch):
    for at in range(9):
        np.save(tmp_path / f"{at}.npy", np.arange(99).astype("u" * (at % 2) + "int64"))
    ids, plan = f"eval.source=[{{name='x',paths=['{tmp_path}/*.npy'],batches=1}}]", plan_of(tmp_path, "eval.every=1000")
    assert eval_sets(plan_of(tmp_path, "eval.every=9", ids), RankInfo(), CPU)[-1].read.startswith("8 of 9 documents")
    sizes = [file.stat().st_size for file in (tmp_path / "corpus").rglob("*.jsonl")]
    monkeypatch.setattr(evaluation_sample, "COUNTED_BYTES", sum(sizes) / 2)
    monkeypatch.setattr(evaluation_sample, "LEAST", 4)
    (found,) = eval_sets(plan, RankInfo(), CPU)
    num_files = len(sizes) // 2
    assert found.read.endswith(f"in {num_files} files")
    assert set(found.sample.units.values()) == set(range(found.sample.num_units)) <= set(range(num_files))


END = "<|end|>"


def test_bits_per_byte_are_those_of_the_text_also_where_files_hold_ids(tmp_path):
    """Of a byte-level BPE; the file of ids ends each document with a mark, which is no text; in a text it is."""
    tokenizers = pytest.importorskip("tokenizers")
    texts = [*every_document(tmp_path), f"ünïcödé {END} 漢字 🙂 " * 3]
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        texts, tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=[END], initial_alphabet=alphabet)
    )
    made.save(str(tmp_path / "tokenizer.json"))
    made.encode_special_tokens = True
    ids = [made.encode(text).ids for text in texts]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    np.save(tmp_path / "ids.npy", np.concatenate([[*each, made.token_to_id(END)] for each in ids]).astype(np.uint16))
    assert made.token_to_id(END) == 0
    text = f'{{name="text",paths=["{tmp_path}/text.jsonl"]}}'
    ids_file = f'{{name="ids",paths=["{tmp_path}/ids.npy"],eod=0}}'
    sets = [f'data.tokenizer="{tmp_path}/tokenizer.json"', f"eval.source=[{text},{ids_file}]"]
    plan = plan_of(tmp_path, "eval.holdout_fraction=0", *sets)
    torch.manual_seed(0)
    model = make_model(plan).eval()
    found, _ = evaluated(plan, model)
    nats = num_bytes = 0.0
    size = plan.config.data.seq_len * plan.config.data.max_group_cells
    for each, text in zip(ids, texts, strict=True):
        for logits, wanted in from_zero(plan, model, each, size):
            nats += float(F.cross_entropy(logits, wanted, reduction="sum"))
        num_bytes += len(text.encode())
    assert found["eval/text/bits_per_byte"] == pytest.approx(nats / math.log(2) / num_bytes, rel=1e-6)
    assert found["eval/ids/bits_per_byte"] == pytest.approx(found["eval/text/bits_per_byte"], rel=1e-6)
    assert found["eval/ids/loss"] != pytest.approx(found["eval/text/loss"], rel=1e-6)
    # A mark that data.eod puts behind each text is none of it either.
    alone, nats = f"eval.source=[{{name='t',paths=['{tmp_path}/text.jsonl']}}]", 0.0
    plan = plan_of(tmp_path, "eval.holdout_fraction=0", "data.eod=0", alone)
    model = make_model(plan).eval()
    for text in texts:
        for logits, wanted in from_zero(plan, model, [*text.encode(), 0], 9999):
            nats += float(F.cross_entropy(logits[wanted > 0], wanted[wanted > 0], reduction="sum"))
    found, _ = evaluated(plan, model)
    assert found["eval/t/bits_per_byte"] == pytest.approx(nats / math.log(2) / num_bytes, rel=1e-6)


def test_ranks_that_hold_shards_run_as_many_forwards_however_uneven_the_documents_are(tmp_path):
    """Ranks that hold shards of a model must run as many forwards, or wait for ever."""
    generator = np.random.default_rng(1)
    for modality in "ab":
        (tmp_path / "uneven" / modality).mkdir(parents=True)
        for stream in range(3):
            texts = [json.dumps({"text": "x y" * int(generator.integers(1, 400))}) for _ in range(7)]
            (tmp_path / "uneven" / modality / f"{stream}.jsonl").write_text("\n".join(texts) + "\n")
    source = f'data.source=[{{name="u", root="{tmp_path / "uneven"}"}}]'
    overrides = (source, "eval.every=1", "eval.holdout_fraction=0.4", "eval.batches=100000")
    plan = in_process.plan_of(write_tiny_config(tmp_path), *overrides, ranks=3)
    model = make_model(plan)
    barrier, said, forwards = threading.Barrier(3, timeout=60), [0] * 3, [0] * 3

    def run(rank: int) -> int:
        class Lockstep(Strategy):
            def most(self, number: int) -> int:
                said[rank] = number
                barrier.wait()
                found = max(said)
                barrier.wait()
                return found

        def counted(*given: object) -> None:
            forwards[rank] += 1

        own = copy.deepcopy(model)
        own.register_forward_hook(counted)
        sets = eval_sets(plan, RankInfo(rank, rank, 3), CPU)
        evaluate(plan, own, sets, strategy=Lockstep())
        return len(list(sets[0].batches(None)))

    with ThreadPoolExecutor(3) as pool:
        num_batches = list(pool.map(run, range(3)))
    assert len(set(num_batches)) > 1, "all ranks have as much to read: nothing is shown"
    assert len(set(forwards)) == 1
    assert forwards[0] >= max(num_batches)
