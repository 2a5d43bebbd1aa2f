"""`import oelm` and `oelm --help` must be instant: they import no torch and no transformers."""

import subprocess
import sys

import pytest


def loaded_modules(code: str) -> set[str]:
    """Return the names of the modules that are loaded after running code in a new process."""
    script = f"import sys\n{code}\nprint('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_import_loads_no_heavy_module():
    loaded = loaded_modules("import oelm")
    assert not loaded & {"torch", "transformers", "pydantic", "numpy"}


def test_help_loads_no_heavy_module():
    loaded = loaded_modules(
        "from typer.testing import CliRunner; from oelm.cli import app;"
        "result = CliRunner().invoke(app, ['--help']); assert 'diagnose' in result.output"
    )
    assert not loaded & {"torch", "transformers", "submitit", "matplotlib", "numpy", "pydantic"}


@pytest.mark.parametrize("command", [["eval", "nowhere"], ["predict", "nowhere", "a text"], ["generate", "nowhere"]])
def test_a_folder_that_is_not_there_is_refused_before_the_libraries_are_loaded(command):
    loaded = loaded_modules(
        "from typer.testing import CliRunner; from oelm.cli import app;"
        f"result = CliRunner().invoke(app, {command}); assert result.exit_code == 2, result.output"
    )
    assert not loaded & {"torch", "transformers"}


def _parts(loaded: set[str]) -> set[str]:
    """Return the modules and packages directly below oelm among the loaded ones."""
    return {name.split(".")[1] for name in loaded if name.startswith("oelm.")}


@pytest.mark.parametrize("module", ["oelm.analysis.analyse", "oelm.analysis.load", "oelm.report.write"])
def test_analysis_and_report_load_nothing_that_trains(module):
    loaded = loaded_modules(f"import {module}")
    assert not loaded & {"torch", "transformers"}
    assert not _parts(loaded) & {"bench", "evaluation", "lab", "models", "training"}


@pytest.mark.full
@pytest.mark.parametrize("module", ["method.seal", "models.flops"])
def test_reports_about_a_model_load_nothing_that_trains(module):
    assert not _parts(loaded_modules(f"import oelm.{module}")) & {"analysis", "bench", "lab", "report", "training"}


def test_every_public_name_resolves():
    import oelm

    assert {name for name in oelm.__all__ if getattr(oelm, name) is None} == set()
    assert set(dir(oelm)) == set(oelm.__all__)


@pytest.mark.full
def test_no_module_shadows_a_public_function():
    """Importing a submodule sets an attribute of its name on the package, so no public name may be a module's."""
    loaded_modules(
        "import oelm, oelm.cli, oelm.evaluation.load, oelm.bench.steps; "
        "assert all(callable(getattr(oelm, name)) for name in ('apply', 'audit', 'verify', 'load', 'export', 'train'))"
    )
