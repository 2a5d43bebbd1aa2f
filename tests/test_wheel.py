"""The wheel, built from the checkout and installed into an empty environment, works away from the checkout."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import oelm

ROOT = Path(__file__).parents[1]
# Every kind of file that is not code is read once: presets, experiments, published figures, a report's words.
COMMANDS = ("methods", "experiments", "run ABC-tinystories --scale smoke", "report runs --out report")


@pytest.mark.net
def test_the_wheel_works_in_an_empty_environment(tmp_path):
    """The build fetches hatchling; torch and the other dependencies are those of this environment."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

    def call(*command, **variables):
        options = {"cwd": tmp_path, "env": {**environment, **variables}, "capture_output": True, "text": True}
        done = subprocess.run([str(part) for part in command], **options)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    call(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, ROOT)
    (wheel,) = tmp_path.glob(f"oelm-{oelm.__version__}-*.whl")
    call(sys.executable, "-m", "venv", tmp_path / "empty")
    scripts = tmp_path / "empty" / "bin"
    call(scripts / "pip", "install", "--quiet", "--no-deps", wheel)
    dependencies = {"PYTHONPATH": sysconfig.get_path("purelib")}
    where = call(scripts / "python", "-c", "import oelm; print(oelm.__file__)", **dependencies)
    assert where.startswith(str(tmp_path / "empty"))
    for command in COMMANDS:
        call(scripts / "oelm", *command.split(), **dependencies)
    assert (tmp_path / "report" / "report.html").is_file()
