"""A text file that a user brings, and errors that name it with the line."""

from dataclasses import dataclass
from pathlib import Path

# Topologies and tables are a few kB, logs around them a few MB
_LARGEST_BYTES = 64_000_000


@dataclass(frozen=True, slots=True)
class Source:
    """One file: its path as it was given, and its text."""

    path: str
    text: str

    @property
    def name(self) -> str:
        return Path(self.path).name

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    def error(self, line: int, message: str) -> ValueError:
        """An error at a line, counted from 1."""
        return ValueError(f"{self.path}:{line}: {message}")


def read_source(path: str | Path) -> Source:
    """The text of a file.

    Raises:
        ValueError: The file is missing, a directory, unreadable, empty, or not text.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(_LARGEST_BYTES + 1)
    except OSError as err:
        raise ValueError(f"{path}: {err.strerror or err}") from err
    if len(data) > _LARGEST_BYTES:
        raise ValueError(
            f"{path}: is larger than {_LARGEST_BYTES // 1_000_000} MB; give the table or topology alone"
        )
    # PowerShell's redirection writes UTF-16; editors on Windows put a byte-order mark before UTF-8
    encoding = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    if encoding == "utf-8-sig" and b"\0" in data:
        raise ValueError(
            f"{path}:{_line_of(data, data.index(0))}: holds a zero byte: this is a binary file, not text"
        )
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as err:
        line = _line_of(data, err.start)
        raise ValueError(f"{path}:{line}: byte {err.start} is not text: this is a binary file") from err
    if not text.strip():
        raise ValueError(f"{path}:1: the file is empty")
    return Source(str(path), text)


def _line_of(data: bytes, at: int) -> int:
    return data[:at].count(b"\n") + 1
