"""A folder's manifest: every change of a file, of its name or of the manifest itself is noticed."""

import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oelm.base.manifest import MANIFEST, FileMark, check_files, files_in, read_manifest, write_manifest
from oelm.errors import FileError

CONTENT = {"state.json": b'{"step": 200}', "shards/one.safetensors": bytes(range(64)), "empty": b""}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("folder")
    (folder / "shards").mkdir()
    for name, content in CONTENT.items():
        (folder / name).write_bytes(content)
    write_manifest(folder, {name: FileMark.of(folder / name) for name in files_in(folder)})
    return folder


def test_an_unchanged_folder_passes(folder):
    assert files_in(folder) == sorted(CONTENT)
    check_files(folder, files_in(folder))


@given(data=st.data())
def test_every_flipped_bit_is_noticed(folder, data):
    name = data.draw(st.sampled_from([*(name for name, content in CONTENT.items() if content), MANIFEST]))
    before = (folder / name).read_bytes()
    byte, bit = data.draw(st.integers(0, len(before) - 1)), data.draw(st.integers(0, 7))
    flipped = bytearray(before)
    flipped[byte] ^= 1 << bit
    same_meaning = False
    if name == MANIFEST:  # white space may change without changing what it says
        with suppress(ValueError):
            same_meaning = json.loads(flipped) == json.loads(before)
    (folder / name).write_bytes(flipped)
    try:
        if same_meaning:
            check_files(folder, [*CONTENT])
        else:
            with pytest.raises(FileError):
                check_files(folder, {*files_in(folder), *read_manifest(folder)})
    finally:
        (folder / name).write_bytes(before)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda folder: (folder / "state.json").write_bytes(b"{"), "has 1 of 13 bytes"),
        (lambda folder: (folder / "state.json").write_bytes(b'{"step": 201}'), "has changed"),
        (lambda folder: (folder / "state.json").unlink(), "missing"),
        (lambda folder: (folder / "other").write_bytes(b""), "was not there"),
        (lambda folder: (folder / MANIFEST).unlink(), "cannot be read"),
        (lambda folder: (folder / MANIFEST).write_text("[]"), "holds a list"),
        (lambda folder: (folder / MANIFEST).write_text('{"format": 1}'), "not a manifest of format 1"),
        (lambda folder: (folder / MANIFEST).write_text('{"format": 1, "files": {"empty": 3}}'), "entry of empty"),
    ],
)
def test_what_is_wrong_is_named(damage, problem, tmp_path):
    (tmp_path / "state.json").write_bytes(CONTENT["state.json"])
    write_manifest(tmp_path, {"state.json": FileMark.of(tmp_path / "state.json")})
    damage(tmp_path)
    with pytest.raises(FileError, match=problem):
        check_files(tmp_path, {*files_in(tmp_path), *read_manifest(tmp_path)})
