"""Records that come from a host: what is copied, what stays because it is newer here, and what a host may not send."""

import io
import subprocess
import tarfile
from contextlib import contextmanager
from pathlib import Path

import pytest

from oelm.base.locks import hold
from oelm.errors import LabError
from oelm.lab.launch.host import Host
from oelm.lab.status import list_runs
from oelm.lab.sync import sync
from oelm.runs.folder import ADDED
from tests.support.records import change, language_run, write_status

RUN = Path("lr-0.001/baseline/seed-0")


class FolderHost(Host):
    """A folder of this machine as a host, without ssh between them."""

    @contextmanager
    def stream(self, script, source=subprocess.DEVNULL, succeeded=(0,)):
        done = subprocess.run(["sh", "-c", script], cwd=self.folder, capture_output=True, check=False)
        assert done.returncode in succeeded, done.stderr
        yield io.BytesIO(done.stdout)


class ArchiveHost(Host):
    """A host that sends any archive."""

    archive = b""

    @contextmanager
    def stream(self, script, source=subprocess.DEVNULL, succeeded=(0,)):
        yield io.BytesIO(self.archive)


@pytest.fixture
def host(tmp_path, monkeypatch):
    """Return a host with one finished run, and go to a folder in which `runs` means this machine's own."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    language_run(tmp_path / "there" / "runs")
    return FolderHost("me@gpu", folder=str(tmp_path / "there"))


def there(host: Host) -> Path:
    return Path(host.folder) / "runs" / RUN


def finish_later(host: Host, updated: float) -> None:
    """Make the host's run one that is in progress."""
    (there(host) / "result.json").unlink(missing_ok=True)
    write_status(there(host), "running", updated=updated, host="gpu", step=100)


def test_records_are_copied_and_models_are_not(host):
    for name in ("checkpoints/step-00000001/config.json", "best/config.json", "plain/config.json", ".hidden.json"):
        (there(host) / name).parent.mkdir(parents=True, exist_ok=True)
        (there(host) / name).write_text("{}")
    (there(host) / "notes.txt").write_text("mine")
    log = "matrix-20260101-000000-7.log"
    (Path(host.folder) / "runs" / log).write_text("oelm matrix\n")
    assert sync(host, Path("runs")) == []
    copied = {path.name for path in (Path("runs") / RUN).rglob("*")}
    assert copied == {"config.json", "environment.json", "audit.json", "metrics.jsonl", "timing.json", "result.json"}
    assert Path("runs", log).is_file()
    (run,) = list_runs(Path("runs"))
    assert run.state == "finished"
    for name in copied:
        assert (Path("runs") / RUN / name).read_bytes() == (there(host) / name).read_bytes()


def test_a_later_copy_takes_what_changed_since(host):
    finish_later(host, 1000.0)
    sync(host, Path("runs"))
    assert not (Path("runs") / RUN / "result.json").exists()
    write_status(there(host), "running", updated=2000.0, host="gpu", step=200)
    sync(host, Path("runs"))
    assert list_runs(Path("runs"))[0].step == 200
    language_run(Path(host.folder) / "runs")
    assert sync(host, Path("runs")) == []
    assert list_runs(Path("runs"))[0].state == "finished"


def test_what_was_measured_on_the_host_after_a_run_ended_is_copied_too(host):
    sync(host, Path("runs"))
    for name in ADDED:
        (there(host) / name).write_text(f"{name} of the host")
    assert sync(host, Path("runs")) == []
    assert all((Path("runs") / RUN / name).read_text() == f"{name} of the host" for name in ADDED)


@pytest.mark.parametrize(
    ("why", "reason"),
    [
        ("later status", "the records here are newer"),
        ("result", "it has a result of its own here"),
        ("another run", "another run is here"),
        ("lock", "it is in progress here"),
        ("damage", "status.json: cannot be read as JSON"),
    ],
)
def test_a_run_that_is_newer_here_stays_as_it_is(host, why, reason):
    finish_later(host, 1000.0)
    sync(host, Path("runs"))
    run, lock = Path("runs") / RUN, None
    if why == "later status":
        write_status(run, "stopped", updated=1500.0, step=150)
    elif why == "result":
        language_run(Path("runs"))
    elif why == "another run":
        change(run, "config.json", id="another")
    elif why == "lock":
        lock = hold(run)
    else:
        (run / "status.json").write_text('{"state": "run')
    before = _contents(run)
    write_status(there(host), "running", updated=1200.0, host="gpu", step=300)
    (line,) = sync(host, Path("runs"))
    assert line.startswith(f"{RUN}: not copied, since ")
    assert reason in line
    assert _contents(run) == before
    if lock is not None:
        lock.close()
        assert sync(host, Path("runs")) == []
        assert list_runs(Path("runs"))[0].step == 300


def test_another_result_on_the_host_replaces_none_here(host):
    language_run(Path("runs"), loss=2.0)
    before = _contents(Path("runs") / RUN)
    (line,) = sync(host, Path("runs"))
    assert "a result of its own" in line
    assert _contents(Path("runs") / RUN) == before


@pytest.mark.parametrize(
    "name", ["../outside/config.json", "/tmp/config.json", "a/../../config.json", ".ssh/config.json", "a/evil.sh"]
)
def test_a_host_can_write_nothing_but_records_below_its_own_folder(tmp_path, name):
    ArchiveHost.archive = _archive(tarfile.TarInfo(name))
    with pytest.raises(LabError, match="no record of a run"):
        sync(ArchiveHost("me@gpu"), tmp_path / "runs")
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "lock"]


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_a_host_can_send_no_link_or_device(tmp_path, kind):
    member = tarfile.TarInfo("a/b/seed-0/config.json")
    member.type, member.linkname = kind, "/etc/passwd"
    ArchiveHost.archive = _archive(member)
    with pytest.raises(LabError, match="no record of a run"):
        sync(ArchiveHost("me@gpu"), tmp_path / "runs")


@pytest.mark.parametrize("archive", [b"", b"no number\n", b"17\n", b"17\nno archive", b"17\n\x1f\x8b\x08\x00cut"])
def test_anything_but_an_archive_is_refused_in_one_line(tmp_path, archive):
    ArchiveHost.archive = archive
    with pytest.raises(LabError, match="me@gpu: what it sent is no archive of records"):
        sync(ArchiveHost("me@gpu"), tmp_path / "runs")


def test_a_copy_that_was_cut_is_made_again(host):
    whole = FolderHost("me@gpu", folder=host.folder)
    with whole.stream("date +%s; cd runs; tar -czf - .") as stream:
        ArchiveHost.archive = stream.read()[:-200]
    with pytest.raises(LabError):
        sync(ArchiveHost("me@gpu", folder=host.folder), Path("runs"))
    assert sync(host, Path("runs")) == []
    assert list_runs(Path("runs"))[0].state == "finished"


def _archive(member: tarfile.TarInfo) -> bytes:
    """Return what a host prints that sends one member."""
    content = b"{}" if member.isreg() else b""
    member.size = len(content)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        archive.addfile(member, io.BytesIO(content))
    return b"17\n" + packed.getvalue()


def _contents(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in run.iterdir() if path.name != "lock"}
