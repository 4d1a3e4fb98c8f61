"""The soak: a batch as training reads it against each of its documents run alone and uncut.

The other checks name a cause, and look at two short rows. A fault may need more to show itself:
many rows, rows in different cells of their documents, cells of the training length, a late cell,
several resets in a row, or a graph.
"""

from __future__ import annotations

import math
import sys
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, product
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.lab.contracts.subject import MODES, CallFailed, NotTestable, Subject, dtype_name, gradients, norm, ratio
from trainer.lab.contracts.trial import CELL_LENGTHS, SAMPLES, Trial, Verdict, effective_dtype, relative, untestable

LEAST_ROWS, MOST_ROWS = 9, 64  # a fault may begin beyond 2, 4 or 8 rows
MOST_LOGITS = 20_000_000  # of a cell of more rows than the least: a backward keeps those of all cells
CELLS = 6  # of the training length; one of another length follows
MOST_COLUMNS = 256  # of the logits of `LEAST_ROWS` rows: a large vocabulary would fill the memory
LEAST_SECONDS = 3.0
SLOW_CALL = 0.05  # seconds, beside which setting up takes little
SHARES = (0.6, 0.7, 1.0)  # of the time left, a share for each pass
FLIPPED = 16  # tokens of which rounding in bf16 may send the half to other experts
JUDGED = (4, 2)  # phases whose documents are also run alone: as many as the time allows
PHASES = ("reads one document", "ended and began again", "began a document late", "changes documents")
EXACT = 1e-10  # relative rounding of float64, not of float32
COARSE = 1e-4  # not of float32, but of bf16, whose root would be too large a change
CHAOS = 0.25  # of the logits' spread: a rounding that has grown to this hides everything


class _Document(NamedTuple):
    """Tokens `begin` to `end` of a row; run alone in a row of `padded` tokens."""

    row: int
    begin: int
    end: int
    padded: int


