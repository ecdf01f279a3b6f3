"""Records of a run, in files that survive a kill at any moment and are shared by several processes.

`FOLDER/records/<fingerprint>/` holds `settings.json` and one append-only file of JSON lines per process. A line is in
the file before the next item begins, so that a kill loses none, and on the disk a second later (`SYNC`). It ends with a
checksum: a damaged one is reported and never used. The fingerprint is a hash of everything that determines a number: a
run with other settings has another folder. Processes meet in this folder only, without collectives, and share out items
by index; so any launcher can start them, and one that dies leaves the others running.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
import warnings
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock, Timeout

from hf_posenc.errors import PosencError
from hf_posenc.files import disk_errors, finite, to_json, write_atomically

T = TypeVar("T")
Key = tuple[str | int | float | None, ...]


@dataclass(frozen=True)
class Shard:
    """One of the processes of a run; if `launched` all together, the first may wait for the others."""

    index: int = 0
    count: int = 1
    launched: bool = False

    def mine(self, items: Sequence[T]) -> list[T]:
        """Return every `count`-th item from `index` on: determined by the items alone, whatever is stored already."""
        return list(items[self.index :: self.count])


ALONE = Shard()
SYNC = 1.0
"""Least seconds from one `fsync`, which takes milliseconds, to the next: what a power failure may cost."""


def current_shard(text: str | None = None) -> Shard:
    """Return this process's shard: as given (`"2/8"`: the second of eight), else from the launcher's variables."""
    if text is not None:
        match = re.fullmatch(r"\s*(\d+)\s*/\s*(\d+)\s*", text)
        index, count = (int(match[1]), int(match[2])) if match else (0, 0)
        if not 1 <= index <= count:
            raise PosencError(
                f"--shard {text}: give one of 1/N ... N/N, such as 2/8 for the second of eight processes."
            )
        return Shard(index - 1, count)
    world, rank = os.environ.get("WORLD_SIZE", "1"), os.environ.get("RANK", "")
    if world != "1":
        if not (world.isdecimal() and rank.isdecimal() and int(rank) < int(world)):
            raise PosencError(
                f"The environment has WORLD_SIZE={world!r} and RANK={rank!r}; a rank is one of 0 to WORLD_SIZE - 1. "
                "Start the processes with torchrun or accelerate launch, unset both, or pass --shard I/N."
            )
        return Shard(int(rank), int(world), launched=True)
    return Shard()


def fingerprint_of(settings: Mapping[str, Any]) -> str:
    """Return a hash of JSON-ready settings, independent of their order."""
    text = json.dumps(finite(dict(settings)), sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Records:
    """Stored values by key; these end with the process.

    A CPU computes every value with so many `threads`; `None`: as many as the process has.
    """

    threads: int | None = None

    def __init__(self) -> None:
        self._records: dict[Key, dict[str, Any]] = {}

    def get(self, key: Key) -> dict[str, Any] | None:
        """Return the value of a key from any process, as of the last `refresh`; `None` if there is none."""
        return self._records.get(key)

    def append(self, key: Key, value: Mapping[str, Any]) -> None:
        """Store a value, as it would be read from a file."""
        self._records[key] = json.loads(json.dumps(finite(dict(value))))

    def refresh(self) -> None:
        """Read what other processes have stored."""


class Store(Records):
    """The records of one run in files. A context manager: the file of this process is locked while it is open.

    `settings` are everything that determines a number and is not part of the keys, JSON-ready. `command`, which resumes
    an unfinished run, is written beside them.
    """

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, Any],
        shard: Shard = ALONE,
        command: str | None = None,
    ) -> None:
        super().__init__()
        self.fingerprint = fingerprint_of(settings)
        self.folder = folder / "records" / self.fingerprint
        name = f"shard-{shard.index + 1}-of-{shard.count}"
        self._path = self.folder / f"{name}.jsonl"
        self._read_to: dict[Path, int] = {}
        self._lock = FileLock(self.folder / f"{name}.lock", timeout=0)
        with disk_errors(f"{folder} cannot be written to"):
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                self._lock.acquire()
            except Timeout:
                raise PosencError(
                    f"Another process is writing {self._path}. Wait for it, or give each process a --shard of its own."
                ) from None
        with contextlib.ExitStack() as locked, disk_errors(str(self._path)):
            locked.callback(self._lock.release)  # unless the store is opened
            if not (self.folder / "settings.json").exists():
                about = {} if command is None else {"command": command}
                write_atomically(self.folder / "settings.json", to_json({**about, **settings}))
            self.threads = self._first_threads()
            if self._path.exists():  # a kill may have left its last line incomplete
                os.truncate(self._path, self._path.read_bytes().rfind(b"\n") + 1)
            self._file = self._path.open("ab", buffering=0)
            self._unsynced, self._synced_at = False, 0.0
            self.refresh()
            locked.pop_all()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            with contextlib.suppress(*() if kind is None else (PosencError,)):
                self._sync()
        finally:
            self._file.close()
            self._lock.release()

    def append(self, key: Key, value: Mapping[str, Any]) -> None:
        """Store a value; on return it is in the file. If it cannot be written, all earlier records are intact."""
        line = record_line(key, value)
        written, end = 0, os.fstat(self._file.fileno()).st_size
        with self._writing():
            try:
                while line[written:]:  # without a buffer, which would write the rest again later
                    written += self._file.write(line[written:])
            except OSError:
                self._file.truncate(end)
                raise
        self._unsynced = True
        if time.monotonic() >= self._synced_at + SYNC:
            self._sync()
        # As a reader gets it: a resumed and an uninterrupted run get the same values.
        self._records[key] = json.loads(line)["value"]

    def refresh(self) -> None:
        """Read the lines that processes have written since the last time; an incomplete line is left for the next."""
        self._sync()  # the other processes may wait for these
        for path in sorted(self.folder.glob("shard-*.jsonl")):
            damaged, at = list[tuple[int, int]](), self._read_to.get(path, 0)
            with path.open("rb") as file:
                file.seek(at)
                text = file.read()
            for line in text.split(b"\n")[:-1]:
                if (entry := _parse(line)) is not None:
                    self._records.setdefault(*entry)
                elif line.strip(b" "):
                    damaged.append((at, len(line)))
                at += len(line) + 1
            self._read_to[path] = at
            if damaged:
                self._report_damage(path, damaged)

    def _report_damage(self, path: Path, damaged: Sequence[tuple[int, int]]) -> None:
        """Warn of damaged lines (offset, size), and blank them out unless another process has the file."""
        text = path.read_bytes()
        numbers = [str(text.count(b"\n", 0, at) + 1) for at, _ in damaged]
        more = f" and {len(numbers) - 5:,} more" if len(numbers) > 5 else ""
        warnings.warn(
            f"{path}: damaged, or written by an earlier version without checksums: line{'s' * (len(numbers) > 1)} "
            f"{', '.join(numbers[:5])}{more}. Nothing of it is used; what is missing is measured again.",
            stacklevel=2,
        )
        lock = self._lock if path == self._path else FileLock(path.with_suffix(".lock"), timeout=0)
        with contextlib.suppress(OSError, Timeout), lock, path.open("rb+") as file:
            for at, size in damaged:
                os.pwrite(file.fileno(), b" " * size, at)

    def _first_threads(self) -> int:
        """Return the number of threads of the process that began the records: sums depend on it."""
        import torch

        path = self.folder / "threads.json"
        with FileLock(path.with_suffix(".lock")):
            stored = _parse(path.read_bytes()[:-1]) if path.exists() else None
            if stored is not None:
                return int(stored[1]["count"])
            if path.exists():
                warnings.warn(f"{path} is damaged, and written anew.", stacklevel=3)
            count = torch.get_num_threads()
            write_atomically(path, record_line(("threads",), {"count": count}).decode())
            return count

    def _sync(self) -> None:
        """Wait until all lines of this process are on the disk."""
        if self._unsynced:
            with self._writing():
                os.fsync(self._file.fileno())
            self._unsynced, self._synced_at = False, time.monotonic()

    def _writing(self) -> contextlib.AbstractContextManager[None]:
        kept = "Everything measured before is kept: make room and run the same command again."
        return disk_errors(f"{self._path} cannot be written", kept)


_CHECKSUM = b', "crc32": %d}'


def record_line(key: Key, value: Mapping[str, Any]) -> bytes:
    """Return a record as a line of JSON whose last entry is the CRC-32 of everything before it."""
    entry = {"key": list(key), "value": finite(dict(value))}
    body = json.dumps(entry, allow_nan=False).encode()[:-1]
    return body + _CHECKSUM % zlib.crc32(body) + b"\n"


def _parse(line: bytes) -> tuple[Key, dict[str, Any]] | None:
    """Return a line's key and value; `None` if its checksum does not match."""
    body, _, _ = line.rpartition(_CHECKSUM[:11])
    if not body or line != body + _CHECKSUM % zlib.crc32(body):
        return None
    entry = json.loads(body + b"}")
    return tuple(entry["key"]), entry["value"]
