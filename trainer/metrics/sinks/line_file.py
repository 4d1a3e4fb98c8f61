"""A file to which complete lines are appended, each in one write."""

from __future__ import annotations

import os
from pathlib import Path

from trainer.metrics.logger import get_logger
from trainer.untrusted import open_descriptor, parse_json

logger = get_logger(__name__)


class LineFile:
    """Appends lines to a file; a line is completely passed to the operating system before `append` returns.

    The lines are JSON objects. On opening, a last line without a newline (the writer was killed, the disk was full) is
    repaired: a complete object gets its newline, a fragment is removed, so that the file has only complete lines.

    If the file, or its directory, is removed or replaced by somebody, further lines would go into a nameless file.
    That is noticed at the next line, which begins a new file, with a warning.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open()
        self._is_open = True
        try:
            self._repair_last_line()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = open_descriptor(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND)

    def _is_in_place(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._fd), os.lstat(self.path))
        except FileNotFoundError:
            return False

    def _repair_last_line(self) -> None:
        end = os.lseek(self._fd, 0, os.SEEK_END)
        tail = self._unfinished_tail(end)
        if not tail:
            return
        if _is_json_object(tail):
            self._write(b"\n")
        else:
            os.ftruncate(self._fd, end - len(tail))
            logger.warning("%s: removed %d bytes of an incomplete last line", self.path, len(tail))

    def _unfinished_tail(self, end: int) -> bytes:
        """The bytes after the last newline."""
        tail = b""
        while end > 0:
            start = max(0, end - 65536)
            chunk = os.pread(self._fd, end - start, start)
            newline = chunk.rfind(b"\n")
            tail = chunk[newline + 1 :] + tail
            if newline >= 0:
                break
            end = start
        return tail

    def append(self, line: str) -> None:
        """Write one line.

        Raises:
            OSError: the line could not be written completely (disk full, quota); the error names the file.
        """
        if not self._is_in_place():
            logger.warning(
                "%s was removed or replaced; what it held before is lost, a new file continues here", self.path
            )
            os.close(self._fd)
            self._open()
        self._write(line.encode("utf-8") + b"\n")

    def _write(self, data: bytes) -> None:
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from None

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._is_open:
            self._is_open = False
            if not self._is_in_place():
                logger.warning("%s was removed or replaced; what it held is lost", self.path)
            os.close(self._fd)


def _is_json_object(text: bytes) -> bool:
    try:
        return isinstance(parse_json(text), dict)
    except ValueError:
        return False
