"""What an evaluation reads: all documents or drawn ones, the same numbers in expectation, and a standard error that holds."""

from __future__ import annotations

import copy
import json
import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.support.runs import held_out_texts, write_tiny_config
from trainer.cli.parts import PARTS
from trainer.config.load import load_config
from trainer.data.shard_source import ShardSource
from trainer.distributed.env import RankInfo
from trainer.distributed.strategy import Strategy
from trainer.errors import UserError
from trainer.lab.auxiliary import AuxiliaryLoss, AuxiliaryLosses
from trainer.metrics.best_effort import Diagnostics
from trainer.metrics.noise_scale.estimate import t_quantile
from trainer.objective.loss import Auxiliary
from trainer.tools import evaluation_sample
from trainer.tools.evaluation_sample import Drawn, Sample, chances_of, draw_by_size
from trainer.training.evaluator import Evaluator, eval_sets
from trainer.training.setup.parts import make_model, model_and_loss
from trainer.training.setup.plan import Plan, make_plan

CPU, FRACTION = torch.device("cpu"), 0.5
HOLDOUT = (f"eval.holdout_fraction={FRACTION}", "eval.every=1", "eval.depth=true", "ledger.capacity=4096")


def population(num: int, seed: int, spread: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """(losses, tokens) of documents whose lengths have a long tail, and whose loss per token falls with length."""
    generator = np.random.default_rng(seed)
    tokens = np.ceil(generator.lognormal(5, spread, num)).astype(np.int64)
    return tokens * (3 - 0.3 * np.log(tokens) + generator.normal(0, 0.5, num)), tokens


def widening(num: int) -> float:
    """Student's t for as many draws, relative to the normal quantile."""
    return t_quantile(1.96, num - 1) / 1.96


def estimate(losses: np.ndarray, tokens: np.ndarray, drawn: Drawn) -> tuple[float, float]:
    """(mean loss per token, standard error) of the population, from drawn documents."""
    own, sizes = losses[drawn.chosen], tokens[drawn.chosen]
    sample = Sample({}, sizes, drawn.chances, drawn.spread)
    error = sample.error(own)
    assert error is not None
    return float(sample.weights @ own / (sample.weights @ sizes)), error


@given(
    sizes=st.lists(st.integers(1, 1000), min_size=3, max_size=30).map(np.array),
    num=st.integers(2, 30),
    seed=st.integers(0, 2**32),
)
def test_probabilities_follow_sizes_and_the_sample_represents_all_tokens(sizes, num, seed):
    num = min(num, len(sizes))
    chances = chances_of(sizes, num)
    assert chances.sum() == pytest.approx(num)
    open_ones = chances < 1
    if open_ones.any():
        rate = chances[open_ones] / sizes[open_ones]
        assert rate.max() == pytest.approx(rate.min())
        assert (sizes[~open_ones] * rate.max() >= 1 - 1e-9).all()  # too large to be drawn at this rate
    drawn = draw_by_size(sizes, num, np.random.default_rng(seed))
    assert len(set(drawn.chosen.tolist())) == num
    assert (sizes[drawn.chosen] / drawn.chances).sum() == pytest.approx(sizes.sum())


def test_each_document_is_drawn_as_often_as_its_probability_says():
    sizes, generator, counts = np.array([1, 2, 3, 5, 40, 9]), np.random.default_rng(0), np.zeros(6)
    for _ in range(3_000):
        counts[draw_by_size(sizes, 3, generator).chosen] += 1
    assert counts / 3_000 == pytest.approx(chances_of(sizes, 3), abs=0.04)


@pytest.mark.parametrize(("num", "spread"), [(8, 0.5), (16, 1.0), (100, 0.0), (100, 1.5), (300, 1.0)])
def test_the_estimate_has_no_bias_and_its_error_covers(num, spread):
    losses, tokens = population(400, 1, spread)
    truth, generator = losses.sum() / tokens.sum(), np.random.default_rng(2)
    draws = [estimate(losses, tokens, draw_by_size(tokens, num, generator)) for _ in range(1000)]
    found, errors = np.array(draws).T
    assert abs(found.mean() - truth) < 4 * found.std() / math.sqrt(len(draws))
    assert 0.93 <= np.mean(np.abs(found - truth) <= 1.96 * errors) <= 0.97
    assert math.sqrt(np.mean(np.square(errors))) == pytest.approx(found.std() * widening(num), rel=0.06)


def test_the_error_over_drawn_files_covers_where_files_differ():
    generator = np.random.default_rng(3)
    tokens = np.ceil(generator.lognormal(5, 1, 4000)).astype(np.int64)
    files = np.sort(generator.integers(0, 100, 4000))
    losses = tokens * (2 + generator.normal(0, 0.5, 100)[files] + generator.normal(0, 0.3, 4000))
    truth, sizes, covered = losses.sum() / tokens.sum(), np.bincount(files, tokens), []
    for _ in range(1000):
        few = draw_by_size(sizes, 25, generator)
        those = np.flatnonzero(np.isin(files, few.chosen))
        by_file = dict(zip(few.chosen.tolist(), few.chances.tolist(), strict=True))
        chances = np.array([by_file[file] for file in files[those].tolist()])
        drawn = draw_by_size(tokens[those] / chances, 200, generator)
        those, chances = those[drawn.chosen], chances[drawn.chosen]
        sample = Sample({}, tokens[those], drawn.chances, drawn.spread, files[those], chances)
        found = sample.weights @ losses[those] / (sample.weights @ tokens[those])
        error = sample.error(losses[those])
        assert error is not None
        covered.append(abs(found - truth) <= 1.96 * error)
    assert 0.91 <= np.mean(covered) <= 0.985, np.mean(covered)


@pytest.mark.parametrize("num", [1, 4, 5])
def test_fewer_than_five_documents_say_nothing_of_the_others(num):
    error = Sample({}, np.full(num, 2), np.full(num, 0.1), 0.01).error(np.arange(float(num)))
    assert (error is None) == (num < 5)


def plan_of(directory: Path, *overrides: str, ranks: int = 1) -> Plan:
    config = write_tiny_config(directory)
    return make_plan(load_config(config, [*HOLDOUT, *overrides]), config, ranks, parts=PARTS)


def evaluate(plan: Plan, model: torch.nn.Module, sets: Sequence[Any], info: RankInfo = RankInfo(), **parts: Any):  # noqa: B008
    """The numbers of an evaluation of these sets; `parts`: some of the evaluator's, by name."""
    own = {"auxiliary": Auxiliary(), "diagnostics": Diagnostics(), "strategy": Strategy(), **parts}
    row_model, loss = model_and_loss(model, plan, CPU)
    order = own["auxiliary"], info, CPU, own["diagnostics"], sets
    found = Evaluator(plan, model, row_model, loss, *order, strategy=own["strategy"]).run(1)
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
    parts = []
    for logits, wanted in from_zero(plan, model, text, len(text)):
        z = plan.config.objective.z_loss * logits.logsumexp(-1).square().sum()
        parts.append((len(wanted), float(F.cross_entropy(logits, wanted, reduction="sum") + z)))
    return parts


@pytest.mark.parametrize(
    "overrides",
    [(), ("data.max_group_cells=2",), ("data.seq_len=64",), ("objective.z_loss=0.01", "objective.chunk_tokens=16")],
    ids=["plain", "cut", "short", "chunked_z"],
)
def test_the_error_is_that_of_the_drawn_documents_own_losses(tmp_path, overrides):
    plan = plan_of(tmp_path, "eval.batches=16", "data.max_group_cells=64", *overrides)
    torch.manual_seed(0)
    model = make_model(plan)
    seen = []
    original = Sample.error
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sample, "error", lambda self, totals: seen.append((self, totals)) or original(self, totals))
        found, read = evaluated(plan, model)
    ((sample, losses),) = seen
    texts = held_out_texts(tmp_path, FRACTION)
    known = [part for text in texts for part in parts_of(plan, model.eval(), text)]
    num_all, num = sum(map(len, texts)), len(sample.tokens)
    assert read == f"{num} of {len(texts)} documents, {sample.tokens.sum():,} of {num_all:,} tokens"
    assert found["eval_loss"] == pytest.approx(sample.weights @ losses / num_all, rel=1e-6)
    # Each unit is one of the documents, none twice.
    left = list(known)
    for length, loss in sorted(zip(sample.tokens.tolist(), losses.tolist(), strict=True)):
        match = min(left, key=lambda each: (each[0] != length, abs(each[1] - loss)))
        assert match == (length, pytest.approx(loss, rel=1e-5))
        left.remove(match)
    # Hartley and Rao's variance, pair by pair.
    lengths = np.array([length for length, _ in known])
    chances, ratios = num * sample.tokens / num_all, losses / sample.tokens
    assert (num * lengths / num_all < 1).all(), "none is always drawn, as this formula has it"
    spread = np.square(num * lengths / num_all).sum()
    pairs = sum(
        (1 - chances[i] - chances[j] + spread / num) * (ratios[i] - ratios[j]) ** 2
        for j in range(num)
        for i in range(j)
    )
    assert found["eval_loss_se"] == pytest.approx(math.sqrt(pairs / (num * num * (num - 1))) * widening(num), rel=1e-6)


