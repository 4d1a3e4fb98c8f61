"""How right the noise scale is on rows that continue documents: prints what docs/gns_bias.csv and docs/gns.md record.

Frozen weights, corpora that this script makes (documents, and files, each in a style of its own), and the rows that the
trainer's own data sets give. The truth is computed without the estimator: from the gradients of 3,000 independent
rows of the same depths, one by one, each from the state behind the tokens before it.

    python scripts/gns_bias.py                # all settings, about ten minutes on two cores
    python scripts/gns_bias.py --only 300     # those whose name has this in it
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import cross_entropy

from trainer.data.blend import BlendDataset, BlendSource
from trainer.data.documents import ReadOptions
from trainer.data.groups import CutOptions
from trainer.data.lanes import LaneBlend, count_documents, document_limits, num_sets
from trainer.data.layout import discover_direct
from trainer.data.loader import take_apart
from trainer.data.shard_source import MixOptions, ShardSource
from trainer.data.tokenizer import IdsTokenizer
from trainer.data.weights import ConstantWeight
from trainer.lab.stream_mixing import StreamMixingDataset
from trainer.ledger import Ledger, LedgerOptions
from trainer.metrics.gradient_noise import GradientNoiseScale
from trainer.model.encoder import build
from trainer.options import BatchingMode

COLUMNS = ("documents, rows x m (8 x 4)", "spread", "independent rows", "measured", "ratio", "bounds that hold it")
VOCAB, SEEDS, STEPS, ORACLE_ROWS = 24, 10, 48, 3000


@dataclass(frozen=True)
class Setting:
    name: str
    rows: int = 8
    m: int = 4
    length: int = 64
    sizes: tuple[float, ...] = (6.0,)  # of documents, in rows; each is as frequent
    documents: int = 4096
    files: int = 256
    spread: int = 16
    shards: int = 1
    runs_on: bool = True
    trained: int = 30  # steps before the weights are frozen
    mode: BatchingMode = "per_row"
    style: float = 0.0  # of files, against that of documents
    steps: int = STEPS


SETTINGS = (
    Setting("6 rows"),
    Setting("6 rows, spread 1", spread=1),
    Setting("6 rows, later weights", trained=300),
    Setting("6 rows, T = 256", length=256, rows=4, m=2, steps=40),
    Setting("1 row", sizes=(1.0,), documents=8192),
    Setting("1 row, spread 1", sizes=(1.0,), spread=1, documents=8192),
    Setting("3 rows, 2 x 16", sizes=(3.0,), rows=2, m=16),
    Setting("3 rows, 16 x 2", sizes=(3.0,), rows=16, m=2),
    Setting("300 rows, 4 x 8", sizes=(300.0,), rows=4, m=8, length=32, documents=2048),
    Setting("300 rows, spread 1", sizes=(300.0,), rows=4, m=8, length=32, spread=1, documents=1024, steps=64),
    Setting("1, 3, 6 and 30 rows", sizes=(1.0, 3.0, 6.0, 30.0)),
    Setting("half rows to 9, aligned", sizes=(0.5, 2.3, 4.6, 9.1), runs_on=False),
    Setting("6 rows, aligned, 2 x 16", rows=2, m=16, runs_on=False),
    Setting("6 rows, 2 ranks", rows=4, m=4, shards=2),
    Setting("3 rows, 4 ranks", sizes=(3.0,), rows=2, m=4, shards=4),
    Setting("24 files of 300", sizes=(3.0,), documents=7200, files=24, style=0.7),
    Setting("1,000 documents", documents=1000, files=50),
    Setting("100 documents", documents=100, files=10),
    Setting("40 documents", documents=40, files=4),
    Setting("per_stream", mode="per_stream", files=64, documents=2048, rows=8, m=2, style=0.7),
    Setting("device_per_stream, 2 ranks", mode="device_per_stream", shards=2, files=64, documents=2048, m=2, style=0.7),
)


class Corpus:
    """Documents in styles of their own, as files of ids; 0 ends a document."""

    def __init__(self, setting: Setting, folder: Path, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.setting, self.paths, self.texts = setting, [], []
        chain = rng.dirichlet(np.full(VOCAB, 0.3), size=VOCAB)
        per_file = setting.documents // setting.files
        for number in range(setting.files):
            own, parts = rng.dirichlet(np.full(VOCAB, 0.4)), []
            for _ in range(per_file):
                style = setting.style * own + (1 - setting.style) * rng.dirichlet(np.full(VOCAB, 0.4))
                size = max(int(rng.choice(setting.sizes) * setting.length), 2)
                parts.append(np.append(_text(chain, style, size - 1, rng), 0))
                self.texts.append(parts[-1].astype(np.int64))
            self.paths.append(folder / f"{number:04d}.npy")
            np.save(self.paths[-1], np.concatenate(parts).astype(np.uint8))


def _text(chain: NDArray[np.float64], style: NDArray[np.float64], size: int, rng: np.random.Generator) -> Any:
    """Ids from 1 on: each, by turns of chance, drawn after the one before it or in the document's style."""
    ids = np.empty(size, np.int64)
    own = rng.choice(VOCAB, size, p=style)
    is_own, uniforms, ends = rng.random(size) < 0.5, rng.random(size), chain.cumsum(axis=1)
    last = 0
    for at in range(size):
        last = own[at] if is_own[at] else min(int(np.searchsorted(ends[last], uniforms[at])), VOCAB - 1)
        ids[at] = last
    return ids + 1


