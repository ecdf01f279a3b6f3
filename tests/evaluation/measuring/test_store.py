"""Records that survive what may happen to a process."""

from __future__ import annotations

import json
import os
import re
import resource
import time
import warnings
import zlib
from pathlib import Path

import pytest

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.measuring.store import Key, Shard, Store, current_shard, fingerprint_of
from tests.support.selection import late

SETTINGS = {"lengths": [1, 2], "dtype": "float32"}
KEYS: list[Key] = [("yarn", 4, f"d{n}") for n in range(4)]


def missing(store: Store, keys: list[Key]) -> list[Key]:
    return [key for key in keys if store.get(key) is None]


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("records/*/shard-*.jsonl"))


def test_every_line_is_in_the_file_when_append_returns_and_soon_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with Store(tmp_path, SETTINGS) as store:
        monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(descriptor))
        (path,) = files(tmp_path)
        for number, (later, expected) in enumerate([(0, 1), (0.5, 1), (0.4, 1), (0.2, 2)]):
            now += later
            store.append(KEYS[number], {"n": number})
            entry = {"key": list(KEYS[number]), "value": {"n": number}}
            checksum = zlib.crc32(json.dumps(entry).encode()[:-1])
            assert json.loads(path.read_text().splitlines()[-1]) == {**entry, "crc32": checksum}
            assert len(synced) == expected
        store.refresh()
        assert len(synced) == 2
        store.append(("another",), {})
        store.refresh()
        assert len(synced) == 3
        store.append(("one more",), {})
    assert len(synced) == 4


def test_a_torn_last_line_is_healed_and_measured_again(tmp_path: Path) -> None:
    with Store(tmp_path, SETTINGS) as store:
        store.append(KEYS[0], {"n": 0})
        store.append(KEYS[1], {"n": 1})
    (path,) = files(tmp_path)
    whole = path.read_bytes()
    for cut in range(whole.index(b"\n") + 1, len(whole)):
        path.write_bytes(whole[:cut])
        with Store(tmp_path, SETTINGS) as store:
            assert missing(store, KEYS[:2]) == KEYS[1:2]
            store.append(KEYS[1], {"n": 1})
        assert path.read_bytes() == whole


def opened(folder: Path) -> tuple[list[Key], list[str]]:
    """The keys that are missing of the first three, and the warnings; those that are there are as they were."""
    with warnings.catch_warnings(record=True) as caught, Store(folder, SETTINGS) as store:
        lacking = missing(store, KEYS[:3])
        for number, key in enumerate(KEYS[:3]):
            assert store.get(key) == (None if key in lacking else {"nats": 10.5 + number})
            if key in lacking:
                store.append(key, {"nats": 10.5 + number})
    return lacking, [str(warning.message) for warning in caught]


@pytest.mark.parametrize("step", [3, *late([1])])
def test_a_byte_that_flips_anywhere_is_reported_once_and_its_record_made_anew(
    step: int, tmp_path: Path
) -> None:
    assert opened(tmp_path) == (KEYS[:3], [])
    (path,) = files(tmp_path)
    whole = path.read_bytes()
    feeds = [at for at in range(len(whole) - 1) if whole[at] == ord("\n")]
    flips = [(at, whole[at] ^ 1) for at in (*range(0, len(whole) - 1, step), *feeds)]
    flips += [(at, new) for at in range(0, len(whole) - 1, 5 * step) for new in b"\n\r \0\xff"]
    for at, new in flips:
        if whole[at] == new:
            continue
        path.write_bytes(whole[:at] + bytes([new]) + whole[at + 1 :])
        lacking, (warning,) = opened(tmp_path)
        line = whole.count(b"\n", 0, at) + 1
        # a damaged line feed costs the lines on both sides of it
        assert lacking == KEYS[line - 1 : line + (whole[at] == ord("\n"))]
        assert warning.startswith(f"{path}: damaged, or written by an earlier version")
        assert re.search(rf": lines? ({line}|{line + 1})[.,]", warning)
        assert "Nothing of it is used; what is missing is measured again." in warning
        assert opened(tmp_path) == ([], [])
    path.write_bytes(whole[:-1] + b"x")
    assert opened(tmp_path) == (KEYS[2:3], [])  # as a kill leaves it


