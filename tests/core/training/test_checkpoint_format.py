"""Files of a checkpoint: any nest of values comes back, rows of tensors are joined, and torch's own reader reads them."""

from __future__ import annotations

import ast
import itertools
import math
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from tests.support.checkpoints import file_content, write_content
from tests.support.runs import ROOT
from trainer.errors import UserError
from trainer.training.tensor_files import (
    CheckpointError,
    Rows,
    TensorFiles,
    TensorPart,
    model_file,
    pack,
    unpack,
    write_part,
)

PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
TENSORS = st.sampled_from(
    [torch.zeros(()), torch.arange(3), torch.ones(2, 0), torch.tensor([True]), torch.tensor([math.nan]), torch.float16]
)
KEYS = st.text() | st.integers() | st.tuples(st.integers(), st.text())
NESTS = st.recursive(
    PLAIN | TENSORS,
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(KEYS, inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.sampled_from(["$tensor", "$dict", "$", "a.b", "a"]), inner)
    ),
    max_leaves=12,
)


def same(one: Any, other: Any) -> bool:
    """Equal, of the same types, tensors bit for bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return (
            one.dtype == other.dtype
            and one.shape == other.shape
            and torch.equal(one.nan_to_num(7), other.nan_to_num(7))
        )
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@settings(max_examples=80, deadline=None)
@given(value=NESTS)
def test_any_nest_comes_back_from_a_file(tmp_path_factory, value):
    path = tmp_path_factory.mktemp("nest") / "x.safetensors"
    write_content(path, value)
    assert same(file_content(path), value)


def test_two_tensors_never_get_one_name():
    value = {"a": {"b": torch.zeros(1)}, "a.b": torch.ones(1), "1": torch.ones(2), 1: torch.zeros(2)}
    values, tensors = pack(value)
    assert len(tensors) == 4
    assert same(unpack(values, tensors.__getitem__), value)


def test_what_a_file_cannot_keep_is_refused_by_its_place():
    with pytest.raises(UserError, match=r"data\.cursor\.1: is a pathlib\.\w+; a checkpoint keeps plain values"):
        pack({"cursor": [1, Path("x")]}, "data")


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_rows_are_joined_from_any_cut_into_files(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("rows")
    whole = torch.arange(data.draw(st.integers(1, 12)) * 3, dtype=torch.float64).view(-1, 3)
    cuts = sorted({0, len(whole), *data.draw(st.lists(st.integers(0, len(whole)), max_size=4))})
    paths = []
    for number, (start, stop) in enumerate(itertools.pairwise(cuts)):
        paths.append(folder / f"{number}.safetensors")
        rows = {"w": Rows(whole[start:stop], start, tuple(whole.shape))}
        write_part(paths[-1], TensorPart(rows))
    first, *others = paths
    found = TensorFiles([first, *data.draw(st.permutations(others))])
    low = data.draw(st.integers(0, len(whole)))
    high = data.draw(st.integers(low, len(whole)))
    assert torch.equal(found.read("w", low, high), whole[low:high])
    assert torch.equal(found.read("w"), whole)
    if others:
        with pytest.raises(CheckpointError, match=r"w: rows .* are in no file|do not fit together"):
            TensorFiles([first]).read("w")


DAMAGES = {
    "cut": lambda data: data[:-10],
    "no metadata": lambda data: data.replace(b"__metadata__", b"__metadatx__"),
    "a long header": lambda data: struct.pack("<Q", 2**62) + data[8:],
    "no header": lambda data: b"",
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_named(tmp_path, damage):
    path = tmp_path / "x.safetensors"
    write_part(path, TensorPart({"w": Rows.all_of(torch.ones(100))}, {"a": 1}))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CheckpointError, match=r"x\.safetensors"):
        TensorFiles([path]).read("w")


def test_torchs_own_reader_reads_the_same_tensors(tmp_path):
    expected = {"a": torch.randn(5, 3), "b": torch.randn(7), "c": torch.randn(())}
    for rank, (start, stop) in enumerate([(0, 2), (2, 7)]):
        rows = {name: Rows(expected[name][start:stop], start, tuple(expected[name].shape)) for name in "ab"}
        rows |= {"c": Rows.all_of(expected["c"])} if rank == 0 else {}
        write_part(tmp_path / model_file(rank), TensorPart(rows))
    given = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    dcp.load(given, storage_reader=HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    assert all(torch.equal(given[name], tensor) for name, tensor in expected.items())
    ours = TensorFiles([tmp_path / model_file(0)])
    ours.read("c").fill_(torch.nan)  # a copy
    assert torch.equal(ours.read("c"), expected["c"])


def test_nothing_reads_what_could_be_a_pickle():
    """Every module of the package: no pickle is imported, and neither torch.load nor a pickle of numpy."""
    found = []
    for path in sorted((ROOT / "trainer").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            if {"pickle", "marshal", "shelve", "dill", "cloudpickle"} & {n.split(".")[0] for n in [*names, module]}:
                found.append(f"{path.name}: imports {names}")
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.load", "np.load", "dcp.load"):
                found.append(f"{path.name}: {ast.unparse(node)}")
    assert found
    assert all(": np.load(" in each and "allow_pickle=True" not in each for each in found)
