"""What a store says of itself as a whole: which generation is in which files; and the lock of who has it."""

import fcntl
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from .header import DamagedError

MANIFEST: Final = "store.json"
LOCK: Final = ".lock"
_VERSION = 1


class StoreError(RuntimeError):
    """A store cannot be made, opened or written to; the message says why, and what is intact."""


@dataclass(frozen=True, slots=True)
class Version:
    """One entry as a commit knows it."""

    slot: int
    generation: int  # in which it was written


@dataclass(frozen=True, slots=True)
class Commit:
    """A generation that is whole."""

    generation: int
    versions: Mapping[str, Version]
    notes: Mapping[str, Any]  # the owner's: steps done, loss scale


def committed_generations(folder: Path) -> list[int]:
    """Generations that `open` could go on from, newest first; empty if there is no store.

    Raises:
        DamagedError: The manifest is damaged.
    """
    if not (folder / MANIFEST).exists():
        return []
    return [commit.generation for commit in read_manifest(folder)[0]]


def stored_identity(folder: Path) -> dict[str, Any]:
    """What the store's tensors belong to, as `create` was given it.

    Raises:
        StoreError: There is none.
        DamagedError: The manifest is damaged.
    """
    return read_manifest(folder)[1]


def locked(folder: Path, *, shared: bool) -> IO[str]:
    """The store's lock, which goes with the process, however it ends.

    Raises:
        StoreError: Another process has it.
    """
    try:
        file = (folder / LOCK).open("a+", encoding="ascii")
    except OSError:
        if not shared:
            raise
        file = (folder / MANIFEST).open(encoding="ascii")  # a folder that is only read
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as err:
        file.close()
        raise StoreError(
            f"{folder} is in use by another run: wait for it, or give this one another folder"
        ) from err
    return file


def remove_store(folder: Path) -> None:
    """Delete a store's files, and nothing else that lies in its folder.

    Raises:
        StoreError: Another process has it.
    """
    with locked(folder, shared=False):
        (folder / MANIFEST).unlink(missing_ok=True)
        for path in folder.glob("*.safetensors"):
            path.unlink()


def read_manifest(folder: Path) -> tuple[list[Commit], dict[str, Any]]:
    path = folder / MANIFEST
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as err:
        raise StoreError(f"{folder} holds no committed store: {path}: {err.strerror}") from err
    body, _, checksum = text.rstrip("\n").rpartition("\n")
    if checksum != _manifest_checksum(body):
        raise DamagedError(f"{path}: does not have the checksum it was written with: the manifest is damaged")
    content = json.loads(body)
    if content["version"] != _VERSION:
        raise StoreError(f"{path}: version {content['version']}; this program reads version {_VERSION}")
    commits = [
        Commit(
            commit["generation"],
            {entry: Version(*version) for entry, version in commit["versions"].items()},
            commit["notes"],
        )
        for commit in content["commits"]
    ]
    return commits, content["identity"]


def write_manifest(folder: Path, commits: Sequence[Commit], identity: Mapping[str, Any]) -> None:
    content = {
        "version": _VERSION,
        "identity": identity,
        "commits": [
            {
                "generation": commit.generation,
                "versions": {entry: [v.slot, v.generation] for entry, v in commit.versions.items()},
                "notes": commit.notes,
            }
            for commit in commits
        ],
    }
    body = json.dumps(content)
    partial_path = folder / f".{MANIFEST}.partial"
    with partial_path.open("w", encoding="utf-8") as file:
        file.write(f"{body}\n{_manifest_checksum(body)}\n")
        file.flush()
        os.fsync(file.fileno())
    partial_path.rename(folder / MANIFEST)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)  # of the rename
    finally:
        os.close(descriptor)


def _manifest_checksum(body: str) -> str:
    return f"crc32:{zlib.crc32(body.encode()):08x}"
