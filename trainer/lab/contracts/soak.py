"""The soak: a batch as training reads it against each of its documents run alone and uncut.

A fault may need much to show itself: many rows, rows in different cells of their documents, cells
of the training length, a late or a short cell, several resets in a row, a graph, or bf16.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.lab.contracts.subject import CallFailed, NotTestable, Subject, one_line
from trainer.lab.contracts.trial import CELL_LENGTHS, CHAOS, CHECKS, Rounding, Trial, Verdict, relative, untestable

LEAST_ROWS, MOST_ROWS = 9, 64  # a fault may begin beyond 2, 4 or 8 rows
MOST_LOGITS = 20_000_000  # of a cell of more rows than the least: a backward keeps all
CELLS = 6  # of the training length; a longer one follows, and short ones
SHORT = (1, 1, 5)  # tokens
TRAINED = (5, 5)  # of a pass with gradients: nobody trains on single tokens
MOST_COLUMNS = 256  # of the logits of `LEAST_ROWS` rows: a large vocabulary would fill the memory
SECONDS, MOST_SECONDS = 4.0, 60.0  # a smaller size is taken above the first; none above the second
READS = 60  # forwards of one cell that all passes take, about
SLOW_CALL = 0.05  # seconds, beside which setting up takes little
FLIPPED = 16  # tokens of which rounding above `EXACT` may send the half to other experts
PHASES = ("reads one document", "ended and began again", "began a document late", "changes documents")
EXACT = 1e-10  # relative rounding of float64, not of float32
NO_HARM = 1e-5  # of a gradient's norm: errors below it are those of float32
ALLOWED = 8.0  # errors of a batch at low precision, over those of the documents run alone at it
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
        """The documents that are run alone.

        Run alone, a document is followed by other tokens, up to whole cells: models may need a
        multiple of a chunk. Without a state, each cell is a document, whose last quarter is
        replaced too, so that later tokens always differ.
        """
        edges, cell = self.edges, self.lengths[0]
        for row in self.copies:
            starts = {edges[at] for at in range(len(self.lengths)) if self.begins[row, at]}
            if self.resets is not None:
                starts |= set(self.resets[row].nonzero().flatten().tolist())
            ends = {edges[at] for at in range(len(self.lengths)) if not self.is_read[row, at]}
            for begin, end in pairwise(sorted(starts | ends | {edges[-1]})):
                if begin in ends:
                    continue
                padded = -(-(end - begin) // cell) * cell
                if not has_state:
                    padded, end = self.lengths[bisect_right(edges, begin) - 1], end - (end - begin) // 4
                yield _Document(row, begin, end, padded)


class Size(NamedTuple):
    """The size of a batch."""

    rows: int
    cell: int  # tokens

    def __str__(self) -> str:
        return f"{self.rows} rows, {CELLS} cells of {self.cell} tokens"


def soak(trial: Trial, working: Subject, size: Size) -> tuple[dict[str, Verdict], bool | None]:
    """Judge a batch of this size; `working`: the model at its own precision. Returned states are
    judged by what follows: one state may be stored in several ways.

    Returns the verdicts, and the mode in which to look for the cause; None if the soak holds.
    Raises CallFailed: a forward fails.
    """
    exact, trains = replace(trial.subject, with_grad=True), trial.subject.training
    working = replace(working, is_pure=exact.is_pure, training=trains, with_grad=True)
    own = replace(working, autocast=trial.request.autocast)
    low = replace(working, autocast=torch.bfloat16)
    passes = [exact, replace(trial.subject, training=False)]
    if own.precision != exact.precision:
        passes.append(own)
    soaked = _Soak(trial, exact, size)
    found = {check: untestable(check, "the soak does not hold") for check in CHECKS}
    missing, sizes = "", dict[str, float]()
    for way in passes:
        verdict = found["soak"] = soaked.judge(way)
        if verdict.status == "broken":
            return found, way.training
        if verdict.size is None:
            missing += f"; {way}: not testable here: {verdict.text}"
        else:
            sizes[str(way)] = verdict.size
    if not sizes:
        return found, trains
    text = f"documents in a batch equal the same run alone, in {', '.join(sizes)} ({size}){missing}"
    largest = max(sizes.values())
    for check in ("carry", "causality", "isolation", "resets"):
        found[check] = Verdict(check, "held", "see soak", largest)
    found["soak"] = Verdict("soak", "held", text, largest)
    try:
        gradient = soaked.judge_gradient()
    except NotTestable as error:
        gradient = untestable("gradient", error)
    found[gradient.check] = gradient
    found["autocast"] = untestable("autocast", "training runs in bf16: see soak")
    if low.precision not in (own.precision, exact.precision):
        found["autocast"] = replace(soaked.judge(low), check="autocast")
    return found, None


def find_size(trial: Trial) -> Size:
    """The first size that takes `SECONDS`, fewer rows first, then shorter cells; else the last one.
    Raises NotTestable: it would take more than `MOST_SECONDS`."""
    vocab_size, seq_len, _, rows, *_ = trial.request
    cells = [seq_len]
    if trial.takes_cells:
        cells += [each for each in sorted(CELL_LENGTHS, reverse=True) if trial.cell <= each < seq_len]
    for cell in cells:
        most = max(min(rows, MOST_ROWS, MOST_LOGITS // (cell * vocab_size)), LEAST_ROWS)
        alone, least = (_time_call(trial, count, cell) for count in (1, LEAST_ROWS))
        for count in dict.fromkeys((most, LEAST_ROWS)):
            needed = READS * (alone * len(PHASES) + least * count / LEAST_ROWS)
            if needed <= SECONDS:
                return Size(count, cell)
    if needed > MOST_SECONDS:
        raise NotTestable(f"it would take more than {MOST_SECONDS:.0f} s")
    return Size(count, cell)


def _time_call(trial: Trial, rows: int, length: int) -> float:
    """Seconds of the thread for a forward."""
    subject = replace(trial.subject, with_grad=True)
    for _ in range(2):  # the first call may set something up
        started = time.thread_time()
        subject(trial.tokens(rows, length), subject.zeros(rows))
        seconds = time.thread_time() - started
        if seconds > SLOW_CALL:
            break
    return seconds


class _Soak:
    """Judges passes over batches of one size: the model in one mode, at one precision."""

    def __init__(self, trial: Trial, exact: Subject, size: Size) -> None:
        self.trial, self.exact, self.size = trial, exact, size
        self._columns = trial.columns[:: -(-len(trial.columns) * size.rows // (MOST_COLUMNS * LEAST_ROWS))]
        self._longer = size.cell + max(size.cell // 2 - 1, 1)
        self._taken = {each for each in (self._longer, *SHORT, *TRAINED) if trial.takes_cells and self._takes(each)}
        self._eps = float(torch.finfo(exact.dtype).eps)
        if exact.device.type == "cuda" and exact.dtype == torch.float32:
            # That of TF32, which matrix products and convolutions may use.
            self._eps = max(self._eps, 2.0**-10)

    def judge(self, way: Subject) -> Verdict:
        """The logits of one pass; at a lower precision than the trial's, against the exact ones."""
        is_exact = way.precision == self.exact.precision
        try:
            return self._compare(way) if is_exact else self._compare_inexact(way)
        except (CallFailed, NotTestable) as error:
            if is_exact and isinstance(error, CallFailed):
                raise
            return untestable("soak", error)

    def _make_batch(self, short: Sequence[int] = SHORT, *, is_anew: bool = False) -> _Batch:
        """A batch in mixed phases: that of a row is the digit sum of its number in base 4, so that
        no two that are 1, 4, 8, 16 or 32 apart are the same. `is_anew`: each cell begins documents."""
        rows, cell = self.size
        lengths = [cell] * CELLS
        lengths += [each for each in (self._longer, *short) if each in self._taken]
        digits = [[row // 4**digit % 4 for digit in range(4)] for row in range(rows)]
        phases = torch.tensor([sum(each) % len(PHASES) for each in digits])
        begins = torch.zeros(len(PHASES), len(lengths), dtype=torch.bool)
        is_read = torch.ones_like(begins)
        begins[:, 0] = begins[1, 4] = begins[2, 3] = True
        is_read[1, 2:4] = False
        resets = None
        if self.trial.request.resets:
            # In the first cell; near each other, and the last token of a cell; two in a later one;
            # the begin of a third. The other phases have one: it may be lost in some rows alone.
            resets = torch.zeros(len(PHASES), sum(lengths), dtype=torch.bool)
            close = {cell + min(at, cell - 1) for at in (1, 3, cell // 3 + 2, cell // 3 + 3, cell - 1)}
            later = [3 * cell + cell // 2, 3 * cell + 3 * cell // 4, 5 * cell]
            resets[3, [cell // 2, *close, *later]] = True
            resets[:3, 5 * cell + cell // 3] = True
            resets = resets[phases]
        else:
            begins[3, [1, 5]] = True
        if is_anew or not self.exact.width:
            begins[:], is_read[:] = True, True
        tokens = self.trial.tokens(len(PHASES), sum(lengths))
        copies = {phase: (phases == phase).nonzero().flatten().tolist() for phase in (3, 0, 1, 2)}
        return _Batch(tokens[phases], begins[phases], is_read[phases], resets, lengths, copies)

    def _takes(self, length: int) -> bool:
        """Whether the model takes a cell of another length, which it need not."""
        tokens, state = self.trial.tokens(length=length), self.trial.start_state()
        try:
            self.trial.subject(tokens, state)
        except CallFailed:
            return False
        return True

    def _compare(self, way: Subject) -> Verdict:
        """The batch against each document alone."""
        batch = self._make_batch()
        joined, alone = self._read_batch(way, batch), self._read_alone(way, batch)
        rounding = self._measure_rounding(way, batch, alone)
        largest = 0.0
        for each, wanted in alone.items():
            for row in batch.copies[each.row]:
                errors = rounding.errors(joined[row, each.begin : each.end], wanted)
                errors[~wanted[: len(errors)].isfinite().all(-1)] = math.inf
                wrong = (errors > rounding.limit).nonzero()
                if len(wrong):
                    return _breach(way, batch, each, row, errors, int(wrong[0]))
                largest = max(largest, float(errors.max()))
        return Verdict("soak", "held", f"to {largest:.0e}", largest)

    def _compare_inexact(self, way: Subject) -> Verdict:
        """At low precision, a row is as far from exact logits as its documents alone are."""
        batch, unit, cell = self._make_batch(), self.trial.rounding.unit, self.size.cell
        joined, own = self._read_batch(way, batch), self._read_alone(way, batch)
        wanted = self._read_alone(self.exact, batch)
        error = _rms([relative(own[each], logits, unit) for each, logits in wanted.items()])
        # States are rounded to the dtype in which the model returns them.
        state = way(batch.tokens[:1, :cell], way.zeros(1)).state
        dtypes = [way.precision] if state is None else [way.precision, state.dtype]
        limit = max(ALLOWED * error, *(torch.finfo(dtype).eps for dtype in dtypes))
        if limit > CHAOS:
            how = f"by {error:.1e} of their spread" if math.isfinite(error) else "to NaN or infinity"
            raise NotTestable(f"rounding moves the logits {how}")
        largest = 0.0
        for first, rows in batch.copies.items():
            documents = [each for each in wanted if each.row == first]
            for row in rows:
                read = [relative(joined[row, each.begin : each.end], wanted[each], unit) for each in documents]
                largest = max(largest, size := _rms(read))
                if size > limit:
                    text = f"row {row} of {len(batch.tokens)}, which {PHASES[first]}, differs from the exact"
                    text += f" row by {size:.1e} of the logits' spread, in {way}"
                    text += f"; its documents alone differ by {error:.1e}"
                    return Verdict("soak", "broken", text, size)
        return Verdict("soak", "held", f"{way}: as exact as documents alone ({largest:.1e}, {error:.1e})", largest)

    def _read_batch(self, way: Subject, batch: _Batch) -> Tensor:
        """The logits [B, T, columns] of the batch. Raises CallFailed: a forward fails."""
        zeros = way.zeros(len(batch.tokens))
        state, logits = zeros, list[Tensor]()
        for cell, (begin, end) in enumerate(pairwise(batch.edges)):
            if state is not None and zeros is not None:
                keeps = batch.is_read[:, cell] & ~batch.begins[:, cell]
                state = torch.where(keeps[:, None].to(state.device), state, zeros)
            resets = None if batch.resets is None else batch.resets[:, begin:end]
            try:
                result = way(batch.tokens[:, begin:end], state, resets)
            except CallFailed as error:
                raise CallFailed(f"cell {cell + 1} of a document: {error}") from error
            logits.append(result.logits[..., self._columns])
            state = result.state
        return torch.cat(logits, dim=1)

    def _read_alone(self, way: Subject, batch: _Batch) -> dict[_Document, Tensor]:
        """The logits of each document run alone. Raises NotTestable: it takes no such row."""
        try:
            return {each: self._read(way, batch, each) for each in batch.documents(has_state=way.width > 0)}
        except CallFailed as error:
            raise NotTestable(f"a document alone cannot be read: {error}") from error

    def _read(self, way: Subject, batch: _Batch, document: _Document) -> Tensor:
        """The logits [T, columns] of a document alone and uncut."""
        row, begin, end, padded = document
        padding = self.trial.tokens(1, 2 * self.size.cell, sample=900)
        tokens = torch.cat([batch.tokens[row : row + 1, begin:end], padding], dim=1)[:, :padded]
        return way(tokens, way.zeros(1)).logits[0][: end - begin, self._columns]

    def _measure_rounding(self, way: Subject, batch: _Batch, alone: dict[_Document, Tensor]) -> Rounding:
        """Of the longest document. Raises NotTestable: rounding hides everything."""
        longest = max(alone, key=lambda each: each.padded)
        rounding = Rounding(self.trial.rounding.unit)
        if self._eps > EXACT:
            rounding = replace(rounding, chunk=FLIPPED)
        rounding = rounding.measured(way, lambda: self._read(way, batch, longest), alone[longest], self._eps)
        if rounding.noise > CHAOS:
            raise NotTestable(f"one rounding moves the logits by {rounding.noise:.1e} of their spread")
        return rounding

    def judge_gradient(self) -> Verdict:
        """The gradient through all cuts; where it is wrong, also that of cells that begin anew,
        which training needs: if it is wrong too, the soak is broken. Raises NotTestable."""
        way = replace(self.exact, backward=True)
        logits, state, _ = way(self.trial.tokens(1, self.trial.cell), way.zeros(1))
        if not logits.requires_grad:
            return untestable("gradient", "no parameter is trained")
        try:
            found = self._compare_gradients(way, is_anew=False)
            if found.status != "broken":
                return found
        except CallFailed as error:
            text = f"backward through the incoming state fails, {HARMLESS} ({error})"
            found = Verdict("gradient", "warning", text)
        try:
            anew = self._compare_gradients(way, is_anew=True)
        except CallFailed as error:
            text = f"backward of a cell that continues a group fails: {error}"
            return Verdict("gradient", "broken", text)
        if anew.status == "broken" and anew.size is not None:
            return replace(anew, check="soak")
        if found.status == "broken" and state is not None and not state.requires_grad:
            return Verdict("gradient", "warning", f"the returned state is detached, {HARMLESS}")
        return found

    def _compare_gradients(self, way: Subject, *, is_anew: bool) -> Verdict:
        """The gradient of a batch against that of its documents; `is_anew`: each cell begins documents."""
        batch = self._make_batch(TRAINED, is_anew=is_anew)
        # Before there are graphs: it changes the parameters in place.
        rounding = self._measure_rounding(way, batch, self._read_alone(way, batch))
        parameters = [each for each in way.model.parameters() if each.requires_grad]

        def gradient(read: dict[_Document, Tensor]) -> list[Tensor]:
            """Of a fixed weighted sum of the logits, over all rows of a document."""
            terms = []
            for each, logits in read.items():
                own = weights[each.begin : each.end][: rounding.horizon]
                terms.append((logits[..., : rounding.horizon, :] * own).sum())
            loss = torch.stack(terms).sum()
            try:
                found = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
                return [each.to_dense() for each in found]  # an embedding's may be sparse
            except torch.OutOfMemoryError as error:
                raise NotTestable("the device has too little memory") from error
            except Exception as error:  # autograd functions of the user's own may raise anything
                raise CallFailed(f"backward: {one_line(error)}") from error

        def of_documents() -> list[Tensor]:
            alone = self._read_alone(way, batch).items()
            return gradient({each: logits.expand(len(batch.copies[each.row]), -1, -1) for each, logits in alone})

        joined = self._read_batch(way, batch)
        weights = torch.randn(joined.shape[1:], generator=torch.Generator().manual_seed(0)).to(joined)
        documents = batch.documents(has_state=way.width > 0)
        found = gradient({each: joined[batch.copies[each.row], each.begin : each.end] for each in documents})
        if not all(each.isfinite().all() for each in found):
            return Verdict("gradient", "broken", "the gradient of a batch is not finite")
        wanted, limit = of_documents(), max(rounding.limit, NO_HARM)
        size = _distance(found, wanted)
        if not size <= limit:  # the gradient may be worse conditioned than the logits
            step = math.sqrt(torch.finfo(way.dtype).eps)
            with way.perturbed(step):
                moved = of_documents()
            limit = max(limit, math.sqrt(_distance(moved, wanted) * step))
        if not size <= limit:  # or NaN
            text = "the gradient of a batch differs from that of its documents run alone"
            text += f" by {size:.1e} of its norm, {way}"
            return Verdict("gradient", "broken", text, size)
        return Verdict("gradient", "held", f"through cuts, that of documents run alone to {size:.0e}", size)


def _rms(errors: Sequence[Tensor]) -> float:
    return float(torch.cat([*errors]).square().mean().sqrt())


def _breach(way: Subject, batch: _Batch, document: _Document, row: int, errors: Tensor, first: int) -> Verdict:
    """The first wrong token of a document in a row."""
    size, where = float(errors[first:].max()), bisect_right(batch.edges, document.begin + first)
    text = (
        f"row {row} of {len(batch.tokens)}, which {PHASES[document.row]}, differs "
        f"from the same document run alone by {size:.1e} of the logits' spread "
        f"from its token {first} on, in cell {where} of {batch.lengths[where - 1]} tokens, {way}"
    )
    return Verdict("soak", "broken", text, size, first)


def _distance(found: list[Tensor], wanted: list[Tensor]) -> float:
    """The distance of two gradients, in units of the norm of the second; 0 if both vanish."""
    gaps = [a - b for a, b in zip(found, wanted, strict=True)]
    squares = ([each.abs().double().square().sum() for each in of] for of in (gaps, wanted))
    gap, unit = (math.sqrt(sum(map(float, each))) for each in squares)
    if unit:
        return gap / unit
    return math.inf if gap else 0.0
