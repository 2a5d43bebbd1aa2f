"""Where a result comes from: the commit of the code, and the command of a benchmark."""

import subprocess

from oelm.runs import environment


def test_the_recorded_commit_is_not_that_of_a_project_around_the_installation(tmp_path, monkeypatch):
    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    code = tmp_path / ".venv/oelm/environment.py"
    code.parent.mkdir(parents=True)
    code.touch()
    monkeypatch.setattr(environment, "__file__", str(code))
    assert environment.git_commit() is None
    git("init")
    git("commit", "--allow-empty", "-m", "a project")
    assert environment.git_commit() is None
    git("add", "-f", str(code))
    git("commit", "-m", "a checkout")
    assert len(environment.git_commit()) == 40


def test_the_origin_of_a_benchmark_can_be_run_again():
    origin = environment.bench_origin(["bench", "baseline", "model.fields={num_hidden_layers: 2}"])
    assert origin.command == "oelm bench baseline 'model.fields={num_hidden_layers: 2}'"
    assert origin.device
    assert origin.versions.torch
