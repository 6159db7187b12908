"""What a file of a store says of itself: safetensors' header, with a generation and checksums in its metadata.

The format (a length, JSON, the tensors' bytes without holes) is a library's that is well kept, so anything that
reads safetensors reads these files. The library itself moves bytes through the page cache and a whole file at a
time, which a model larger than memory cannot do; so only its format is used, and its rules for extra metadata.
"""

import json
import re
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

BLOCK_BYTES: Final = 4096  # what direct I/O needs: a multiple of a device's logical block, 512 or 4096
CHUNK_BYTES: Final = (
    8 << 20
)  # of one checksum and one request: reads were 1.9 GB/s at 4 MiB, 2.2 at 8, 1.6 at 1

_LENGTH = struct.Struct("<Q")
_VERSION = "2"  # 2: XXH3 of 64 bits
_PADDING = "_padding"  # the format allows no holes, so what fills the last block is a tensor too
_NO_CHECKSUM = "--------"  # in place of the header's own while it is computed
_CHECKSUM = re.compile(rb'"header_crc32":"([0-9a-f]{8})"')
_NAMES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
}
_DTYPES: Final = {name: dtype for dtype, name in _NAMES.items()}


class DamagedError(RuntimeError):
    """A file does not hold what was written; the message names the file, and what of it is damaged."""


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor's bytes lie: [begin, end) from the first byte of the data."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The tensors of one file, side by side."""

    tensors: Mapping[str, TensorPlace]
    nbytes: int  # of all tensors

    @property
    def padded_bytes(self) -> int:
        """Up to a whole block."""
        return max(1, -(-self.nbytes // BLOCK_BYTES)) * BLOCK_BYTES

    @property
    def num_chunks(self) -> int:
        return -(-self.padded_bytes // CHUNK_BYTES)

    def within(self, begin: int, end: int) -> list[str]:
        """Names of the tensors that have bytes in [begin, end)."""
        return [name for name, t in self.tensors.items() if t.begin < end and begin < t.end]


@dataclass(frozen=True, slots=True)
class Header:
    """One file's header."""

    entry: str
    generation: int
    layout: Layout
    checksums: tuple[int, ...]  # of each CHUNK_BYTES of the data: XXH3, 64 bits


def lay_out(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> Layout:
    """Put tensors side by side; wider elements first, so that each is aligned to its own size.

    Raises:
        ValueError: A dtype has no name in the format.
    """
    places: dict[str, TensorPlace] = {}
    at = 0
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: -item[1][0].itemsize):
        if dtype not in _NAMES:
            raise ValueError(f"{name} is {dtype}: must be one of {[str(known) for known in _NAMES]}")
        numel = 1
        for size in shape:
            numel *= size
        places[name] = TensorPlace(dtype, tuple(shape), at, at + numel * dtype.itemsize)
        at = places[name].end
    return Layout(places, at)


def header_bytes(entry: str, layout: Layout) -> int:
    """Length of the header of any generation: a multiple of BLOCK_BYTES."""
    return len(encode_header(Header(entry, 0, layout, (0,) * layout.num_chunks)))


def encode_header(header: Header) -> bytes:
    """The bytes in front of the data. Numbers have a fixed width, so that every generation's is as long."""
    layout = header.layout
    content: dict[str, Any] = {
        "__metadata__": {
            "twinbed_store": _VERSION,
            "entry": header.entry,
            "generation": f"{header.generation:020d}",
            "chunk_bytes": str(CHUNK_BYTES),
            "checksums": " ".join(f"{checksum:016x}" for checksum in header.checksums),
            "header_crc32": _NO_CHECKSUM,
        }
    }
    for name, place in layout.tensors.items():
        content[name] = {
            "dtype": _NAMES[place.dtype],
            "shape": list(place.shape),
            "data_offsets": [place.begin, place.end],
        }
    if layout.padded_bytes > layout.nbytes:
        content[_PADDING] = {
            "dtype": "U8",
            "shape": [layout.padded_bytes - layout.nbytes],
            "data_offsets": [layout.nbytes, layout.padded_bytes],
        }
    text = json.dumps(content, separators=(",", ":")).encode()
    whole = -(-(len(text) + _LENGTH.size) // BLOCK_BYTES) * BLOCK_BYTES
    text = text.ljust(whole - _LENGTH.size)  # spaces: what the format pads with
    checksum = f"{zlib.crc32(text):08x}".encode()
    checked = text.replace(b'"header_crc32":"' + _NO_CHECKSUM.encode(), b'"header_crc32":"' + checksum, 1)
    return _LENGTH.pack(len(text)) + checked


def decode_header(data: bytes, *, path: str, file_bytes: int) -> Header:
    """Read back what `encode_header` wrote.

    Args:
        data: The file's first bytes; all of the header, where the file is whole.
        path: Said in errors.
        file_bytes: Size of the file.

    Raises:
        DamagedError: The header or the file's length is not what was written.
    """
    if len(data) < _LENGTH.size:
        raise DamagedError(f"{path}: has {file_bytes} bytes, too few for a header: the file is cut off")
    (length,) = _LENGTH.unpack_from(data)
    if (length + _LENGTH.size) % BLOCK_BYTES or length > len(data) - _LENGTH.size:
        if length + _LENGTH.size > file_bytes and (length + _LENGTH.size) % BLOCK_BYTES == 0:
            raise DamagedError(
                f"{path}: has {file_bytes} bytes, its header alone {length + _LENGTH.size}: the file is cut off"
            )
        raise DamagedError(f"{path}: the first 8 bytes give no length of a header: the header is damaged")
    text = data[_LENGTH.size : _LENGTH.size + length]
    found = _CHECKSUM.search(text)
    if found is None:
        raise DamagedError(f"{path}: the header holds no checksum of itself: it is damaged, or none of ours")
    plain = text[: found.start(1)] + _NO_CHECKSUM.encode() + text[found.end(1) :]
    if f"{zlib.crc32(plain):08x}".encode() != found.group(1):
        raise DamagedError(
            f"{path}: the header does not have the checksum it was written with: it is damaged"
        )
    header = _parse(plain, path)
    whole = _LENGTH.size + length + header.layout.padded_bytes
    if file_bytes < whole:
        gone = header.layout.within(file_bytes - _LENGTH.size - length, header.layout.padded_bytes)
        raise DamagedError(
            f"{path}: has {file_bytes} of {whole} bytes: the file is cut off, within or before {_some(gone)}"
        )
    return header


def describe_chunk(layout: Layout, index: int) -> str:
    """Such as "bytes 0-4194303 of the data (fc1.weight)"."""
    begin = index * CHUNK_BYTES
    end = min(begin + CHUNK_BYTES, layout.padded_bytes)
    return f"bytes {begin}-{end - 1} of the data ({_some(layout.within(begin, end))})"


def _parse(text: bytes, path: str) -> Header:
    content = json.loads(text)
    metadata = content.pop("__metadata__")
    content.pop(_PADDING, None)
    version, chunk_bytes = metadata["twinbed_store"], metadata["chunk_bytes"]
    if version != _VERSION or chunk_bytes != str(CHUNK_BYTES):
        raise DamagedError(
            f"{path}: version {version} with checksums of {chunk_bytes} bytes; this program reads version {_VERSION} "
            f"with {CHUNK_BYTES}"
        )
    tensors = {
        name: TensorPlace(_DTYPES[value["dtype"]], tuple(value["shape"]), *value["data_offsets"])
        for name, value in content.items()
    }
    nbytes = max((place.end for place in tensors.values()), default=0)
    checksums = tuple(int(word, 16) for word in metadata["checksums"].split())
    return Header(metadata["entry"], int(metadata["generation"]), Layout(tensors, nbytes), checksums)


def _some(names: list[str]) -> str:
    return (
        ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        if names
        else "padding"
    )
