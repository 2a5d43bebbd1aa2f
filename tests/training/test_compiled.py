"""Compiled runs on a CPU: they train as plain ones do, and a second run compiles nothing again."""

import shutil
from pathlib import Path

import pytest
import torch

from oelm.config import RunConfig
from tests.support.training import oelm, tiny, weights, write_yaml


def compiled_code(folder: Path) -> set[Path]:
    """Return the files of torch's cache for whole graphs and for what was made of them."""
    return {path for part in ("aotautograd", "fxgraph") for path in (folder / part).rglob("*") if path.is_file()}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("g++") is None, reason="code for a CPU is compiled with g++")
@pytest.mark.parametrize("method", ["baseline", "oelm-freeze"])
def test_a_compiled_run_trains_as_a_plain_one_and_leaves_its_code_to_the_next(method, tmp_path, monkeypatch):
    """Runs of a matrix are processes like these: they share the cache that torch keeps for the user."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "code"))

    def run(name: str, seed: int, compiled: bool) -> Path:
        fields = tiny(
            tmp_path / name,
            method=method,
            seed=seed,
            model={"fields": {"dropout": 0.0}},  # compiled code draws other random numbers
            train={"compile": compiled, "max_steps": 4},
        )
        process = oelm("train", write_yaml(tmp_path / f"{name}.yaml", fields), "--quiet")
        assert process.wait() == 0, process.communicate()
        return RunConfig.load(fields).folder

    plain, compiled = run("plain", 0, False), run("compiled", 0, True)
    code = compiled_code(tmp_path / "code")
    assert code
    own = weights(compiled)
    for name, expected in weights(plain).items():
        torch.testing.assert_close(own[name], expected, atol=1e-5, rtol=1e-4)
    run("next", 1, True)
    assert compiled_code(tmp_path / "code") == code
