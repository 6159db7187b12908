"""Reading and writing one file of a store in chunks, past the page cache where the file system can."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from xxhash import xxh3_64_intdigest as checksum

from .header import (
    BLOCK_BYTES,
    CHUNK_BYTES,
    DamagedError,
    Header,
    decode_header,
    describe_chunk,
    encode_header,
)
from .region import Region

_MAX_HEADER_BYTES = 64 << 20  # safetensors takes 100 MB; a damaged length must not make us read a whole file


def supports_direct(folder: Path) -> bool:
    """Whether files in `folder` can be written past the page cache."""
    path = folder / ".direct"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    except OSError as err:
        if err.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return False
        raise
    finally:
        path.unlink(missing_ok=True)
    os.close(descriptor)
    return True


class DataFile:
    """Header and data of one entry in one of its slots.

    Args:
        path: Of the file.
        header_bytes: Where the data begin.
        direct: Past the page cache. If not, the cache is told to forget what went through it.
    """

    def __init__(self, path: Path, header_bytes: int, *, direct: bool) -> None:
        self.path = path
        self._header_bytes = header_bytes
        self._direct = direct

    def reserve(self, data_bytes: int) -> None:
        """Make the file with all its blocks, so that a disk too small is found before anything is computed.

        Raises:
            OSError: There is no room.
        """
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, self._header_bytes + data_bytes)
        finally:
            os.close(descriptor)

    def write_chunk(self, region: Region, index: int) -> int:
        """Write a chunk of the region; its checksum.

        Raises:
            OSError: It cannot be written.
        """
        begin, end = _span(region, index)
        data = region.chunk(begin, end)
        with self._open(os.O_WRONLY, direct=self._direct) as descriptor:
            _write_all(descriptor, data, self._header_bytes + begin)
        return checksum(data)

    def seal(self, header: Header) -> None:
        """Write the header, when all chunks are there; from then on nothing is lost if the power is.

        Raises:
            OSError: It cannot be written.
        """
        with self._open(os.O_WRONLY, direct=False) as descriptor:
            _write_all(descriptor, memoryview(encode_header(header)), 0)
            os.fdatasync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def read_header(self) -> Header:
        """What the file says of itself.

        Raises:
            DamagedError: It is gone, cut off, or its header is damaged.
        """
        try:
            with self._open(os.O_RDONLY, direct=False) as descriptor:
                file_bytes = os.fstat(descriptor).st_size
                data = os.pread(descriptor, BLOCK_BYTES, 0)
                length = int.from_bytes(data[:8], "little") + 8
                if BLOCK_BYTES < length <= min(_MAX_HEADER_BYTES, file_bytes):
                    data = os.pread(descriptor, length, 0)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError as err:
            raise DamagedError(f"{self.path} cannot be read: {err.strerror}") from err
        return decode_header(data, path=str(self.path), file_bytes=file_bytes)

    def read_chunk(self, region: Region, index: int, expected: int) -> None:
        """Read a chunk into the region.

        Raises:
            DamagedError: The file ends early, cannot be read, or the bytes have another checksum.
        """
        begin, end = _span(region, index)
        data, where = region.chunk(begin, end), describe_chunk(region.layout, index)
        try:
            with self._open(os.O_RDONLY, direct=self._direct) as descriptor:
                at = 0
                while at < len(data):
                    at += os.preadv(descriptor, [data[at:]], self._header_bytes + begin + at)
                    if at < len(data) and os.fstat(descriptor).st_size < self._header_bytes + end:
                        raise DamagedError(f"{self.path}: ends within {where}: the file is cut off")
                if not self._direct:
                    first = self._header_bytes + begin
                    os.posix_fadvise(descriptor, first, len(data), os.POSIX_FADV_DONTNEED)
        except OSError as err:
            raise DamagedError(f"{self.path}: {where} cannot be read: {err.strerror}") from err
        if checksum(data) != expected:
            raise DamagedError(
                f"{self.path}: {where} do not have the checksum they were written with: they are damaged"
            )

    @contextmanager
    def _open(self, mode: int, *, direct: bool) -> Iterator[int]:
        descriptor = os.open(self.path, mode | (os.O_DIRECT if direct else 0))
        try:
            yield descriptor
        finally:
            os.close(descriptor)


def _span(region: Region, index: int) -> tuple[int, int]:
    begin = index * CHUNK_BYTES
    return begin, min(begin + CHUNK_BYTES, region.layout.padded_bytes)


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    at = 0
    while at < len(data):
        at += os.pwrite(descriptor, data[at:], offset + at)