def test_damaged_records_and_those_without_checksums_are_not_used(tmp_path: Path) -> None:
    opened(tmp_path)
    (path,) = files(tmp_path)
    other = b"\0\0\0\0\n[1]\n" + b'{"key": ["a"], "value": [3]}\n, "crc32": 0}\n' * 3
    path.rename(path.with_name("shard-2-of-2.jsonl"))  # of another process, which ended
    path.write_bytes(other)
    lacking, (warning,) = opened(tmp_path)
    assert not lacking
    assert "lines 1, 2, 3, 4, 5 and 3 more." in warning
    assert opened(tmp_path) == ([], [])


def test_other_settings_neither_read_nor_lose_what_was_measured(tmp_path: Path) -> None:
    with Store(tmp_path, SETTINGS) as store:
        store.append(KEYS[0], {"n": 0, "nan": float("nan")})
    with Store(tmp_path, {**SETTINGS, "dtype": "bfloat16"}) as store:
        assert store.get(KEYS[0]) is None
        store.append(KEYS[0], {"n": 1})
    with Store(tmp_path, dict(reversed(SETTINGS.items()))) as store:
        assert store.get(KEYS[0]) == {"n": 0, "nan": None}
    assert fingerprint_of(SETTINGS) != fingerprint_of({**SETTINGS, "lengths": [1, 3]})


def test_two_writers_of_one_shard_are_refused(tmp_path: Path) -> None:
    with (
        Store(tmp_path, SETTINGS),
        pytest.raises(PosencError, match=r"Another process is writing .*shard-1-of-1"),
    ):
        Store(tmp_path, SETTINGS)
    with Store(tmp_path, SETTINGS, Shard(0, 2)), Store(tmp_path, SETTINGS, Shard(1, 2)):
        pass


def test_a_full_disk_is_one_clear_error_and_loses_nothing(tmp_path: Path) -> None:
    now, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Store(tmp_path, {"a": 1}) as store:
        store.append(("one",), {"text": "x" * 1000})
        # A disk that is full in the next line; Python ignores the signal.
        resource.setrlimit(resource.RLIMIT_FSIZE, (1500, most))
        try:
            with pytest.raises(PosencError) as caught:
                store.append(("two",), {"text": "x" * 1000})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (now, most))
        assert store.get(("two",)) is None
        store.append(("three",), {"n": 3})  # there is room for a short one
    assert "cannot be written: File too large" in str(caught.value)
    assert "Everything measured before is kept" in str(caught.value)
    with Store(tmp_path, {"a": 1}) as store:
        assert store.get(("one",)) == {"text": "x" * 1000}
        assert store.get(("two",)) is None
        assert store.get(("three",)) == {"n": 3}


def _environment(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    """Set the variables of a launcher, and no others."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in values.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("given", "environment", "expected"),
    [
        (None, {}, Shard()),
        ("2/8", {"RANK": "0", "WORLD_SIZE": "4"}, Shard(1, 8)),
        (None, {"RANK": "3", "WORLD_SIZE": "4"}, Shard(3, 4, launched=True)),
        (None, {"SLURM_ARRAY_TASK_ID": "3"}, Shard()),  # tasks may measure different things
    ],
)
def test_a_process_knows_its_place(
    given: str | None, environment: dict[str, str], expected: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    _environment(monkeypatch, **environment)
    assert current_shard(given) == expected


@pytest.mark.parametrize(
    ("given", "environment", "reason"),
    [
        *((text, {}, "--shard") for text in ("0/2", "3/2", "1", "a/b", "1/0", "-1/2")),
        (None, {"WORLD_SIZE": "2"}, "unset both, or pass --shard"),
        *(
            (None, {"WORLD_SIZE": world, "RANK": rank}, "unset both, or pass --shard")
            for world, rank in (("2", "5"), ("2", "a"), ("many", "0"))
        ),
    ],
)
def test_a_place_that_does_not_exist(
    given: str | None, environment: dict[str, str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _environment(monkeypatch, **environment)
    with pytest.raises(PosencError, match=reason):
        current_shard(given)