class _Batch(NamedTuple):
    """Rows in mixed phases; those of a phase are the same, and judged by one document alone."""

    tokens: Tensor  # [B, length]
    begins: Tensor  # [B, cells], where a row begins a document from zeros with a cell
    is_read: Tensor  # [B, cells], False where a row has no document
    resets: Tensor | None  # [B, length]; None: the model takes none
    lengths: list[int]  # tokens of each cell
    copies: dict[int, list[int]]  # first row of each phase that is judged -> its rows

    @property
    def compared(self) -> list[int]:
        return sorted(row for rows in self.copies.values() for row in rows)

    @property
    def edges(self) -> list[int]:
        """Where each cell begins, and where the last one ends."""
        return [0, *accumulate(self.lengths)]

    def documents(self, *, has_state: bool) -> Iterator[_Document]:
        """The documents of the rows that are run alone; without a state, those of each cell.

        Run alone, a document is followed by other tokens, up to whole cells: models may need a
        multiple of a chunk. Of a cell of a model without state, the last quarter is replaced too,
        so that later tokens always differ.
        """
        edges, cell = self.edges, self.lengths[0]
        for row in self.copies:
            starts = {edges[at] for at in range(len(self.lengths)) if self.begins[row, at] or not has_state}
            if self.resets is not None:
                starts |= set(self.resets[row, : edges[-1]].nonzero().flatten().tolist())
            ends = {edges[at] for at in range(len(self.lengths)) if has_state and not self.is_read[row, at]}
            for begin, end in pairwise(sorted(starts | ends | {edges[-1]})):
                if not has_state:
                    whole = self.lengths[bisect_right(edges, begin) - 1]
                    yield _Document(row, begin, min(end, begin + whole - whole // 4), whole)
                elif begin not in ends:
                    yield _Document(row, begin, end, -(-(end - begin) // cell) * cell)


@dataclass(frozen=True)
class _Pass:
    """One way to run the model."""

    subject: Subject
    training: bool
    with_grad: bool = False
    backward: bool = False

    def __str__(self) -> str:
        dtype = dtype_name(self.subject.autocast or self.subject.dtype)
        text = f"{MODES[self.training]} in {dtype}"
        if self.backward:
            return f"{text} and its gradients"
        return f"{text} with gradients enabled" if self.with_grad else text

    def read(self, pieces: Sequence[Tensor], columns: Tensor) -> Tensor:
        """The logits [T, columns] of a row that is read in `pieces`, from zeros."""
        state, logits = self.subject.zeros(1), []
        for piece in pieces:
            result = self.subject(piece, state, with_grad=self.with_grad)
            logits.append(result.logits[0][:, columns])
            state = self.carried(result.state)
        return torch.cat(logits)

    def carried(self, state: Tensor | None) -> Tensor | None:
        """The state for the next cell; with its graph if there will be a backward."""
        if state is None or not self.subject.model.state_width:
            return None
        if self.backward:
            return state.to(self.subject.ledger_dtype)
        return self.subject.carried(state)


class _Size(NamedTuple):
    """The size of a batch."""

    rows: int
    cell: int  # tokens
    judged: int  # phases

    def __str__(self) -> str:
        phases = ""
        if self.judged < len(PHASES):
            phases = f" in {len(PHASES)} phases, {self.judged} of them judged"
        return f"{self.rows} rows{phases}, {CELLS} cells of {self.cell} tokens"


def check_soak(
    trial: Trial, working: Subject, autocast: torch.dtype | None, *, seq_len: int, rows: int, deadline: float
) -> Verdict:
    """Judge `rows` rows in cells of `seq_len` tokens, or less where the time is short.

    Returned states are judged by what follows: one state may be stored in several ways.
    `working`: the model at its own precision; `autocast` in training. `deadline`: of the calling
    thread's own time.
    """
    exact, trains, training = trial.subject, True in trial.modes, working.with_autocast(autocast)
    working.is_pure = training.is_pure = exact.is_pure
    backward = trial.facts.get("gradient") == "held"
    passes = [
        [_Pass(training, trains, with_grad=True)],
        [_Pass(exact, training=False), _Pass(working, training=False)],
        [_Pass(exact, trains, with_grad=True, backward=backward)],
    ]
    held: dict[str, list[Verdict]] = {}
    missing: list[str] = []
    for ways, share in zip(passes, SHARES, strict=True):
        try:
            way, size = _find_way(trial, ways, seq_len, rows, share * (deadline - time.thread_time()))
            found = _judge(trial, way, size)
        except (NotTestable, CallFailed) as error:
            missing.append(f"; {ways[-1]}: not testable here: {error}")
            continue
        if found.status != "held":
            return found  # the first breach is the verdict
        held.setdefault(str(size), []).append(found)
    if not held:
        return untestable("soak", missing[0].removeprefix("; "))
    tried = [f"{', '.join(each.text for each in found)} ({size})" for size, found in held.items()]
    text = f"documents in a batch equal the same run alone, in {'; '.join(tried)}{''.join(missing)}"
    largest = max(each.size or 0.0 for found in held.values() for each in found)
    return Verdict("soak", "held", f"{text}{trial.mode_note}", largest, scope=" and of ".join(held))


def _judge(trial: Trial, way: _Pass, size: _Size) -> Verdict:
    """One pass; a breach must show with every draw of tokens."""
    breaches = []
    for sample in SAMPLES:
        found = _compare(trial, way, make_batch(trial, size, sample), sample)
        if found.status != "broken":
            return found
        breaches.append(found)
    return breaches[0]


def _find_way(trial: Trial, ways: Sequence[_Pass], seq_len: int, rows: int, seconds: float) -> tuple[_Pass, _Size]:
    """The first way that has the time for cells of `seq_len` tokens, otherwise the last; with its
    size. Raises CallFailed, NotTestable: see `_find_size`."""
    cells = [seq_len]
    for way in ways[:-1]:
        with suppress(CallFailed, NotTestable):
            return way, _find_size(trial, way, cells, rows, seconds)
    if trial.takes_cells:
        cells += [each for each in sorted(CELL_LENGTHS, reverse=True) if trial.cell <= each < seq_len]
    return ways[-1], _find_size(trial, ways[-1], cells, rows, seconds)


def _find_size(trial: Trial, way: _Pass, cells: list[int], rows: int, seconds: float) -> _Size:
    """The first size that fits the time: fewer phases first, then fewer rows, then shorter cells.
    Raises CallFailed: the model takes none of these shapes; NotTestable: nothing fits."""
    reads = CELLS + 1.5
    if way.backward:
        reads *= 3
    way.subject.training = way.training  # until the next pass
    for cell in cells:
        most = max(min(rows, MOST_ROWS, MOST_LOGITS // (cell * trial.vocab_size)), LEAST_ROWS)
        alone = reads * _time_call(trial, way, 1, cell)
        if alone * (JUDGED[-1] + 2) > seconds:
            continue
        row = reads * _time_call(trial, way, LEAST_ROWS, cell) / LEAST_ROWS
        for count, judged in product(dict.fromkeys((most, LEAST_ROWS)), JUDGED):
            if row * count + alone * (judged + 2) <= seconds:  # two more runs measure rounding
                return _Size(count, cell, judged)
    raise NotTestable(f"it would take more than the {max(seconds, 0.0):.1f} s that are left for it")


def _time_call(trial: Trial, way: _Pass, rows: int, length: int) -> float:
    """Seconds of the thread for a forward."""
    tokens, state = trial.tokens(rows, length), way.subject.zeros(rows)
    for _ in range(2):  # the first call may set something up
        started = time.thread_time()
        way.subject(tokens, state, with_grad=way.with_grad)
        seconds = time.thread_time() - started
        if seconds > SLOW_CALL:
            break
    return seconds


def make_batch(trial: Trial, size: _Size, sample: int) -> _Batch:
    """A batch in mixed phases: that of a row is the digit sum of its number in base 4, so that no
    two rows that are 1, 4, 8, 16 or 32 apart are the same."""
    rows, cell, judged = size
    lengths = [cell] * CELLS
    if trial.takes_cells and cell > 1:
        lengths.append(cell + cell // 2 - 1)
    digits = [[row // 4**digit % 4 for digit in range(4)] for row in range(rows)]
    phases = torch.tensor([sum(each) % len(PHASES) for each in digits])
    begins = torch.zeros(len(PHASES), len(lengths), dtype=torch.bool)
    is_read = torch.ones_like(begins)
    begins[:, 0] = begins[1, 4] = begins[2, 3] = True
    is_read[1, 2:4] = False
    resets = None
    if trial.takes_resets:
        # In the first cell; near each other, and the last token of a cell; two in a later one; the
        # begin of a third. The other phases have one: a reset may be lost in some rows alone.
        resets = torch.zeros(len(PHASES), sum(lengths), dtype=torch.bool)
        close = {cell + min(at, cell - 1) for at in (1, 3, cell // 3 + 2, cell // 3 + 3, cell - 1)}
        later = [3 * cell + cell // 2, 3 * cell + 3 * cell // 4, 5 * cell]
        resets[3, [cell // 2, *close, *later]] = True
        resets[:3, 5 * cell + cell // 3] = True
        resets = resets[phases]
    else:
        begins[3, [1, 5]] = True
    tokens = trial.tokens(len(PHASES), sum(lengths), sample=sample)
    copies = {phase: (phases == phase).nonzero().flatten().tolist() for phase in (3, 0, 1, 2)[:judged]}
    return _Batch(tokens[phases], begins[phases], is_read[phases], resets, lengths, copies)


@dataclass(frozen=True)
class _Alone:
    """Runs documents of a batch alone."""

    way: _Pass
    batch: _Batch
    columns: Tensor
    padding: Tensor  # tokens that follow a document, [1, 2 * cell]
    is_cut: bool = False  # in cells, for a model that takes no longer rows

    def __call__(self, document: _Document) -> Tensor:
        """The logits [T, columns]."""
        row, begin, end, padded = document
        own = self.batch.tokens[row : row + 1, begin:end]
        tokens = torch.cat([own, self.padding], dim=1)[:, :padded]
        length = self.batch.lengths[0] if self.is_cut else padded
        return self.way.read(torch.split(tokens, length, dim=1), self.columns)[: end - begin]


def _compare(trial: Trial, way: _Pass, batch: _Batch, sample: int) -> Verdict:
    """The batch against each compared document alone; their gradients too if the pass has them."""
    varies = torch.ones(trial.vocab_size) if trial.varies is None else trial.varies
    columns = varies.nonzero().flatten()
    columns = columns[:: -(-len(columns) * len(batch.tokens) // (MOST_COLUMNS * LEAST_ROWS))]
    cell = batch.lengths[0]
    alone = _Alone(way, batch, columns, trial.tokens(1, 2 * cell, sample=900 + sample))
    longest = max(batch.documents(has_state=trial.width > 0), key=lambda each: each.padded)
    try:
        try:
            wanted = alone(longest)
        except CallFailed:  # the model takes no longer rows
            alone = replace(alone, is_cut=True)
            wanted = alone(longest)
        rounding = _measure_rounding(trial, way, wanted, lambda: alone(longest), cell)
        joined = _read_batch(way, batch, columns)
    except CallFailed as error:
        return Verdict("soak", "warning", f"{error} ({len(batch.tokens)} rows, {way})")
    if joined.shape[1] < sum(batch.lengths):
        batch = batch._replace(lengths=batch.lengths[:-1])  # without a cell that the model refuses
    weights = torch.randn(joined.shape[1:], generator=torch.Generator().manual_seed(sample)).to(joined)
    parameters = [each for each in way.subject.model.parameters() if each.requires_grad]

    def gradient(pairs: Iterable[tuple[_Document, Tensor]]) -> list[Tensor]:
        """The gradient of a fixed weighted sum of the logits, over all rows of a document."""
        within = ((each, logits[..., : rounding.horizon, :]) for each, logits in pairs)
        terms = [(logits * weights[each.begin :][: logits.shape[-2]]).sum() for each, logits in within]
        return gradients(torch.stack(terms).sum(), parameters)

    largest, total = 0.0, []
    compared: list[tuple[_Document, Tensor]] = []
    for each in batch.documents(has_state=trial.width > 0):
        rows, wanted = batch.copies[each.row], alone(each)
        found = joined[[batch.compared.index(row) for row in rows], each.begin : each.end]
        for row, logits in zip(rows, found, strict=True):  # all rows of the phase
            errors = rounding.errors(logits, wanted)
            wrong = (errors > rounding.limit) | ~wanted[: len(errors)].isfinite().all(-1)
            if wrong.any():
                return _breach(way, batch, each, row, errors, wanted, int(wrong.nonzero()[0]))
            largest = max(largest, float(errors.max()))
        compared.append((each, found))
        if way.backward:
            total.append(gradient([(each, wanted.expand_as(found))]))
    if way.backward:
        wanted_gradient, limit = _summed(total), rounding.limit
        size = _distance(gradient(compared), wanted_gradient)
        if size > limit:  # the gradient may be worse conditioned than the logits
            step = math.sqrt(torch.finfo(way.subject.dtype).eps)
            with way.subject.perturbed(step):
                moved = [gradient([(each, alone(each).expand_as(found))]) for each, found in compared]
            limit = max(limit, math.sqrt(_distance(_summed(moved), wanted_gradient) * step))
        if size > limit:
            text = f"the gradient of a batch differs from that of its documents run alone by {size:.1e}"
            return Verdict("soak", "broken", f"{text} of its norm, {way}", size)
        largest = max(largest, size)
    return Verdict("soak", "held", f"{way} to {largest:.0e}", largest)


def _breach(
    way: _Pass, batch: _Batch, document: _Document, row: int, errors: Tensor, wanted: Tensor, first: int
) -> Verdict:
    """The first wrong token of a document in a row."""
    size = float(errors[first:].max())
    where = bisect_right(batch.edges, document.begin + first)
    text = (
        f"row {row} of {len(batch.tokens)}, which {PHASES[document.row]}, differs from the same "
        f"document run alone by {size:.1e} of the logits' spread from its token {first} on, "
        f"in cell {where} of {batch.lengths[0]} tokens, {way}"
    )
    if not wanted[first].isfinite().all():
        text = f"the logits are not finite from token {first} of a document on, {way}"
    return Verdict("soak", "broken", text, size, first)


def _read_batch(way: _Pass, batch: _Batch, columns: Tensor) -> Tensor:
    """The logits [compared rows, T, columns] of the batch; without the last cell if the model does
    not take its length. Raises CallFailed: a forward fails."""
    subject, zeros = way.subject, way.subject.zeros(len(batch.tokens))
    state, logits = zeros, []
    for cell, (begin, end) in enumerate(pairwise(batch.edges)):
        if state is not None and zeros is not None:
            keeps = batch.is_read[:, cell] & ~batch.begins[:, cell]
            state = torch.where(keeps[:, None].to(state.device), state, zeros)
        resets = None if batch.resets is None else batch.resets[:, begin:end]
        try:
            result = subject(batch.tokens[:, begin:end], state, resets, with_grad=way.with_grad)
        except CallFailed as error:
            if cell == CELLS:  # the cell of another length, which need not fit
                break
            raise CallFailed(f"cell {cell + 1} of a document: {error}") from error
        logits.append(result.logits[batch.compared][..., columns])
        state = way.carried(result.state)
    return torch.cat(logits, dim=1)


@dataclass(frozen=True)
class _Rounding:
    """The errors that rounding explains."""

    unit: float
    limit: float = math.inf  # relative error above which logits are wrong
    horizon: int = sys.maxsize  # tokens of a document that can be compared
    chunk: int = 1  # tokens of a median: rounding in bf16 chooses another expert for some

    def errors(self, found: Tensor, wanted: Tensor) -> Tensor:
        """Relative errors, [T]."""
        errors = relative(found.detach().double(), wanted.detach().double(), self.unit)
        return _medians(errors, self.chunk)[: self.horizon]


def _medians(errors: Tensor, chunk: int) -> Tensor:
    if chunk == 1:
        return errors
    return torch.cat([part.median().expand_as(part) for part in torch.split(errors, chunk)])


def _measure_rounding(trial: Trial, way: _Pass, wanted: Tensor, run: Callable[[], Tensor], cell: int) -> _Rounding:
    """As `Trial.noise`, of a document as long as the soak's, whose logits are `wanted` and which
    `run` runs again. Raises NotTestable: rounding hides everything."""
    subject = way.subject
    own = replace(trial, subject=subject)
    eps = float(torch.finfo(effective_dtype(own, trial.tokens(length=trial.cell))).eps)
    if subject.device.type == "cuda" and subject.dtype == torch.float32:
        eps = max(eps, 2.0**-10)  # of TF32, which matrix products and convolutions may use
    rounding, step = _Rounding(trial.unit), math.sqrt(eps)
    if eps >= COARSE:
        rounding, step = _Rounding(trial.unit, chunk=FLIPPED), eps
    with subject.perturbed(step):
        moved = rounding.errors(run(), wanted)
    # Such a change is far above rounding, and sends some tokens to other experts.
    if EXACT <= eps < COARSE:
        moved = _medians(moved, cell)
    moved = moved.cummax(0).values
    horizon = int((moved <= CHAOS).sum())
    response = math.inf
    if horizon:
        response = float(moved[horizon - 1]) * eps / step
    largest = float(wanted.detach().abs().nan_to_num(0, 0, 0).max()) / trial.unit
    noise = max(response, 2 * eps * min(max(largest, 1.0), 1e3))
    if noise > CHAOS:
        raise NotTestable(f"one rounding moves the logits by {noise:.1e} of their spread")
    return replace(rounding, limit=math.sqrt(noise), horizon=horizon)


def _summed(found: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return [torch.stack(parts).sum(0) for parts in zip(*found, strict=True)]


def _distance(found: list[Tensor], wanted: list[Tensor]) -> float:
    """The distance of two gradients, in units of the norm of the second."""
    return ratio(norm([a - b for a, b in zip(found, wanted, strict=True)]), norm(wanted))
