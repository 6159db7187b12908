"""IDX files, in which MNIST and what followed it are published: a magic number, sizes, and the bytes.

Format: yann.lecun.com/exdb/mnist; two zero bytes, the type (8: unsigned byte), the number of sizes, the sizes as
big-endian 32-bit numbers, then the elements, the last size running fastest. Imports no torch.
"""

import gzip
import math
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

_GZIP_MAGIC = b"\x1f\x8b"


def read_idx(path: Path, *, num_sizes: int) -> npt.NDArray[np.uint8]:
    """The array of one file, plain or compressed by gzip (told by its first bytes, not by its name).

    Args:
        num_sizes: 3 for images (number, rows, columns), 1 for labels.

    Raises:
        ValueError: The file cannot be read, is of another kind, or is shorter or longer than its sizes say; the
            message begins with its path.
    """
    try:
        content = path.read_bytes()
        if content.startswith(_GZIP_MAGIC):
            content = gzip.decompress(content)
    except (EOFError, zlib.error, gzip.BadGzipFile) as err:
        raise ValueError(f"{path}: the gzip file is damaged or truncated: {err}") from err
    except OSError as err:
        raise ValueError(f"{path}: cannot be read: {err.strerror or err}") from err
    header = 4 + 4 * num_sizes
    expected = bytes((0, 0, 8, num_sizes))
    if content[:4] != expected:
        raise ValueError(
            f"{path}: is no IDX file of unsigned bytes with {num_sizes} sizes: it begins with "
            f"{content[:4].hex(' ') or 'nothing'}, must be {expected.hex(' ')}"
        )
    if len(content) < header:
        raise ValueError(f"{path}: truncated within its header of {header} bytes: has {len(content)}")
    sizes = tuple(int.from_bytes(content[4 + 4 * i : 8 + 4 * i], "big") for i in range(num_sizes))
    if len(content) - header != math.prod(sizes):
        said = " x ".join(map(str, sizes))
        what = "truncated" if len(content) - header < math.prod(sizes) else "longer than it says"
        raise ValueError(
            f"{path}: {what}: its header says {said} = {math.prod(sizes)} bytes, and "
            f"{len(content) - header} follow"
        )
    return np.frombuffer(content, np.uint8, offset=header).reshape(sizes)
