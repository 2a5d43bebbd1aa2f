"""Evaluating a run, and models in folders, on local tasks with lm-eval itself, where it is installed."""

import json
import math
import os
import shutil

import pytest
import torch
import yaml
from typer.testing import CliRunner

import oelm
from oelm.cli.app import app
from oelm.errors import CheckpointError, ConfigError, DataError, FileError
from oelm.evaluation import downstream
from oelm.evaluation.downstream import evaluate_downstream, record_score
from oelm.evaluation.load import load_language_model, load_run
from oelm.evaluation.task_files import read_tasks
from oelm.runs.folder import check_records
from oelm.runs.schema import Downstream, read
from tests.support.records import task_score
from tests.support.training import config, run_here

PLACES = ["garden", "kitchen", "forest", "river", "school", "shop"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    changes = {"method": "oelm-freeze", "data": {"sequence_length": 64}}
    run_here(folder, **changes)
    return config(folder, **changes).folder


@pytest.fixture
def tasks(tmp_path):
    """Return a folder with a multiple-choice task and one of texts, whose data have different lengths."""
    choices = [
        {
            "question": f"Once there was a dog in the {place}. It was",
            "choices": ["big", "very small", "x"],
            "gold": n % 3,
        }
        for n, place in enumerate(PLACES * 3)
    ]
    texts = [{"text": f"Lily went to the {place}. " * (1 + n)} for n, place in enumerate(PLACES)]
    for name, rows in (("choices", choices), ("texts", texts)):
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    fields = {"dataset_path": "json", "test_split": "train", "metadata": {"version": 3}}
    answers = {"doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}", "doc_to_target": "gold"}
    write(tmp_path, "choices", {**fields, **answers, "output_type": "multiple_choice"})
    whole = {"doc_to_text": "", "doc_to_target": "{{text}}", "output_type": "loglikelihood_rolling"}
    write(tmp_path, "texts", {**fields, **whole})
    return tmp_path


def write(folder, name, fields):
    fields = {"task": name, "dataset_kwargs": {"data_files": f"{name}.jsonl"}, **fields}
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(fields))


