"""The soak: a batch as training reads it against each of its documents run alone and uncut.

A fault may need much to show itself: many rows, rows in different cells of their documents, cells
of the training length, a late or a short cell, several resets in a row, a graph, or bf16.
"""

from __future__ import annotations

import math
import sys
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.lab.contracts.subject import (
    MODES,
    CallFailed,
    NotTestable,
    Result,
    Subject,
    dtype_name,
    gradients,
    norm,
    ratio,
)
from trainer.lab.contracts.trial import (
    CELL_LENGTHS,
    Trial,
    Verdict,
    effective_dtype,
    relative,
    untestable,
)

LEAST_ROWS, MOST_ROWS = 9, 64  # a fault may begin beyond 2, 4 or 8 rows
MOST_LOGITS = 20_000_000  # of a cell of more rows than the least: a backward keeps those of all cells
CELLS = 6  # of the training length; a longer one follows, and short ones
SHORT = (1, 1, 5)  # tokens
TRAINED = (5, 5)  # of a pass with gradients: nobody trains on single tokens
MOST_COLUMNS = 256  # of the logits of `LEAST_ROWS` rows: a large vocabulary would fill the memory
SECONDS = 4.0  # a smaller size is taken if it would take longer
READS = 60  # forwards of one cell that all passes take, about
SLOW_CALL = 0.05  # seconds, beside which setting up takes little
FLIPPED = 16  # tokens of which rounding above `EXACT` may send the half to other experts
PHASES = (
    "reads one document",
    "ended and began again",
    "began a document late",
    "changes documents",
)
EXACT = 1e-10  # relative rounding of float64, not of float32
LARGEST_STEP = 0.01  # relative change of the parameters, of which the logits are a linear function
CHAOS = 0.25  # of the logits' spread: a rounding that has grown to this hides everything
ALLOWED = 8.0  # errors of a batch at low precision, over those of the documents run alone at it
SAMPLES = (0, 1)  # a breach has to show with each of these draws of tokens
JUDGED = ("soak", "carry", "causality", "isolation", "resets", "gradient", "autocast")
HARMLESS = "which matters in a loop that trains through it"


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
    copies: dict[int, list[int]]  # first row of each phase -> its rows

    @property
    def edges(self) -> list[int]:
        """Where each cell begins, and where the last one ends."""
        return [0, *accumulate(self.lengths)]

    def documents(self, *, has_state: bool) -> Iterator[_Document]:
        """The documents that are run alone; without a state, those of each cell.

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
    exact: Subject | None = None  # of a pass at low precision: what its logits are compared with

    def __str__(self) -> str:
        return f"{MODES[self.training]} in {dtype_name(self.subject.precision)}"

    def __call__(self, tokens: Tensor, state: Tensor | None, resets: Tensor | None = None) -> Result:
        """Logits of a cell, and the state for the next one; with its graph if there will be a backward."""
        logits, end = self.subject(tokens, state, resets, with_grad=self.with_grad)
        if end is None or not self.subject.model.state_width:
            return Result(logits, None)
        if self.backward:
            return Result(logits, end.to(self.subject.ledger_dtype))
        return Result(logits, self.subject.carried(end))


class _Size(NamedTuple):
    """The size of a batch."""

    rows: int
    cell: int  # tokens

    def __str__(self) -> str:
        return f"{self.rows} rows, {CELLS} cells of {self.cell} tokens"


@dataclass(frozen=True)
class _Rounding:
    """The errors that rounding explains."""

    unit: float
    limit: float = math.inf  # relative error above which logits are wrong
    horizon: int = sys.maxsize  # tokens of a document that can be compared
    chunk: int = 1  # tokens of a median

    def errors(self, found: Tensor, wanted: Tensor) -> Tensor:
        """Relative errors, [T]."""
        errors = _errors(found, wanted, self.unit)[: self.horizon]
        if self.chunk == 1:
            return errors
        return torch.cat([part.median().expand_as(part) for part in torch.split(errors, self.chunk)])


def _errors(found: Tensor, wanted: Tensor, unit: float) -> Tensor:
    return relative(found.detach().double(), wanted.detach().double(), unit)


def soak(
    trial: Trial,
    working: Subject,
    autocast: torch.dtype | None,
    *,
    seq_len: int,
    rows: int,
    seconds: float,
) -> tuple[dict[str, Verdict], bool | None]:
    """Judge `rows` rows in cells of `seq_len` tokens, or less where they would take long.

    Returned states are judged by what follows: one state may be stored in several ways.

    Args:
        working: the model at its own precision; `autocast` in training.
        seconds: that are left.

    Returns:
        The verdicts; and the mode in which to look for the cause, None if the soak holds.
    Raises:
        CallFailed: a forward fails.
    """
    exact, trains = trial.subject, trial.trains
    working.is_pure = exact.is_pure
    own, low = working.with_autocast(autocast), working.with_autocast(torch.bfloat16)
    passes = [_Pass(exact, trains, with_grad=True), _Pass(exact, training=False)]
    if own.precision != exact.precision:
        passes.append(_Pass(own, trains, with_grad=True, exact=exact))
    try:
        soaked = _Soak(trial, _find_size(trial, seq_len, rows, seconds))
    except NotTestable as error:
        return {check: untestable(check, error) for check in JUDGED}, trains
    found = {check: untestable(check, "the soak does not hold") for check in JUDGED}
    judged, missing, largest = list[str](), list[str](), 0.0
    for way in passes:
        verdict = found["soak"] = soaked.judge(way)
        if verdict.status == "broken":
            return found, way.training
        if verdict.status == "held":
            judged.append(str(way))
            largest = max(largest, verdict.size or 0.0)
        else:
            missing.append(f"; {way}: not testable here: {verdict.text}")
    if not judged:
        return found, trains
    text = f"documents in a batch equal the same run alone, in {', '.join(judged)} ({soaked.size}){''.join(missing)}"
    if not trains:
        text += " (in train() the model draws random numbers beside dropout)"
    found |= {
        check: Verdict(check, "held", "see soak", largest) for check in ("carry", "causality", "isolation", "resets")
    }
    found["soak"] = Verdict("soak", "held", text, largest, scope=str(soaked.size))
    gradient = soaked.judge_gradient(_Pass(exact, trains, with_grad=True, backward=True))
    found[gradient.check] = gradient
    if low.precision in (own.precision, exact.precision):
        found["autocast"] = untestable("autocast", "training runs in bf16: see soak")
    else:
        found["autocast"] = replace(soaked.judge(_Pass(low, trains, exact=exact)), check="autocast")
    return found, None if soaked.is_uncut else trains


def _find_size(trial: Trial, seq_len: int, rows: int, seconds: float) -> _Size:
    """The first size that takes `SECONDS`, fewer rows first, then shorter cells; else the last that
    takes `seconds`. Raises NotTestable: none does."""
    cells = [seq_len]
    if trial.takes_cells:
        cells += [each for each in sorted(CELL_LENGTHS, reverse=True) if trial.cell <= each < seq_len]
    for cell in cells:
        most = max(min(rows, MOST_ROWS, MOST_LOGITS // (cell * trial.vocab_size)), LEAST_ROWS)
        alone, least = (_time_call(trial, count, cell) for count in (1, LEAST_ROWS))
        for count in dict.fromkeys((most, LEAST_ROWS)):
            needed = READS * (alone * len(PHASES) + least * count / LEAST_ROWS)
            if needed <= min(SECONDS, seconds):
                return _Size(count, cell)
    if needed <= seconds:
        return _Size(count, cell)
    raise NotTestable(f"it would take more than the {max(seconds, 0.0):.1f} s that are left for it")


def _time_call(trial: Trial, rows: int, length: int) -> float:
    """Seconds of the thread for a forward."""
    tokens, state = trial.tokens(rows, length), trial.subject.zeros(rows)
    for _ in range(2):  # the first call may set something up
        started = time.thread_time()
        trial.subject(tokens, state, with_grad=True)
        seconds = time.thread_time() - started
        if seconds > SLOW_CALL:
            break
    return seconds


def _make_batch(trial: Trial, size: _Size, sample: int, short: Sequence[int]) -> _Batch:
    """A batch in mixed phases: that of a row is the digit sum of its number in base 4, so that no
    two rows that are 1, 4, 8, 16 or 32 apart are the same."""
    rows, cell = size
    lengths = [cell] * CELLS
    if trial.takes_cells and cell > 1:
        lengths += [cell + cell // 2 - 1, *(min(cell, each) for each in short)]
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
    copies = {phase: (phases == phase).nonzero().flatten().tolist() for phase in (3, 0, 1, 2)}
    return _Batch(tokens[phases], begins[phases], is_read[phases], resets, lengths, copies)


def _of_draws(judge: Callable[[int], Verdict]) -> Verdict:
    """The first verdict that is not a breach; a breach must show with every draw of tokens."""
    breaches = []
    for sample in SAMPLES:
        found = judge(sample)
        if found.status != "broken":
            return found
        breaches.append(found)
    return breaches[0]


class _Soak:
    """Judges passes over batches of one size."""

    def __init__(self, trial: Trial, size: _Size) -> None:
        self.trial, self.size, self.is_uncut = trial, size, True
        self._cells = sys.maxsize  # of a batch, that the model takes
        assert trial.varies is not None
        columns = trial.varies.nonzero().flatten()
        self._columns = columns[:: -(-len(columns) * size.rows // (MOST_COLUMNS * LEAST_ROWS))]
        self._eps = float(torch.finfo(effective_dtype(trial, trial.tokens(length=trial.cell))).eps)
        if trial.subject.device.type == "cuda" and trial.subject.dtype == torch.float32:
            self._eps = max(self._eps, 2.0**-10)  # of TF32, which matrix products and convolutions may use

    def judge(self, way: _Pass) -> Verdict:
        """The logits of one pass."""
        try:
            return _of_draws(lambda sample: self._compare(way, sample))
        except (NotTestable, CallFailed) as error:
            if isinstance(error, CallFailed) and way.exact is None:
                raise
            return untestable("soak", error)

    def _batch(self, sample: int, short: Sequence[int] = SHORT) -> _Batch:
        batch = _make_batch(self.trial, self.size, sample, short)
        return batch._replace(lengths=batch.lengths[: self._cells])

    def _compare(self, way: _Pass, sample: int) -> Verdict:
        """The batch, and its longest document in cells, against each document alone."""
        joined = self._read_batch(way, self._batch(sample))
        batch = self._batch(sample)
        if way.exact is not None:
            return self._compare_inexact(way, way.exact, batch, joined)
        alone = self._read_alone(way, batch)
        rounding = self._measure_rounding(way, batch, alone)
        longest = max(alone, key=lambda each: each.padded)
        largest = 0.0
        for each, wanted in alone.items():
            rows = [(row, joined[row, each.begin : each.end]) for row in batch.copies[each.row]]
            if each == longest and self.trial.width:
                rows.append((-1, self._read(way, batch, longest, is_cut=True)))
            for row, logits in rows:
                errors = rounding.errors(logits, wanted)
                wrong = (errors > rounding.limit) | ~wanted[: len(errors)].isfinite().all(-1)
                if wrong.any():
                    return _breach(way, batch, each, row, errors, wanted, int(wrong.nonzero()[0]))
                largest = max(largest, float(errors.max()))
        return Verdict("soak", "held", f"to {largest:.0e}", largest)

    def _compare_inexact(self, way: _Pass, exact: Subject, batch: _Batch, joined: Tensor) -> Verdict:
        """At low precision, an honest row is as far from the exact logits as its documents alone are."""
        unit, cell, subject = self.trial.unit, self.size.cell, way.subject
        wanted, own = (
            self._read_alone(replace(way, subject=exact), batch),
            self._read_alone(way, batch),
        )
        error = _rms([_errors(own[each], logits, unit) for each, logits in wanted.items()])
        # States are rounded to the dtype in which the model returns them.
        state = subject(batch.tokens[:1, :cell], subject.zeros(1)).state
        dtypes = [
            subject.precision,
            *(each.dtype for each in [state] if each is not None and each.is_floating_point()),
        ]
        limit = max(ALLOWED * error, *(torch.finfo(dtype).eps for dtype in dtypes))
        if limit > CHAOS:
            raise NotTestable(f"rounding moves the logits by {error:.1e} of their spread")
        largest = 0.0
        for first, rows in batch.copies.items():
            documents = [each for each in wanted if each.row == first]
            for row in rows:
                read = [_errors(joined[row, each.begin : each.end], wanted[each], unit) for each in documents]
                largest = max(largest, size := _rms(read))
                if size > limit:
                    text = f"row {row} of {len(batch.tokens)}, which {PHASES[first]}, differs from the exact row by"
                    text += f" {size:.1e} of the logits' spread, in {way}; its documents alone differ by {error:.1e}"
                    return Verdict("soak", "broken", text, size)
        return Verdict(
            "soak",
            "held",
            f"{way}: as exact as documents alone ({largest:.1e}, {error:.1e})",
            largest,
        )

    def _read_batch(self, way: _Pass, batch: _Batch) -> Tensor:
        """The logits [B, T, columns] of the batch; without the last cells if the model does not
        take their length. Raises CallFailed: a forward fails."""
        way.subject.training = way.training
        zeros = way.subject.zeros(len(batch.tokens))
        state, logits = zeros, list[Tensor]()
        for cell, (begin, end) in enumerate(pairwise(batch.edges)):
            if state is not None and zeros is not None:
                keeps = batch.is_read[:, cell] & ~batch.begins[:, cell]
                state = torch.where(keeps[:, None].to(state.device), state, zeros)
            resets = None if batch.resets is None else batch.resets[:, begin:end]
            try:
                result = way(batch.tokens[:, begin:end], state, resets)
            except CallFailed as error:
                if cell >= CELLS:  # a cell of another length, which need not fit
                    self._cells = cell
                    break
                raise CallFailed(f"cell {cell + 1} of a document: {error}") from error
            logits.append(result.logits[..., self._columns])
            state = result.state
        return torch.cat(logits, dim=1)

    def _read_alone(self, way: _Pass, batch: _Batch) -> dict[_Document, Tensor]:
        """The logits of each document run alone."""
        way.subject.training = way.training
        documents = [*batch.documents(has_state=self.trial.width > 0)]
        if self.is_uncut:
            try:
                return {each: self._read(way, batch, each) for each in documents}
            except CallFailed:  # the model takes no longer rows
                self.is_uncut = False
        return {each: self._read(way, batch, each, is_cut=True) for each in documents}

    def _read(self, way: _Pass, batch: _Batch, document: _Document, *, is_cut: bool = False) -> Tensor:
        """The logits [T, columns] of a document alone, whole or in cells."""
        row, begin, end, padded = document
        cell = self.size.cell
        padding = self.trial.tokens(1, 2 * cell, sample=900)
        tokens = torch.cat([batch.tokens[row : row + 1, begin:end], padding], dim=1)[:, :padded]
        state, logits = way.subject.zeros(1), []
        for piece in torch.split(tokens, cell if is_cut else padded, dim=1):
            result = way(piece, state)
            logits.append(result.logits[0][:, self._columns])
            state = result.state
        return torch.cat(logits)[: end - begin]

    def _measure_rounding(self, way: _Pass, batch: _Batch, alone: dict[_Document, Tensor]) -> _Rounding:
        """As `Trial.noise`, of the longest document. Raises NotTestable: rounding hides everything."""
        eps, unit = self._eps, self.trial.unit
        step = min(math.sqrt(eps), LARGEST_STEP)
        rounding = _Rounding(unit, chunk=1 if eps < EXACT else FLIPPED)
        longest = max(alone, key=lambda each: each.padded)
        with way.subject.perturbed(step):
            moved = rounding.errors(self._read(way, batch, longest, is_cut=not self.is_uncut), alone[longest])
        moved = moved.cummax(0).values
        horizon = int((moved <= CHAOS).sum())
        response = math.inf
        if horizon:
            response = float(moved[horizon - 1]) * eps / step
        largest = float(alone[longest].detach().abs().nan_to_num(0, 0, 0).max()) / unit
        noise = max(response, 2 * eps * min(max(largest, 1.0), 1e3))
        if noise > CHAOS:
            raise NotTestable(f"one rounding moves the logits by {noise:.1e} of their spread")
        return replace(rounding, limit=math.sqrt(noise), horizon=horizon)

    def judge_gradient(self, way: _Pass) -> Verdict:
        """The gradient through all cuts; where it is wrong, also that of cells that begin anew,
        which training needs: if it is wrong too, the soak is broken."""
        parameters = [each for each in way.subject.model.parameters() if each.requires_grad]
        tokens = self.trial.tokens(length=self.trial.cell)
        with self.trial.in_mode(way.training):
            logits, state = self.trial.subject(tokens, self.trial.subject.zeros(len(tokens)), with_grad=True)
        if not parameters or not logits.requires_grad:
            return untestable("gradient", "no parameter is trained")
        try:
            found = _of_draws(lambda sample: self._compare_gradients(way, parameters, sample, is_anew=False))
            if found.status != "broken":
                return found
        except NotTestable as error:
            return untestable("gradient", error)
        except CallFailed as error:
            text = f"backward through the incoming state fails, {HARMLESS} ({error})"
            found = Verdict("gradient", "warning", text)
        try:
            anew = _of_draws(lambda sample: self._compare_gradients(way, parameters, sample, is_anew=True))
        except CallFailed as error:
            text = f"backward of a cell that continues a group fails: {error}"
            return Verdict("gradient", "broken", text)
        if anew.status == "broken" and anew.size is not None:
            return replace(anew, check="soak")
        if found.status == "broken" and state is not None and not state.requires_grad:
            return Verdict("gradient", "warning", f"the returned state is detached, {HARMLESS}")
        return found

    def _compare_gradients(self, way: _Pass, parameters: Sequence[Tensor], sample: int, *, is_anew: bool) -> Verdict:
        """The gradient of a batch against that of its documents; `is_anew`: each cell begins documents."""
        batch = self._batch(sample, TRAINED)
        if is_anew:
            batch = batch._replace(begins=torch.ones_like(batch.begins), is_read=torch.ones_like(batch.is_read))
        # Before there are graphs: it changes the parameters in place.
        rounding = self._measure_rounding(way, batch, self._read_alone(way, batch))

        def gradient(read: dict[_Document, Tensor]) -> list[Tensor]:
            """Of a fixed weighted sum of the logits, over all rows of a document."""
            terms = []
            for each, logits in read.items():
                own = weights[each.begin : each.end][: rounding.horizon]
                terms.append((logits[..., : rounding.horizon, :] * own).sum())
            return gradients(torch.stack(terms).sum(), parameters)

        def of_documents() -> list[Tensor]:
            rows = {each: len(batch.copies[each.row]) for each in batch.documents(has_state=self.trial.width > 0)}
            alone = self._read_alone(way, batch).items()
            return gradient({each: logits.expand(rows[each], *logits.shape) for each, logits in alone})

        joined = self._read_batch(way, batch)
        weights = torch.randn(joined.shape[1:], generator=torch.Generator().manual_seed(sample)).to(joined)
        documents = [*batch.documents(has_state=self.trial.width > 0)]
        found = gradient({each: joined[batch.copies[each.row], each.begin : each.end] for each in documents})
        if not all(each.isfinite().all() for each in found):
            return Verdict("gradient", "broken", "the gradient of a batch is not finite")
        wanted, limit = of_documents(), rounding.limit
        size = _distance(found, wanted)
        if not size <= limit:  # the gradient may be worse conditioned than the logits
            step = math.sqrt(torch.finfo(way.subject.dtype).eps)
            with way.subject.perturbed(step):
                moved = of_documents()
            limit = max(limit, math.sqrt(_distance(moved, wanted) * step))
        if not size <= limit:  # or NaN
            text = f"the gradient of a batch differs from that of its documents run alone by {size:.1e} of its norm"
            return Verdict("gradient", "broken", f"{text}, {way}", size)
        return Verdict("gradient", "held", f"through cuts, that of documents run alone to {size:.0e}", size)


def _rms(errors: Sequence[Tensor]) -> float:
    return float(torch.cat([*errors]).square().mean().sqrt())


def _breach(
    way: _Pass,
    batch: _Batch,
    document: _Document,
    row: int,
    errors: Tensor,
    wanted: Tensor,
    first: int,
) -> Verdict:
    """The first wrong token of a document in a row."""
    size = float(errors[first:].max())
    where = bisect_right(batch.edges, document.begin + first)
    what = f"row {row} of {len(batch.tokens)}, which {PHASES[document.row]}, differs"
    if row < 0:
        what = "a document alone, read in cells, differs"
    text = (
        f"{what} from the same document run alone by {size:.1e} of the logits' spread from its token {first} on, "
        f"in cell {where} of {batch.lengths[0]} tokens, {way}"
    )
    if not wanted[first].isfinite().all():
        text = f"the logits are not finite from token {first} of a document on, {way}"
    return Verdict("soak", "broken", text, size, first)


def _distance(found: list[Tensor], wanted: list[Tensor]) -> float:
    """The distance of two gradients, in units of the norm of the second."""
    return ratio(norm([a - b for a, b in zip(found, wanted, strict=True)]), norm(wanted))