def frozen(corpus: Corpus, device: torch.device) -> Any:
    """A small model, trained on random stretches of documents."""
    torch.manual_seed(1)
    model = build(VOCAB + 2, 16, 1).to(device)
    optimizer, rng = torch.optim.Adam(model.parameters(), 5e-3), np.random.default_rng(5)
    for _ in range(corpus.setting.trained):
        whole = np.concatenate([corpus.texts[at] for at in rng.integers(len(corpus.texts), size=200)])
        cut = torch.tensor(whole[: len(whole) // 33 * 33].reshape(-1, 33)[:256], device=device)
        output = model(tokens=cut[:, :-1], state=None)
        optimizer.zero_grad()
        loss: Any = cross_entropy(output.logits.flatten(0, 1), cut[:, 1:].flatten())
        loss.backward()
        optimizer.step()
    return model


def truth(corpus: Corpus, model: Any, device: torch.device, visits: int, num_rows: int) -> tuple[float, float]:
    """(B, its standard error) of rows of lanes that begin anew for each; noise and signal are averaged over depths."""
    setting, rng = corpus.setting, np.random.default_rng(77)
    parameters, bos = [*model.parameters()], VOCAB + 1
    gradients, weights = [], []
    for number in range(num_rows):
        stop = (number % visits + 1) * setting.length
        row = _lane_row(corpus, rng, stop)
        loss_sum, count = torch.zeros((), device=device), 0
        for document, start in row:  # its tokens of the row, from `start` on
            ids = torch.tensor([bos, *document.tolist()], device=device)
            state = None
            if start:
                with torch.no_grad():
                    state = model(tokens=ids[None, :start], state=None).state
            output = model(tokens=ids[None, start:-1], state=state)
            loss_sum = loss_sum + cross_entropy(output.logits[0], ids[start + 1 :], reduction="sum")
            count += len(document) - start
        found = torch.autograd.grad(loss_sum, parameters)
        gradients.append(torch.cat([each.flatten() for each in found]).double().cpu())
        weights.append(count)
    h, w = torch.stack(gradients), torch.tensor(weights, dtype=torch.float64)
    depth, part = torch.arange(len(h)) % visits, torch.arange(len(h)) // visits % 10
    values = []
    for left_out in range(-1, 10):  # all, then a jackknife by tenths
        kept = part != left_out
        pairs = [_noise_and_signal(h[kept & (depth == at)], w[kept & (depth == at)]) for at in range(visits)]
        values.append(sum(noise for noise, _ in pairs) / sum(signal for _, signal in pairs))
    return values[0], math.sqrt(9 * statistics.pvariance(values[1:]))


def _lane_row(corpus: Corpus, rng: np.random.Generator, stop: int) -> list[tuple[NDArray[np.int64], int]]:
    """The documents, cut at their ends in it, of the row [stop - T, stop) of a lane that begins with a new one."""
    setting, at, row = corpus.setting, 0, []
    while at < stop:
        document = corpus.texts[rng.integers(len(corpus.texts))]
        size = len(document)
        taken = size if setting.runs_on else -(-size // setting.length) * setting.length
        if at + taken > stop - setting.length:
            first = max(stop - setting.length - at, 0)
            row.append((document[: min(size, stop - at)], first))
        at += taken
    return row


def _noise_and_signal(h: torch.Tensor, w: torch.Tensor) -> tuple[float, float]:
    """tr(Sigma) of a row of the mean weight, and |G|^2, of rows with gradients h of their sums of losses over w tokens.

    The gradient of many rows is the ratio sum(h) / sum(w), whose noise is that of h - w G.
    """
    n, mean = len(h), h.sum(0) / w.sum()
    noise = float(((h - w[:, None] * mean) / w.mean()).square().sum() / (n - 1))
    kish = float(w.square().mean() / w.mean() ** 2)  # a row of effective weight is the unit
    return noise / kish, float(mean.square().sum()) - noise / n


def datasets(corpus: Corpus, seed: int) -> tuple[list[Any], int]:
    """The data set of each shard, and the groups of lanes."""
    setting = corpus.setting
    streams = discover_direct([str(path) for path in corpus.paths])
    cut = CutOptions("text", setting.length)
    read = ReadOptions(IdsTokenizer(VOCAB + 1), eod=0)
    made, groups = [], 0
    for shard in range(setting.shards):
        how: dict[str, Any] = {"shard": shard, "num_shards": setting.shards}
        if setting.mode != "per_row":
            mix = MixOptions(8, batching_mode=setting.mode, batch_size=setting.rows, seed=seed)
            dataset: Any = StreamMixingDataset(streams, cut, read, mix, **how)
            made.append(BlendDataset([BlendSource("text", dataset, ConstantWeight(1.0))], seed=seed))
            continue
        limits = document_limits({"text": count_documents(streams, cut, read)}, {"text": 1.0}, setting.shards)
        groups, _ = num_sets(setting.m, setting.rows, setting.spread, limits)
        mix = MixOptions(min(groups * setting.rows, len(streams), 256), seed=seed)
        source = BlendSource("text", ShardSource(streams, cut, read, mix, **how), ConstantWeight(1.0))
        shape: dict[str, Any] = {"rows": setting.rows, "row_tokens": setting.length, "lane_sets": {1: groups}}
        made.append(LaneBlend([source], seed=seed, tokenizer=read.tokenizer, runs_on=setting.runs_on, **shape))
    return made, groups


def measure(corpus: Corpus, model: Any, device: torch.device, seed: int) -> tuple[GradientNoiseScale, list[Any], int]:
    """One run of steps with frozen weights: its averages, the estimates of its steps, and the groups."""
    setting = corpus.setting
    made, groups = datasets(corpus, seed)
    ledgers = [Ledger(LedgerOptions(), state_width=model.state_width, device=device) for _ in made]
    gns, windows, number = GradientNoiseScale(model), [], setting.m * setting.shards
    for step in range(setting.steps):
        gns.begin_window(number, spread=max(groups // setting.m, 1), by_rank=0 < groups < setting.m)
        model.zero_grad()
        for k in range(number):
            shard = k % setting.shards
            batch = dict(next(made[shard]))
            on_device = [key for key in ("tokens", "targets", "resets") if key in batch]
            batch |= {key: torch.as_tensor(batch[key], device=device) for key in on_device}
            micro = take_apart(batch, None)
            carry: Any = micro.carry
            if k < setting.shards:
                ledgers[shard].begin_step(step)
            state = ledgers[shard].lookup(carry.group_ids, carry.cell_index)
            rows_before = float(carry.cell_index.mean())
            gns.begin_micro(k == number - 1, groups=micro.documents, rows_before=rows_before)
            inputs = {key: value for key, value in micro.inputs.items() if key in ("tokens", "resets")}
            output = model(**inputs, state=state)
            loss: Any = cross_entropy(output.logits.flatten(0, 1), micro.targets.flatten(), reduction="sum")
            weights = (micro.targets >= 0).sum(1)
            scale = 1.0 / (number * setting.rows * setting.length)
            (loss * scale).backward()
            gns.end_micro(weights.sum() * scale, weights)
            ends = {"end_ids": carry.end_ids, "end_cell_index": carry.end_cell_index}
            ledgers[shard].store(carry.group_ids, carry.cell_index, carry.is_last, output.state, **ends)
        windows.append(gns.finish(gns.local_sums().tolist(), float(gns.grad_sq())))
    gns.close()
    return gns, windows, groups


def run(setting: Setting, device_name: str = "cpu", seeds: int = SEEDS, num_rows: int = ORACLE_ROWS) -> dict[str, Any]:
    """A setting's row of the table."""
    torch.set_num_threads(1)
    device = torch.device(device_name)
    with tempfile.TemporaryDirectory() as name:
        corpus = Corpus(setting, Path(name))
        model = frozen(corpus, device)
        noise, signal, inside, reason = [], [], [], ""
        runs = [measure(corpus, model, device, seed) for seed in range(seeds)]
        _, _, groups = runs[0]
        spread = max(groups // setting.m, 1) if groups else 1
        visits = max(-(-setting.steps // spread), 1)
        b, error = truth(corpus, model, device, visits, num_rows)
        for gns, windows, _ in runs:
            known = [each for each in windows if hasattr(each, "tr_sigma")]
            if known:
                noise.append(statistics.fmean(each.tr_sigma for each in known))
                signal.append(statistics.fmean(each.grad_sq for each in known))
            metrics, reason = gns.metrics(), gns.reason or reason
            lows = {key: metrics[f"{key}_low"] for key in ("gns/b_simple", "gns/b_now") if f"{key}_low" in metrics}
            inside += [low <= b <= metrics.get(f"{key}_high", math.inf) for key, low in lows.items()]
    found = {"name": setting.name, "truth": b, "truth_se": error, "spread": spread, "inside": inside}
    found |= {"groups": groups, "reason": reason}
    if noise:
        ratio = statistics.fmean(noise) / statistics.fmean(signal)
        errors = [n - ratio * s for n, s in zip(noise, signal, strict=True)]
        found |= {"b": ratio, "b_se": statistics.stdev(errors) / math.sqrt(len(errors)) / abs(statistics.fmean(signal))}
    return found


def cells(each: dict[str, Any]) -> tuple[object, ...]:
    """A row of the table."""
    measured, ratio = "absent", ""
    if "b" in each:
        measured, ratio = f"{each['b']:.1f} +- {each['b_se']:.1f}", f"{each['b'] / each['truth']:.2f}"
    truth = f"{each['truth']:.1f} +- {each['truth_se']:.1f}"
    return each["name"], each["spread"], truth, measured, ratio, f"{sum(each['inside'])} of {len(each['inside'])}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    settings = [each for each in SETTINGS if args.only in each.name]
    print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|")
    with ProcessPoolExecutor(args.jobs) as pool:
        for each in pool.map(partial(run, device_name=args.device), settings):
            print(f"| {' | '.join(map(str, cells(each)))} |", flush=True)


if __name__ == "__main__":
    main()
