"""Files that are not UTF-8 text are found, wherever a chunk of reading ends."""

from __future__ import annotations

import pytest

from trainer.tools.inspection import verify


@pytest.mark.parametrize("size", [1, 2, 3, 5, 1 << 20])
@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", ""),
        ("plain, \u00e9, \u20ac and \U0001f600", ""),
        (b"\xef\xbb\xbfmarked", ""),
        (b"abc\xe9d", "not UTF-8: byte 0xe9 at offset 3"),
        ("\u20ac".encode() + b"x\xff", "not UTF-8: byte 0xff at offset 4"),
        (b"cut \xe2\x82", "not UTF-8: byte 0xe2 at offset 4"),
        (b"abcde\0", "binary: a NUL byte at offset 5"),
        ("\u20ac".encode() + b"\0", "binary: a NUL byte at offset 3"),
        ("text".encode("utf-16"), "not UTF-8: byte 0xff at offset 0"),
    ],
)
def test_the_first_wrong_byte_is_named(tmp_path, monkeypatch, content, why, size):
    monkeypatch.setattr(verify, "CHUNK_BYTES", size)
    path = tmp_path / "a.txt"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    assert verify.why_not_text(path) == why