def test_of_any_alignment_and_number_of_ranks_the_losses_are_those_of_whole_documents_read_uncut(tmp_path):
    sets = ("eval.depth=false", "eval.batches=1000000", "metrics.per_source=true", "data.max_group_cells=64")
    rows = 'data.mixing={batching_mode="per_row", batch_size=4, num_streams_mixed=2}'
    torch.manual_seed(0)
    found: dict[str, dict[str, float]] = {}
    for align, ranks in (("stream", 1), ("document", 1), ("stream", 3)):
        plan = plan_of(tmp_path, *sets, rows, f'data.align="{align}"', ranks=ranks)
        if not found:
            model = make_model(plan).double().eval()
        sums: dict[str, float] = {}
        for rank in range(ranks):
            (own,) = eval_sets(plan, RankInfo(rank, rank, ranks), CPU)
            micros = list(own.batches(None))
            assert all(("resets" in micro.inputs) == (align == "stream") for micro in micros)
            assert all(len(micro.targets) == 4 for micro in micros)
            share = sum(int((micro.targets != -100).sum()) for micro in micros) / sum(
                map(len, held_out_texts(tmp_path, FRACTION))
            )
            each = evaluate(plan, model, [own])
            for key in each if ranks == 1 else ("eval_loss", "eval_accuracy"):
                sums[key] = sums.get(key, 0.0) + share * each[key]
        found[f"{align} {ranks}"] = sums
    known = [part for text in held_out_texts(tmp_path, FRACTION) for part in parts_of(plan, model, text)]
    loss = sum(loss for _, loss in known) / sum(tokens for tokens, _ in known)
    assert [each["eval_loss"] for each in found.values()] == pytest.approx([loss] * 3, rel=1e-6)
    assert {"eval_modality/a/loss", "eval_token_type/text/loss"} & found["stream 1"].keys()
    assert found["stream 1"] == pytest.approx(found["document 1"], rel=1e-6)


