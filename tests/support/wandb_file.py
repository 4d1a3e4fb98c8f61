"""Reads a run back from wandb's own transaction log (`run-<id>.wandb`), without wandb's server.

The file is a LevelDB log: a 7-byte header, then blocks of 32 KiB with records of
`crc32 (4, little endian), length (2), type (1), data`; a record that does not fit is split into first, middle and last.
"""

from __future__ import annotations

import json
import struct
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK = 32768
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def find_wandb_file(run_dir: Path) -> Path:
    """The one `.wandb` file below a run directory."""
    found = sorted(run_dir.glob("wandb/*run-*/*.wandb"))
    assert len(found) == 1, f"expected one .wandb file below {run_dir}, found {found}"
    return found[0]


def _chunks(path: Path) -> Iterator[tuple[int, bytes]]:
    data = path.read_bytes()
    assert data[:4] in (b":W&B", b""), f"{path} is not a wandb file"
    position = 7
    while position + 7 <= len(data):
        if BLOCK - position % BLOCK < 7:
            position += BLOCK - position % BLOCK
            continue
        checksum, length, kind = struct.unpack_from("<IHB", data, position)
        body = data[position + 7 : position + 7 + length]
        if len(body) < length:
            return  # the writer was killed in this record
        assert zlib.crc32(bytes([kind]) + body) == checksum, f"{path}: damaged at offset {position}"
        yield kind, body
        position += 7 + length


def read_records(path: Path, *, is_finished: bool = True) -> Iterator[Any]:
    """Every record of the log, as wandb's protobuf `Record`. A killed run is not `is_finished`."""
    if is_finished:
        wait_for_end(path)
    from wandb.proto import wandb_internal_pb2

    parts: list[bytes] = []
    for kind, body in _chunks(path):
        parts = [body] if kind in (FULL, FIRST) else [*parts, body]
        if kind in (FULL, LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(b"".join(parts))
            yield record


def wait_for_end(path: Path, timeout_sec: float = 120.0) -> None:
    """Wait until the run's last record is in the file: wandb's service writes on for a moment after `finish()`."""
    deadline = time.monotonic() + timeout_sec
    while not any(record.WhichOneof("record_type") == "exit" for record in read_records(path, is_finished=False)):
        assert time.monotonic() < deadline, f"{path}: the run has not ended within {timeout_sec} s"
        time.sleep(0.05)


def read_history(path: Path, *, is_finished: bool = True) -> list[dict[str, Any]]:
    """The logged rows in order, by key; `_step` is wandb's own counter."""
    rows = []
    for record in read_records(path, is_finished=is_finished):
        if record.WhichOneof("record_type") == "history":
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            row.setdefault("_step", record.history.step.num)
            rows.append(row)
    return rows
