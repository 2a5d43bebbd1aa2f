"""What the queue understands of the answers of squeue, sacct and scontrol, which are scripts here."""

from pathlib import Path

import pytest

from oelm.lab.launch.slurm_queue import FORGOTTEN, SlurmQueue, gets_preempted, has_ended

# What Slurm 22.05 prints.
LOST = "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1"
NO_ACCOUNTING = "echo 'Slurm accounting storage is disabled' >&2; exit 1"


class Commands:
    """A folder of scripts that stand in for Slurm's commands; it counts how often each was called."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def say(self, command: str, script: str) -> None:
        file = self.folder / command
        file.write_text(f"#!/bin/sh\necho call >> {file}.calls\n{script}\n")
        file.chmod(0o755)

    def calls(self, command: str) -> int:
        file = self.folder / f"{command}.calls"
        return len(file.read_text().splitlines()) if file.exists() else 0


@pytest.fixture
def commands(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    commands = Commands(tmp_path)
    commands.say("sacct", NO_ACCOUNTING)
    return commands


def test_one_answer_is_used_for_all_jobs_for_a_while(commands):
    commands.say("squeue", "printf '17|RUNNING\\n18|PENDING\\n19_[2-3]|PENDING\\n'")
    queue = SlurmQueue(pause=1000)
    assert [queue.state(job) for job in ("17", "18", "17")] == ["RUNNING", "PENDING", "RUNNING"]
    assert commands.calls("squeue") == 1


def test_a_job_that_is_newer_than_the_answer_is_asked_for(commands):
    commands.say("squeue", "echo '17|RUNNING'")
    queue = SlurmQueue(pause=1000)
    assert queue.state("17") == "RUNNING"
    commands.say("squeue", "printf '17|RUNNING\\n18|PENDING\\n'")
    assert queue.state("18") == "PENDING"


def test_without_an_answer_a_job_has_no_state(commands):
    commands.say("squeue", "echo '17|RUNNING'")
    queue = SlurmQueue(pause=0)
    assert queue.state("17") == "RUNNING"
    commands.say("squeue", LOST)
    assert queue.state("17") is None
    assert not has_ended(None)
    commands.say("squeue", "echo '17|COMPLETED'")
    assert queue.state("17") == "COMPLETED"


def test_a_lost_controller_is_not_asked_at_every_question(commands):
    commands.say("squeue", LOST)
    queue = SlurmQueue(pause=1000)
    assert [queue.state("17"), queue.state("17"), queue.state("18")] == [None, None, None]
    assert commands.calls("squeue") == 1


def test_a_job_that_squeue_does_not_list_is_forgotten_or_in_the_accounts(commands):
    commands.say("squeue", "true")
    queue = SlurmQueue(pause=1000)
    assert queue.state("17") == FORGOTTEN
    assert has_ended(FORGOTTEN)
    commands.say("sacct", "echo 'CANCELLED by 1000'")
    assert [queue.state("18"), queue.state("18")] == ["CANCELLED", "CANCELLED"]
    assert commands.calls("sacct") == 2


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        ("JobId=17 JobState=RUNNING PreemptTime=2026-11-19T15:15:14", True),
        ("JobId=17 JobState=RUNNING PreemptTime=None", False),
        ("JobId=17 JobState=RUNNING", False),
        ("JobId=17 JobState=COMPLETING PreemptTime=2026-11-19T15:15:14", False),
    ],
)
def test_only_a_running_job_that_slurm_has_given_time_gets_preempted(shown, expected, commands):
    commands.say("scontrol", f"echo '{shown}'")
    assert gets_preempted("17") is expected


def test_without_an_answer_no_job_gets_preempted(commands):
    commands.say("scontrol", LOST)
    assert not gets_preempted("17")
