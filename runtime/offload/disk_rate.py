"""How fast a disk reads and writes by itself, past the page cache, and how long a store takes to move a chunk."""

import contextlib
import errno
import mmap
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from .header import BLOCK_BYTES, CHUNK_BYTES, lay_out
from .manifest import StoreError
from .region import Region
from .store import Store

DEPTHS = (1, 2, 4, 8)  # requests in flight; the disk's rate is that of the best
MOVED_BYTES = (2 << 20, 32 << 20)  # each a multiple of a huge page
MOVES = 12
SMALL_READS = 64  # of a block each, one after the other


@dataclass(frozen=True, slots=True)
class DiskRate:
    """Of one process with the disk to itself."""

    read_Bps: float
    write_Bps: float
    latency_ns: int  # of a read of one block


def measure_disk(folder: Path, *, nbytes: int = 512 << 20) -> DiskRate:
    """Write and read one file of `nbytes` from end to end, in requests of CHUNK_BYTES.

    The file has its blocks before, as those of a store have. A write ends when it is on the disk (fdatasync).

    Raises:
        OSError: There is no room, or the file system knows no direct I/O.
    """
    path = folder / ".rate"
    num_chunks = max(1, nbytes // CHUNK_BYTES)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, num_chunks * CHUNK_BYTES)
        buffers = [_random_pages() for _ in range(max(DEPTHS))]

        def write(index: int, buffer: mmap.mmap) -> None:
            os.pwrite(descriptor, buffer, index * CHUNK_BYTES)

        def read(index: int, buffer: mmap.mmap) -> None:
            os.preadv(descriptor, [buffer], index * CHUNK_BYTES)

        _pass(write, num_chunks, buffers[:1])  # the first write to a block costs more than those after it
        write_s = min(
            _pass(write, num_chunks, buffers[:depth], lambda: os.fdatasync(descriptor)) for depth in DEPTHS
        )
        read_s = min(_pass(read, num_chunks, buffers[:depth]) for depth in DEPTHS)
        latency_s = _latency_s(descriptor, num_chunks * CHUNK_BYTES)
    finally:
        os.close(descriptor)
        path.unlink()
    whole = num_chunks * CHUNK_BYTES
    return DiskRate(whole / read_s, whole / write_s, round(latency_s * 1e9))


@dataclass(frozen=True, slots=True)
class MoveCost:
    """Of a chunk that a store moves by itself: a fixed time, and a rate for its bytes.

    Besides the disk's own, the time goes to checksums, the system calls, and pages that are faulted in and freed.
    """

    fetch_ns: int
    fetch_Bps: float
    evict_ns: int
    evict_Bps: float


def measure_moves(folder: Path) -> MoveCost:
    """Move chunks of MOVED_BYTES out of memory and back as offload=disk does, one at a time.

    Raises:
        OSError: There is no room.
    """
    seconds = {}
    for nbytes in MOVED_BYTES:
        with _one_chunk(folder / f".moves{nbytes}", nbytes) as (store, region):
            seconds[nbytes] = _move_s(store, region)
    (fetch_ns, fetch_Bps), (evict_ns, evict_Bps) = (
        _line(*(seconds[nbytes][way] for nbytes in MOVED_BYTES)) for way in range(2)
    )
    return MoveCost(fetch_ns, fetch_Bps, evict_ns, evict_Bps)


@contextlib.contextmanager
def _one_chunk(folder: Path, nbytes: int) -> Iterator[tuple[Store, Region]]:
    layout = lay_out({"x": (torch.uint8, (nbytes,))})
    region = Region(layout)
    region.tensors["x"].random_()
    shutil.rmtree(folder, ignore_errors=True)  # what a kill left of an earlier one
    try:
        store = Store.create(folder, {"x": layout}, {})
    except StoreError as err:
        shutil.rmtree(folder, ignore_errors=True)
        raise OSError(errno.ENOSPC, str(err)) from err
    try:
        yield store, region
    finally:
        store.remove()


def _move_s(store: Store, region: Region) -> tuple[float, float]:
    """Seconds to fetch and to evict the chunk, medians of the later half: the first rounds find new memory."""
    fetches, evictions = [], []
    for _ in range(2 * MOVES):
        start = time.monotonic()
        store.write("x", region, release=True).result()
        evicted = time.monotonic()
        store.read("x", region).result()
        evictions.append(evicted - start)
        fetches.append(time.monotonic() - evicted)
        store.commit({})
    return statistics.median(fetches[MOVES:]), statistics.median(evictions[MOVES:])


def _line(small_s: float, large_s: float) -> tuple[int, float]:
    """(nanoseconds for no bytes, bytes a second) of moves of MOVED_BYTES."""
    small, large = MOVED_BYTES
    per_byte = max(large_s - small_s, large_s / 10) / (large - small)
    return round(max(0.0, small_s - small * per_byte) * 1e9), 1 / per_byte


def _pass(
    move: Callable[[int, mmap.mmap], None],
    num_chunks: int,
    buffers: list[mmap.mmap],
    end: Callable[[], None] = lambda: None,
) -> float:
    """Seconds for all chunks in their order, one request a buffer in flight."""

    def worker(first: int) -> None:
        for index in range(first, num_chunks, len(buffers)):
            move(index, buffers[first])

    start = time.monotonic()
    with ThreadPoolExecutor(len(buffers)) as pool:
        list(pool.map(worker, range(len(buffers))))
    end()
    return time.monotonic() - start


def _latency_s(descriptor: int, nbytes: int) -> float:
    """Median of reads all over the file."""
    page = mmap.mmap(-1, BLOCK_BYTES)
    times = []
    for i in range(SMALL_READS):
        start = time.monotonic()
        os.preadv(descriptor, [page], i * nbytes // SMALL_READS // BLOCK_BYTES * BLOCK_BYTES)
        times.append(time.monotonic() - start)
    return statistics.median(times)


def _random_pages() -> mmap.mmap:
    """Aligned, and not to be compressed away."""
    pages = mmap.mmap(-1, CHUNK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)  # as a region's: the device is given fewer, longer pieces
    pages.write(os.urandom(CHUNK_BYTES))
    return pages
