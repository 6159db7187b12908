"""Tensors in files, in generations: a crash leaves the last generation that was committed.

Every entry has two files (slots). Writes go to the slot that the last commit does not name, so what was committed
is never touched; a commit writes a manifest of which slot is which, and renames it into place. After a kill at any
moment the manifest names files that are whole, or the start says which of them are not.

    folder/store.json             what is committed, and the generation before it
    folder/<entry>.0.safetensors  (and .1) an entry's slots: header.py

Writes and reads are asynchronous. One program owns a store at a time.
"""

import contextlib
import errno
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from .data_file import DataFile, supports_direct
from .header import DamagedError, Header, Layout, header_bytes
from .manifest import LOCK, MANIFEST, Commit, StoreError, Version, locked, read_manifest, write_manifest
from .region import Region
from .transfers import Transfers


class Store:
    """Use `create` or `open`.

    Attributes:
        direct: Whether reads and writes go past the page cache.
        read_bytes, written_bytes: Of data, so far.
    """

    def __init__(
        self,
        folder: Path,
        layouts: Mapping[str, Layout],
        identity: Mapping[str, Any],
        *,
        num_threads: int,
        direct: bool,
        num_slots: int = 2,
        shared: bool = False,
    ) -> None:
        self.folder = folder
        self._lock = locked(folder, shared=shared)
        self.direct = direct and supports_direct(folder)
        self.read_bytes = self.written_bytes = 0
        self._layouts = dict(layouts)
        self._identity = dict(identity)
        self._transfers = Transfers(num_threads)
        self._files = {
            entry: [
                DataFile(
                    folder / f"{entry.replace('/', '.')}.{slot}.safetensors",
                    header_bytes(entry, layout),
                    direct=self.direct,
                )
                for slot in range(num_slots)
            ]
            for entry, layout in layouts.items()
        }
        self._commits: tuple[Commit, ...] = ()  # the newest first
        self._versions: dict[str, Version] = {}  # what a read gives
        self._checksums: dict[str, tuple[int, ...]] = {}
        self._writing: dict[str, Future[None]] = {}

    @classmethod
    def create(
        cls,
        folder: Path,
        layouts: Mapping[str, Layout],
        identity: Mapping[str, Any],
        *,
        num_threads: int = 4,
        direct: bool = True,
        num_slots: int = 2,
    ) -> "Store":
        """Reserve all files of a new store; files of one that has no manifest are replaced.

        Args:
            folder: Made if need be.
            layouts: By entry.
            identity: What the tensors belong to; opening asks for the same.
            num_slots: 1: it is written once, and then only read.

        Raises:
            StoreError: There is a store in the folder, or no room for one.
        """
        if (folder / MANIFEST).exists():
            raise StoreError(f"{folder} holds a store already: go on from it, or remove the folder")
        folder.mkdir(parents=True, exist_ok=True)
        store = cls(folder, layouts, identity, num_threads=num_threads, direct=direct, num_slots=num_slots)
        try:
            store._reserve()
        except BaseException:
            store.close()
            (folder / LOCK).unlink(missing_ok=True)
            raise
        return store

    @classmethod
    def open(
        cls,
        folder: Path,
        layouts: Mapping[str, Layout],
        identity: Mapping[str, Any],
        *,
        generation: int | None = None,
        num_threads: int = 4,
        direct: bool = True,
        shared: bool = False,
    ) -> "Store":
        """Go on from what was committed; every byte of it is checked first.

        Args:
            shared: It is only read, and others may read it too.
            generation: One of `committed_generations`; None: the newest.

        Raises:
            StoreError: There is nothing committed, or of something else.
            DamagedError: Naming every file that is damaged, and what of it.
        """
        commits, found_identity = read_manifest(folder)
        differ = [
            key
            for key in sorted({*identity, *found_identity})
            if _plain(identity.get(key)) != found_identity.get(key)
        ]
        if differ:
            key = differ[0]
            there, here = found_identity.get(key), _plain(identity.get(key))
            if isinstance(there, dict) and isinstance(here, dict):  # the part in which they differ
                part = next(k for k in sorted({*there, *here}) if there.get(k) != here.get(k))
                key, there, here = f"{key}.{part}", there.get(part), here.get(part)
            raise StoreError(f"{folder} holds a store of another run: {key}={there!r} there, {here!r} here")
        chosen = [c for c in commits if generation is None or c.generation == generation]
        if not chosen:
            raise StoreError(
                f"{folder} holds generations {[c.generation for c in commits]}, not generation {generation}"
            )
        if chosen[0].versions.keys() != layouts.keys():
            raise StoreError(f"{folder} holds {sorted(chosen[0].versions)}; {sorted(layouts)} are asked for")
        store = cls(folder, layouts, identity, num_threads=num_threads, direct=direct, shared=shared)
        store._commits = tuple(commits[commits.index(chosen[0]) :])
        store._versions = dict(chosen[0].versions)
        try:
            store._check()
        except BaseException:
            store.close()
            raise
        if chosen[0] is not commits[0]:  # what is newer will be written over
            write_manifest(folder, store._commits, identity)
        return store

    @property
    def committed(self) -> Commit | None:
        """What a start after a crash would find."""
        return self._commits[0] if self._commits else None

    def read(self, entry: str, region: Region, *, after: Sequence["Future[None]"] = ()) -> "Future[None]":
        """Begin to bring an entry in: what was written last, committed or not.

        Args:
            region: Of the entry's layout.
            after: The read begins when these have ended (and a write of the same entry).

        Returns:
            When it is there. Raises DamagedError if it is not what was written.
        """
        version = self._versions[entry]
        pending = self._writing.get(entry)
        waits = [*after, *([pending] if pending is not None else [])]
        return self._transfers.start(
            [
                partial(self._read_chunk, entry, version, region, index, pending)
                for index in range(region.layout.num_chunks)
            ],
            partial(self._count_read, region.layout.padded_bytes),
            after=waits,
        )

    def write(self, entry: str, region: Region, *, release: bool = False) -> "Future[None]":
        """Begin to write an entry; the region must not change until that is done.

        Args:
            release: Give the region's memory away afterwards.

        Returns:
            When it is on disk. Raises StoreError if it cannot be written.
        """
        committed = self._commits[0].versions.get(entry) if self._commits else None
        slot = 1 - committed.slot if committed is not None else 0
        generation = self._commits[0].generation + 1 if self._commits else 0
        version = Version(slot, generation)
        file = self._files[entry][slot]
        pending = self._writing.get(entry)
        done = self._transfers.start(
            [partial(self._write_chunk, file, region, index) for index in range(region.layout.num_chunks)],
            partial(self._written, entry, version, file, region, release),
            after=[pending] if pending is not None and not pending.done() else [],
        )
        self._writing[entry] = done
        self._versions[entry] = version
        return done

    def wait_for_writes(self) -> None:
        """Until all is on disk.

        Raises:
            StoreError: Something cannot be written.
        """
        writing, self._writing = list(self._writing.values()), {}
        errors = [error for error in (future.exception() for future in writing) if error is not None]
        if errors:
            raise errors[0]

    def commit(self, notes: Mapping[str, Any]) -> None:
        """Make what has been written the generation that a crash leaves; the one before stays until the next write.

        Raises:
            StoreError: Something cannot be written; the last commit stands.
        """
        self.wait_for_writes()
        lacking = sorted(self._layouts.keys() - self._versions.keys())
        if lacking:
            raise StoreError(f"{self.folder}: {lacking} were never written")
        generation = self._commits[0].generation + 1 if self._commits else 0
        commit = Commit(generation, dict(self._versions), dict(notes))
        commits = (commit, *self._commits[:1])
        try:
            write_manifest(self.folder, commits, self._identity)
        except OSError as err:
            raise self._error(err) from err
        self._commits = commits

    def close(self) -> None:
        """Wait for what is under way."""
        self._transfers.close()
        self._lock.close()

    def remove(self) -> None:
        """Close and delete: the manifest first, so that nobody goes on from half of it."""
        self.close()
        (self.folder / MANIFEST).unlink(missing_ok=True)
        for files in self._files.values():
            for file in files:
                file.path.unlink(missing_ok=True)
        (self.folder / LOCK).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # others keep files there
            self.folder.rmdir()

    # ---- on the threads

    def _read_chunk(
        self, entry: str, version: Version, region: Region, index: int, pending: "Future[None] | None"
    ) -> None:
        if pending is not None:
            pending.result()  # has ended; what could not be written is not read
        self._files[entry][version.slot].read_chunk(region, index, self._checksums[entry][index])

    def _count_read(self, nbytes: int, _: list[None]) -> None:
        self.read_bytes += nbytes

    def _write_chunk(self, file: DataFile, region: Region, index: int) -> int:
        try:
            return file.write_chunk(region, index)
        except OSError as err:
            raise self._error(err) from err

    def _written(
        self,
        entry: str,
        version: Version,
        file: DataFile,
        region: Region,
        release: bool,
        checksums: list[int],
    ) -> None:
        try:
            file.seal(Header(entry, version.generation, region.layout, tuple(checksums)))
        except OSError as err:
            raise self._error(err) from err
        self._checksums[entry] = tuple(checksums)
        self.written_bytes += region.layout.padded_bytes
        if release:
            region.release()

    # ---- making and checking

    def _reserve(self) -> None:
        needed = sum(
            len(self._files[entry]) * (header_bytes(entry, layout) + layout.padded_bytes)
            for entry, layout in self._layouts.items()
        )
        made: list[DataFile] = []
        try:
            for entry, files in self._files.items():
                for file in files:
                    made.append(file)
                    file.reserve(self._layouts[entry].padded_bytes)
        except OSError as err:
            for file in made:
                file.path.unlink(missing_ok=True)
            if err.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise StoreError(f"{self.folder}: files cannot be made: {err.strerror}") from err
            free = os.statvfs(self.folder)
            raise StoreError(
                f"{self.folder}: the disk is too small: {needed:,} bytes are needed, "
                f"{free.f_bavail * free.f_frsize:,} are free"
            ) from err

    def _check(self) -> None:
        """Read everything that is committed once."""
        damages: list[str] = []
        for entry, version in self._versions.items():
            file = self._files[entry][version.slot]
            try:
                header = file.read_header()
                _check_header(header, entry, version, self._layouts[entry], file)
                self._checksums[entry] = header.checksums
                region = Region(self._layouts[entry])
                self.read(entry, region).result()
            except DamagedError as err:
                damages.append(str(err))
        self.read_bytes = 0
        if damages:
            newest = self._commits[0]
            raise DamagedError(
                f"{len(damages)} of {len(self._versions)} files of generation {newest.generation} "
                f"({_describe(newest.notes)}) in {self.folder} are damaged: {'; '.join(damages)}"
            )

    def _error(self, err: OSError) -> StoreError:
        intact = "nothing was committed yet"
        if self._commits:
            newest = self._commits[0]
            intact = f"generation {newest.generation} ({_describe(newest.notes)}) is intact"
        what = "the disk is full" if err.errno in (errno.ENOSPC, errno.EDQUOT) else f"{err.strerror}"
        return StoreError(f"{self.folder} cannot be written to: {what}; {intact}")


def _check_header(header: Header, entry: str, version: Version, layout: Layout, file: DataFile) -> None:
    if header.entry != entry or header.generation != version.generation:
        raise DamagedError(
            f"{file.path}: holds {header.entry} of generation {header.generation}; the manifest names {entry} of "
            f"generation {version.generation}"
        )
    if dict(header.layout.tensors) != dict(layout.tensors):
        raise DamagedError(f"{file.path}: holds other tensors than {sorted(layout.tensors)[:3]} ...")


def _describe(notes: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in notes.items()) or "no notes"


def _plain(value: Any) -> Any:
    """As JSON would give it back."""
    return json.loads(json.dumps(value))