@pytest.mark.parametrize("has_others", [pytest.param(False, marks=pytest.mark.slow), True])
def test_over_seeds_the_loss_of_drawn_documents_is_that_of_all(tmp_path, has_others):
    """Whose metrics a model would have to give row by row, so that they are left out."""
    torch.manual_seed(0)
    plan = plan_of(tmp_path, "eval.batches=1000000")
    model = make_model(plan)
    own = {"by_tokens": AuxiliaryLoss(), "by_rows": AuxiliaryLoss("rows")} if has_others else {}

    def add(module: Any, args: Any, given: dict[str, Any], output: Any) -> Any:
        first = odd(given["tokens"])[:, 0]
        values = {"by_tokens": first[:, None].expand(given["tokens"].shape), "by_rows": 2 * first}
        return output._replace(metrics={"my/number": 1.0}, losses=values if own else None)

    model.register_forward_hook(add, with_kwargs=True)
    auxiliary = AuxiliaryLosses(own, ["my/number"])
    whole, read = evaluated(plan, model, auxiliary=auxiliary)
    assert read.startswith("all ")
    assert "eval_loss_se" not in whole
    plans = [plan_of(tmp_path, "eval.batches=16", f"run.seed={seed}") for seed in range(16)]
    rows = [evaluated(plan, model, auxiliary=auxiliary)[0] for plan in plans]
    assert ["eval_my/number" in row for row in (whole, *rows)] == [True] + [False] * 16
    deviations = np.array([row["eval_loss"] - whole["eval_loss"] for row in rows])
    errors = np.array([row["eval_loss_se"] for row in rows])
    assert abs(deviations.mean()) < 3 * deviations.std() / math.sqrt(len(rows))
    assert (np.abs(deviations) <= 2.5 * errors).mean() >= 0.8
    assert deviations.std() == pytest.approx(math.sqrt(np.mean(np.square(errors))), rel=0.5)
    assert evaluated(plans[0], model, auxiliary=auxiliary)[0] == rows[0]  # the same documents at every start


