"""Files and folders that are written completely or not at all."""

import errno
import os
from contextlib import suppress

import pytest
import safetensors

from oelm.base import files
from oelm.base.files import new_folder, put_in_place, recover_folder
from oelm.errors import FileError


def test_a_folder_is_replaced_completely_or_not_at_all(tmp_path):
    target = tmp_path / "best"
    with new_folder(target) as folder:
        (folder / "one").write_text("1")
    with suppress(KeyboardInterrupt), new_folder(target) as folder:
        (folder / "two").write_text("2")
        raise KeyboardInterrupt
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["best", "one"]
    with pytest.raises(FileError, match=r"best: cannot be written \(No space"), new_folder(target):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    (tmp_path / "new").mkdir()
    put_in_place(tmp_path / "new", target)
    assert [path.name for path in tmp_path.iterdir()] == ["best"]
    os.replace(target, tmp_path / ".best.old")
    recover_folder(target)
    assert [path.name for path in tmp_path.iterdir()] == ["best"]


@pytest.mark.parametrize("error", [Exception, safetensors.SafetensorError])
def test_errors_of_libraries_in_rust_are_system_errors(error, tmp_path):
    """As tokenizers and safetensors raise them on a full disk."""
    with pytest.raises(FileError, match=r"best: cannot .*\(No space .*free some space"), new_folder(tmp_path / "best"):
        raise error("Error while saving: No space left on device (os error 28)")
    with pytest.raises(Exception, match="a bug"), new_folder(tmp_path / "best"):
        raise Exception("a bug")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("earlier", [False, True])
def test_a_folder_whose_name_the_disk_does_not_confirm_is_as_before(earlier, tmp_path, monkeypatch):
    """The caller says that it failed, so the same command must find nothing in its way."""
    target = tmp_path / "out"
    if earlier:
        with new_folder(target) as folder:
            (folder / "one").write_text("1")
    sync = files.sync

    def refusing(path):
        if path == tmp_path:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(path)

    monkeypatch.setattr(files, "sync", refusing)
    with pytest.raises(FileError, match="No space"), new_folder(target) as folder:
        (folder / "two").write_text("2")
    assert sorted(path.name for path in tmp_path.rglob("*")) == (["one", "out"] if earlier else [])
