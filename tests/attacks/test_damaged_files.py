"""Damage of the files that a run resumes from: it ends in an error that names the file, a note, or the same figures."""

import random
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch

from oelm import analysis
from oelm.data.corpus.tokens import TokenDataset
from oelm.errors import OelmError
from oelm.evaluation.load import load_run
from oelm.runs.folder import SEALED, read_metrics
from oelm.training import engine
from oelm.training.step import Stepper
from tests.support.training import config, final_tensors, metrics_without_times, result_without_times, token_folder

CHANGES = {"method": "oelm-freeze", "checkpoint": {"every": 5}, "eval": {"every": 2}}


class Stopped(Exception):
    """Ends a run at a step, as a kill would."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return a finished run, one that ended after its checkpoint of step 5, and a copy of that one's folder."""
    whole = config(tmp_path_factory.mktemp("whole"), **CHANGES)
    engine.train(whole, quiet=True)
    cut = config(tmp_path_factory.mktemp("cut"), **CHANGES)
    with pytest.MonkeyPatch.context() as patch:
        step = Stepper.step

        def stopping(stepper, state):
            if state.step == 7:
                raise Stopped
            step(stepper, state)

        patch.setattr(Stepper, "step", stopping)
        with pytest.raises(Stopped):
            engine.train(cut, quiet=True)
    return whole, cut, Path(shutil.copytree(cut.folder, tmp_path_factory.mktemp("saved") / "run"))


def damage(path: Path, kind: str, randomness: random.Random) -> None:
    """Flip a bit, cut the file's end, lose a line or a piece in the middle, or exchange two pieces."""
    content = bytearray(path.read_bytes())
    place = randomness.randrange(len(content))
    if kind == "flip":
        content[place] ^= 1 << randomness.randrange(8)
    elif kind == "cut":
        del content[place:]
    elif kind == "lose":
        del content[place : place + randomness.randint(1, 40)]
    else:
        length = randomness.randint(1, max(1, len(content) // 4))
        other = randomness.randrange(len(content))
        content[place : place + length], content[other : other + length] = (
            content[other : other + length],
            content[place : place + length],
        )
    path.write_bytes(content)


@pytest.mark.parametrize("kind", ["flip", "cut", "lose", "exchange"])
def test_no_damage_of_a_runs_own_files_changes_a_figure_in_silence(kind, runs, rounds):
    whole, cut, saved = runs
    randomness, outcomes = random.Random(f"files {kind}"), Counter()
    checkpoint = Path("checkpoints/step-00000005")
    files = [Path("metrics.jsonl"), *(checkpoint / name for name in ("state.json", "manifest.json"))]
    files += [checkpoint / "tensors.safetensors"] * 2
    for _ in range(rounds(3)):
        file = randomness.choice(files)
        shutil.rmtree(cut.folder)
        shutil.copytree(saved, cut.folder)
        before = (cut.folder / file).read_bytes()
        damage(cut.folder / file, kind, randomness)
        if (cut.folder / file).read_bytes() == before:
            outcomes["no damage"] += 1
            continue
        problem = ""
        try:
            result = engine.train(cut, quiet=True)
        except OelmError as error:
            problem = str(error)
        if problem:
            assert file.name in problem or file.name == "manifest.json", f"{file}: {problem}"
            assert "Delete the folder" in problem
            outcomes["refused"] += 1
            continue
        if any("metrics.jsonl" in note for note in result["notes"]):
            outcomes["noted"] += 1
        else:
            assert result_without_times(cut.folder) == result_without_times(whole.folder), file
            assert metrics_without_times(cut.folder) == metrics_without_times(whole.folder), file
            outcomes["without effect"] += 1
        assert final_tensors(cut.folder) == final_tensors(whole.folder), f"{file}: other weights"
        assert read_metrics(cut.folder)
    print(f"{kind}: {dict(outcomes)}")


@pytest.mark.parametrize("kind", ["flip", "cut", "lose", "exchange"])
def test_no_changed_record_of_a_finished_run_is_reported(kind, runs, rounds, tmp_path):
    whole, *_ = runs
    randomness, outcomes = random.Random(f"finished {kind}"), Counter()
    analysis.load_run(whole.folder)
    for number in range(rounds(12)):
        name = (*SEALED, "manifest.json")[number % (len(SEALED) + 1)]
        file = whole.folder / name
        before = file.read_bytes()
        damage(file, kind, randomness)
        problem = None
        try:
            analysis.load_run(whole.folder)
        except OelmError as error:
            problem = str(error)
        changed = file.read_bytes() != before
        file.write_bytes(before)
        if not changed:
            outcomes["no damage"] += 1
        elif problem is None:  # only a manifest can hold the same in other bytes
            assert name == "manifest.json"
            outcomes["without effect"] += 1
        else:
            assert str(whole.folder) in problem
            outcomes["left out"] += 1
    print(f"finished runs, {kind}: {dict(outcomes)}")


@pytest.mark.parametrize("kind", ["flip", "cut", "lose", "exchange"])
def test_no_damage_of_a_saved_model_or_of_tokens_is_used_in_silence(kind, runs, rounds, tmp_path):
    """What `oelm generate`, `export` and a new run read: the best model with all its files, and the token folder."""
    whole, *_ = runs
    randomness, outcomes = random.Random(f"models {kind}"), Counter()
    best, tokens = whole.folder / "best", Path(shutil.copytree(token_folder(), tmp_path / "tokens"))
    sound = {name: tensor.clone() for name, tensor in load_run(whole.folder).state_dict().items()}
    files = [path for folder in (best, tokens) for path in sorted(folder.rglob("*")) if path.is_file()]
    for _ in range(rounds(6)):
        file = randomness.choice(files)
        before = file.read_bytes()
        damage(file, kind, randomness)
        try:
            if file.read_bytes() == before:
                outcomes["no damage"] += 1
                continue
            problem = ""
            try:
                if file.is_relative_to(best):
                    loaded = load_run(whole.folder).state_dict()
                else:
                    opened = TokenDataset.open(tokens)
                    opened.verify()
                    opened.load_tokenizer()
            except OelmError as error:
                problem = str(error)
            if problem:
                outcomes["refused"] += 1
            elif file.is_relative_to(best):
                assert file.name == "manifest.json", f"{file}: used in silence"
                assert all(torch.equal(loaded[name], tensor) for name, tensor in sound.items())
                outcomes["without effect"] += 1
            else:  # descriptions and settings of the tokenizer beside its vocabulary, which has a hash
                assert file.suffix == ".json", f"{file}: used in silence"
                outcomes["without effect"] += 1
        finally:
            file.write_bytes(before)
    print(f"models and tokens, {kind}: {dict(outcomes)}")