def test_by_default_all_is_read_where_that_is_cheap_and_the_draw_is_the_same_for_any_number_of_ranks(tmp_path, caplog):
    long = "train.steps=2000"
    cheap, dear = plan_of(tmp_path, "eval.every=1000", long), plan_of(tmp_path, "eval.every=200", long)
    (everything,) = eval_sets(cheap, RankInfo(), CPU)
    assert everything.sample is None
    assert everything.read.startswith("all ")
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
    (once,) = eval_sets(dear, RankInfo(), CPU, has_state=False)
    assert 0.7 * 240 < sum(int((micro.targets != -100).any(1).sum()) for micro in once.batches(None)) < 1.1 * 240
    assert "eval.every" not in caplog.text
    eval_sets(plan_of(tmp_path, "eval.every=1", long), RankInfo(), CPU)  # eight documents take longer than a step
    assert "eval.every: an evaluation reads 8 of " in caplog.text


def test_a_loss_of_the_model_that_is_no_tensor_is_named(tmp_path):
    plan = plan_of(tmp_path, "eval.batches=8")
    model = make_model(plan)
    model.register_forward_hook(lambda module, given, output: output._replace(losses={"balance": 0.5}))
    with pytest.raises(UserError, match="it returns the loss balance, which is not in its loss_keys"):
        evaluated(plan, model)


def test_of_too_many_bytes_only_drawn_files_are_counted_and_the_error_is_over_files(tmp_path, monkeypatch):
    plan = plan_of(tmp_path, "eval.every=1000")
    sizes = [file.stat().st_size for file in (tmp_path / "corpus").rglob("*.jsonl")]
    monkeypatch.setattr(evaluation_sample, "COUNTED_BYTES", sum(sizes) / 2)
    monkeypatch.setattr(evaluation_sample, "LEAST", 4)
    opened: set[str] = set()
    original = ShardSource.open
    monkeypatch.setattr(
        ShardSource,
        "open",
        lambda self, stream: opened.add(stream.relative_path) or original(self, stream),
    )
    (found,) = eval_sets(plan, RankInfo(), CPU)
    files = {name for name in opened if name.endswith(".jsonl")}
    assert len(files) == len(sizes) // 2
    assert found.read.endswith(f"in {len(files)} of {len(sizes)} files")
    assert found.sample is not None
    assert found.sample.files is not None
    assert set(found.sample.files.tolist()) <= set(range(len(files)))


END = "<|end|>"


def test_bits_per_byte_are_those_of_the_text_also_where_files_hold_ids(tmp_path):
    """Of a byte-level BPE; the file of ids ends each document with a mark, which is no text."""
    tokenizers = pytest.importorskip("tokenizers")
    texts = [*every_document(tmp_path), "ünïcödé 漢字 🙂 " * 9]
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        texts, tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=[END], initial_alphabet=alphabet)
    )
    made.save(str(tmp_path / "tokenizer.json"))
    ids = [made.encode(text).ids for text in texts]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    np.save(tmp_path / "ids.npy", np.concatenate([[*each, made.token_to_id(END)] for each in ids]).astype(np.uint16))
    assert made.token_to_id(END) == 0
    text, ids_file = (
        f'{{name="text",paths=["{tmp_path}/text.jsonl"]}}',
        f'{{name="ids",paths=["{tmp_path}/ids.npy"],eod=0}}',
    )
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


def test_bits_per_byte_of_bytes_are_the_cross_entropy(tmp_path):
    plan = plan_of(tmp_path, "eval.batches=8", "objective.z_loss=0.01")
    found, _ = evaluated(plan, make_model(plan))
    assert found["eval_bits_per_byte"] == pytest.approx(found["eval_objective/token_ce"] / math.log(2), rel=1e-12)
    assert found["eval_loss"] > found["eval_objective/token_ce"]


def test_ranks_that_hold_shards_run_as_many_forwards_however_uneven_the_documents_are(tmp_path):
    """Ranks that hold shards of a model must run as many forwards, or wait for ever."""
    generator = np.random.default_rng(1)
    for modality in "ab":
        (tmp_path / "uneven" / modality).mkdir(parents=True)
        for stream in range(3):
            texts = [json.dumps({"text": "x y" * int(generator.integers(1, 400))}) for _ in range(7)]
            (tmp_path / "uneven" / modality / f"{stream}.jsonl").write_text("\n".join(texts) + "\n")
    config = write_tiny_config(tmp_path)
    source = f'data.source=[{{name="u", root="{tmp_path / "uneven"}"}}]'
    overrides = [source, "eval.every=1", "eval.holdout_fraction=0.4", "eval.batches=100000"]
    plan = make_plan(load_config(config, overrides), config, 3, parts=PARTS)
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