def command(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def by_lm_eval(model, tasks, names, **options):
    """Return what lm-eval's own evaluation says of a model: an `hf` model by its folder, or a loaded one."""
    from lm_eval.tasks import TaskManager

    lm_eval = pytest.importorskip("lm_eval")
    loaded = []
    for name in names:
        fields = yaml.safe_load((tasks / f"{name}.yaml").read_text())
        fields["dataset_kwargs"]["data_files"] = str(tasks / f"{name}.jsonl")
        loaded.append(fields)
    manager = TaskManager(include_defaults=False)
    return lm_eval.simple_evaluate("hf", model, tasks=loaded, task_manager=manager, device="cpu", **options)


def test_a_runs_scores_are_those_of_lm_eval_and_are_recorded(run, tasks, tmp_path):
    pytest.importorskip("lm_eval")
    result = command("eval", run, "--tasks", tasks, "--batch-size", 5)
    assert result.exit_code == 0, result.output
    assert result.stderr == "", "lm-eval's chatter is silenced"
    choices, texts = read(run / "downstream.json", Downstream).tasks
    assert (choices.task, choices.version, choices.shots, choices.items) == ("choices", "3", 0, 18)
    assert (choices.model, choices.step) == ("best", 12)
    check_records(run)
    oelm.export(load_run(run), tmp_path / "plain")
    (tmp_path / "plain" / "tokenizer.json").write_bytes((run / "best" / "tokenizer.json").read_bytes())
    config_file = (run / "best" / "tokenizer_config.json").read_bytes()
    (tmp_path / "plain" / "tokenizer_config.json").write_bytes(config_file)
    own = by_lm_eval(f"pretrained={tmp_path / 'plain'},dtype=float32", tasks, ["choices", "texts"])
    for score in (choices, texts):
        values = own["results"][score.task]
        for metric in score.metrics:
            assert metric.value == pytest.approx(values[f"{metric.name},none"], rel=1e-4)
            items = [sample[metric.name] for sample in own["samples"][score.task]]
            if score is texts:
                assert list(zip(metric.items, metric.weights, strict=True)) == [
                    pytest.approx(item, rel=1e-4) for item in items
                ]
            else:
                assert metric.items == items
                assert metric.standard_error == pytest.approx(values[f"{metric.name}_stderr,none"])
    assert [metric.share for metric in choices.metrics] == [True, True]
    assert all(metric.standard_error > 0 and not metric.higher_is_better for metric in texts.metrics)
    printed = json.loads(result.stdout)["tasks"]
    assert [task["task"] for task in printed] == ["choices", "texts"]
    assert "items" not in printed[0]["metrics"][0]
    assert printed[0]["metrics"][0]["value"] == choices.metrics[0].value


@pytest.mark.full
def test_shots_limit_and_batches(run, tasks):
    pytest.importorskip("lm_eval")
    plain, other_batch = (evaluate_downstream(run, [str(tasks)], batch_size=size)[0] for size in (1, 7))
    assert other_batch.metrics == plain.metrics
    (few,) = evaluate_downstream(run, [str(tasks / "choices.yaml")], shots=2, limit=4)
    assert (few.shots, few.limit, few.items, few.available) == (2, 4, 4, 18)
    assert few.sha256 != plain.sha256
    assert len(few.metrics[0].items) == 4
    (again,) = evaluate_downstream(run, [str(tasks / "choices.yaml")], shots=2, limit=4)
    assert (again.sha256, again.metrics) == (few.sha256, few.metrics), "the same examples are shown"
    recorded = read(run / "downstream.json", Downstream)
    assert [task.key for task in recorded.tasks] == ["choices", "choices@2", "texts"]
    check_records(run)


@pytest.mark.full
def test_applied_and_exported_folders_score_as_the_run(run, tasks, tmp_path):
    pytest.importorskip("lm_eval")
    of_run = evaluate_downstream(run, [str(tasks)])
    assert command("export", run, tmp_path / "plain").exit_code == 0
    for folder in (run / "best", tmp_path / "plain"):
        scores = evaluate_downstream(folder, [str(tasks)])
        for one, other in zip(of_run, scores, strict=True):
            assert one.sha256 == other.sha256
            assert [m.items for m in one.metrics] == [pytest.approx(m.items, rel=1e-4) for m in other.metrics]
        assert scores[0].step is None
        assert not (folder / "downstream.json").exists(), "only a run's scores are recorded"
    (last,) = evaluate_downstream(run, [str(tasks / "choices.yaml")], last=True)
    assert last.model == "checkpoints/step-00000012"


@pytest.mark.full
def test_generated_answers_and_texts_that_lose_their_start(run, tasks):
    pytest.importorskip("lm_eval")
    fields = yaml.safe_load((tasks / "choices.yaml").read_text())
    del fields["doc_to_choice"]
    fields |= {"output_type": "generate_until", "doc_to_target": "{{choices[gold]}}"}
    fields |= {"generation_kwargs": {"until": ["."], "max_gen_toks": 8}}
    fields |= {"metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}]}
    write(tasks, "choices", fields)
    (score,) = evaluate_downstream(run, [str(tasks / "choices.yaml")], batch_size=4)
    assert [(metric.name, len(metric.items)) for metric in score.metrics] == [("exact_match", 18)]
    assert score.cut == 0
    fields["doc_to_text"] = "Once upon a time " * 20 + "{{question}}"
    write(tasks, "choices", fields)
    assert evaluate_downstream(run, [str(tasks / "choices.yaml")])[0].cut == 18
    result = command("eval", run, "--tasks", tasks / "choices.yaml")
    assert "warning: choices: 18 texts lost their start" in result.stderr


@pytest.mark.full
def test_templates_reach_no_code_and_other_faults_are_one_line(run, tasks):
    pytest.importorskip("lm_eval")
    fields = yaml.safe_load((tasks / "choices.yaml").read_text())
    escape = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    faults = {
        "SecurityError": {"doc_to_text": escape},
        "UndefinedError": {"doc_to_text": "{{nothing}}"},
        "KeyError": {"test_split": "gone"},
        "code that lm-eval would fetch": {"metric_list": [{"metric": "foo"}]},
    }
    for problem, changes in faults.items():
        write(tasks, "choices", {**fields, **changes})
        with pytest.raises((ConfigError, DataError), match=f"task choices: .*{problem}"):
            evaluate_downstream(run, [str(tasks / "choices.yaml")])
    write(tasks, "choices", fields)


@pytest.mark.full
@pytest.mark.parametrize("name", ["choices", "texts"])
def test_a_model_that_diverged_has_no_score(run, tasks, name, monkeypatch):
    pytest.importorskip("lm_eval")
    model, tokenizer = load_language_model(run)
    torch.nn.init.constant_(model.transformer.ln_f.weight, math.nan)
    monkeypatch.setattr(downstream, "load_language_model", lambda source, last: (model, tokenizer))
    with pytest.raises(CheckpointError, match=f"task {name}: the model's outputs are not numbers"):
        evaluate_downstream(run, [str(tasks / f"{name}.yaml")])


@pytest.mark.full
def test_unknown_names_and_data_that_cannot_be_had_are_one_line(run, tasks, monkeypatch):
    pytest.importorskip("oelm.evaluation.harness", exc_type=ImportError)
    monkeypatch.setattr("oelm.base.hub.hub_answers", lambda endpoint: False)
    result = command("eval", run, "--tasks", "arc_eazy")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "Did you mean 'arc_easy'" in result.stderr
    result = command("eval", run, "--tasks", "arc_easy")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "task arc_easy: its data cannot be had" in result.stderr
    for name, metric in (("humaneval", "code_eval"), ("polemo2_in", "f1")):
        with pytest.raises(ConfigError, match=f"task {name}: its metric '{metric}' is code that lm-eval would fetch"):
            evaluate_downstream(run, [name])
    with pytest.raises(ConfigError, match="choices is named twice"):
        evaluate_downstream(run, [str(tasks), str(tasks / "choices.yaml")])


@pytest.mark.full
def test_a_groups_score_is_that_of_all_its_questions(tasks):
    group_api = pytest.importorskip("lm_eval.api.group")
    from oelm.evaluation.harness import group_scores, load_local

    metric = group_api.AggMetricConfig(metric="acc")
    group = group_api.Group("both", aggregate_metric_list=[metric], metadata={"version": 2})
    none = group_api.Group("none")
    for task in load_local(read_tasks(tasks)):
        group.add(task)
        none.add(task)
    scores = [task_score("choices", right=9), task_score("texts", right=4), task_score("another")]
    (total,) = group_scores([group, none], scores)
    assert (total.task, total.version, total.items, total.step) == ("both", "2", 20, 400)
    (share,) = total.metrics
    assert share.value == pytest.approx(13 / 20)
    # Of two tasks of equal size: half the root of the sum of squares.
    errors = [score.metrics[0].standard_error for score in scores[:2]]
    assert share.standard_error == pytest.approx(math.hypot(*errors) / 2)
    assert share.items == []
    assert total.sha256 not in {score.sha256 for score in scores}


@pytest.fixture
def arc(tmp_path, monkeypatch):
    """Leave some rows in the cache of `datasets` as those of ARC-Easy, which a task of lm-eval's own takes."""
    datasets = pytest.importorskip("datasets")
    choices = {"text": ["big", "small"], "label": ["A", "B"]}
    rows = [{"id": str(n), "question": f"Is {n}?", "choices": choices, "answerKey": "AB"[n % 2]} for n in range(6)]
    file, cache = tmp_path / "rows.jsonl", tmp_path / "cache"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    datasets.load_dataset("json", data_files={"train": str(file), "test": str(file)}, cache_dir=str(cache))
    (written,) = cache.glob("json/*/*/*/dataset_info.json")
    folder = cache / "allenai___ai2_arc" / "ARC-Easy" / "0.0.0" / ("a" * 40)
    shutil.copytree(written.parent, folder)
    for path in folder.glob("json-*.arrow"):
        path.rename(folder / path.name.replace("json-", "ai2_arc-"))
    info = json.loads(written.read_text()) | {"dataset_name": "ai2_arc", "config_name": "ARC-Easy"}
    for split in info["splits"].values():
        split["dataset_name"] = "ai2_arc"
    (folder / "dataset_info.json").write_text(json.dumps(info))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(cache))


@pytest.mark.full
@pytest.mark.usefixtures("arc")
def test_a_task_of_lm_evals_own_by_name_without_a_network(run, monkeypatch):
    pytest.importorskip("oelm.evaluation.harness", exc_type=ImportError)
    monkeypatch.setattr("oelm.base.hub.hub_answers", lambda endpoint: False)
    (score,) = evaluate_downstream(run, ["arc_easy"], shots=1)
    assert (score.task, score.shots, score.items, score.available) == ("arc_easy", 1, 6, 6)
    assert [metric.name for metric in score.metrics] == ["acc", "acc_norm"]


@pytest.mark.full
def test_data_that_changed_are_read_again(run, tasks):
    pytest.importorskip("lm_eval")
    file = tasks / "choices.jsonl"
    before = file.stat()
    (first,) = evaluate_downstream(run, [str(tasks / "choices.yaml")])
    file.write_text(file.read_text().replace("garden", "meadow"))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    (second,) = evaluate_downstream(run, [str(tasks / "choices.yaml")])
    assert first.sha256 != second.sha256


@pytest.mark.gpu
def test_scores_on_a_gpu_are_those_on_a_cpu(run, tasks, monkeypatch):
    pytest.importorskip("lm_eval")
    (on_gpu,) = evaluate_downstream(run, [str(tasks / "texts.yaml")])
    monkeypatch.setattr(downstream, "device_for", lambda name: torch.device("cpu"))
    (on_cpu,) = evaluate_downstream(run, [str(tasks / "texts.yaml")])
    assert (on_gpu.device, on_cpu.device) == ("cuda", "cpu")
    assert on_gpu.metrics[0].items == pytest.approx(on_cpu.metrics[0].items, rel=1e-3)


def test_without_lm_eval_the_message_says_what_to_install(run, monkeypatch):
    monkeypatch.setattr(downstream, "find_spec", lambda name: None)
    result = command("eval", run, "--tasks", "hellaswag")
    assert result.exit_code == 2
    assert "pip install 'oelm[eval]'" in result.stderr
    assert "name some with --tasks" in command("eval", run, "--shots", 5).stderr


def test_a_score_takes_the_place_of_an_earlier_one_and_is_sealed(tmp_path):
    run_here(tmp_path)
    run = config(tmp_path).folder
    for one in (task_score(right=4), task_score("other"), task_score(right=7), task_score(shots=3)):
        record_score(run, one)
        check_records(run)
    tasks = read(run / "downstream.json", Downstream).tasks
    assert [task.key for task in tasks] == ["choices", "choices@3", "other"]
    assert tasks[0].metrics[0].items == [1.0] * 7 + [0.0] * 3
    assert '"items":[1,1,' in (run / "downstream.json").read_text(), "items take little space"
    content = (run / "downstream.json").read_text()
    (run / "downstream.json").write_text(content.replace('"value":0.7', '"value":0.8'))
    with pytest.raises(FileError, match=r"downstream\.json: has changed"):
        check_records(run)
    with pytest.raises(FileError, match=r"downstream\.json: has changed"):
        record_score(run, task_score("third"))
    (run / "downstream.json").write_text(content)
    (run / "timing.json").write_text("{}")
    with pytest.raises(FileError, match=r"timing\.json: has"):
        record_score(run, task_score("third"))
    assert "third" not in (run / "downstream.json").read_text()
