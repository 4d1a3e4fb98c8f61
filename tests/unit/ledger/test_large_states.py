"""States of many megabytes: checkpoints in pieces, finite or not in one pass, and rows in the host's memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.ledger.test_ledger import WIDTH, new_ledger, store
from trainer.ledger import Ledger
from trainer.ledger import slab as slabs
from trainer.ledger.slab import HostSlab, Slab

MOST, NAN, INF = 3e38, float("nan"), float("inf")  # also in bfloat16


def test_rows_are_saved_and_restored_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = new_ledger()
    ledger.begin_step(1)
    for group in (3, 1, 2):
        store(ledger, [group], float(group))
    whole = ledger.state_dict()
    monkeypatch.setattr(slabs, "PIECE_BYTES", 2 * WIDTH * 4)
    pieces = list(ledger.held_rows())
    assert [len(piece) for piece in pieces] == [2, 1]
    assert torch.equal(torch.cat(pieces), whole["rows"])
    assert ledger.num_row_bytes == whole["rows"].numel() * 4
    same, other = new_ledger(), new_ledger(capacity=7)
    for resumed in (same, other):
        resumed.load_state_dict([whole])
        found = resumed.state_dict()
        by_group = dict(zip(found["groups"].tolist(), found["rows"][:, 0].tolist(), strict=True))
        assert by_group == {1: 1.0, 2: 2.0, 3: 3.0}


@pytest.mark.parametrize("large", [0, 2**20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("row", "is_finite"),
    [
        ([MOST, MOST, -MOST], True),  # whose sum is not
        ([INF, -INF, 0.0], False),
        ([0.0, NAN, INF], False),
        ([1.0, 2.0, -INF], False),
    ],
)
def test_a_row_is_valid_if_each_of_its_numbers_is_finite(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, row: list[float], is_finite: bool, large: int
) -> None:
    monkeypatch.setattr(slabs, "LARGE_BYTES", large)
    slab = Slab(width=3, capacity=2, device=torch.device("cpu"), dtype=dtype)
    rows = torch.tensor([row, [1.0, 1.0, 1.0]], dtype=dtype)
    assert int(slab.write(np.array([1, 0]), rows)) == (not is_finite)
    assert slab.are_valid(np.array([1, 0, 2])).tolist() == [is_finite, True, False]


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slots_that_are_not_used_take_no_memory_of_the_host(dtype: torch.dtype) -> None:
    before = resident_bytes()
    ledger = Ledger(state_width=250_000, capacity=1_000, wipe_mode="lru", dtype=dtype)
    ledger.begin_step(1)
    for group in (1, 2):
        ledger.store(np.array([group]), np.ones(1, np.int64), np.zeros(1, np.bool_), torch.ones(1, 250_000))
    assert resident_bytes() - before < 50e6  # of 0.5 to 1 GB
    assert ledger.lookup(np.array([2]), np.ones(1, np.int64)).sum() == 250_000


class Stream:
    """Stands for a CUDA stream: how far it knows every stream to have come."""

    now: list[Stream]

    def __init__(self, *_: object) -> None:
        self.known: dict[Stream, int] = {self: 0}

    def advance(self) -> None:
        self.known[self] += 1

    def wait_stream(self, other: Stream) -> None:
        self.learn(other.known)

    def wait_event(self, event: Event) -> None:
        self.learn(event.known)

    def learn(self, known: dict[Stream, int]) -> None:
        for stream, time in known.items():
            self.known[stream] = max(self.known.get(stream, 0), time)

    def record_event(self) -> Event:
        return Event(dict(self.known))


class Event:
    """Stands for a CUDA event; it has happened when the test says so."""

    def __init__(self, known: dict[Stream, int]) -> None:
        self.known = known
        self.has_happened = False

    def query(self) -> bool:
        return self.has_happened


@contextmanager
def on(stream: Stream) -> Iterator[None]:
    Stream.now.append(stream)
    yield
    stream.advance()
    Stream.now.pop()


class SlabInHost(HostSlab):
    """Without the memory that only a machine with CUDA can pin."""

    def _allocate(self) -> torch.Tensor:
        return torch.zeros(self.capacity, self.width, dtype=self.dtype)


MOVES = st.lists(
    st.tuples(st.sampled_from(["read", "write", "happen"]), st.lists(st.integers(0, 5), max_size=4, unique=True)),
    max_size=12,
)


@settings(max_examples=60)
@given(MOVES)
def test_rows_in_the_hosts_memory_are_those_of_the_device_and_wait_for_what_they_need(
    moves: list[tuple[str, list[int]]],
) -> None:
    """The streams are stand-ins that know what waits for what: no copy may begin before what it reads is written."""
    with pytest.MonkeyPatch.context() as patch:
        compute = Stream()
        Stream.now = [compute]
        patch.setattr(torch.cuda, "Stream", Stream)
        patch.setattr(torch.cuda, "stream", on)
        patch.setattr(torch.cuda, "current_stream", lambda *_: Stream.now[-1])
        patch.setattr(torch.Tensor, "record_stream", lambda *_: None)
        sizes = {"width": 3, "capacity": 6, "device": torch.device("cpu"), "dtype": torch.bfloat16}
        plain, host = Slab(**sizes), SlabInHost(**sizes)  # type: ignore[arg-type]
        written: dict[int, Event] = {}
        for number, (move, slots) in enumerate(moves, start=1):
            index = np.array([*slots, 6 if move == "read" else 7], np.int64)  # none; not kept
            if move == "happen":
                for slot in slots:
                    if slot in written:
                        written[slot].has_happened = True
            elif move == "read":
                (expected, valid), (found, is_valid) = plain.read(index), host.read(index)
                assert torch.equal(found, expected)
                assert torch.as_tensor(is_valid).tolist() == torch.as_tensor(valid).tolist()
                assert all(compute.known[stream] >= time for stream, time in host._reading.known.items())
                for slot in slots:
                    if slot in written and not written[slot].has_happened:
                        assert host._reading.known[host._writing] >= written[slot].known[host._writing]
            else:
                compute.advance()
                rows = torch.full((len(index), 3), float(number))
                rows[::2, 1] = float("nan") if number % 3 == 0 else 1.0
                plain.write(index, rows.bfloat16())
                host.write(index, rows.bfloat16())
                assert all(host._writing.known.get(stream, 0) >= time for stream, time in compute.known.items())
                written.update((slot, host._written[slot]) for slot in slots)  # type: ignore[misc]
        assert torch.equal(plain.are_valid(np.arange(6)), host.are_valid(np.arange(6)))
