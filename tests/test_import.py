"""Importing oelm and asking for help must be instant: no torch, no transformers."""

import subprocess
import sys


def _loaded(code: str) -> set[str]:
    script = f"import sys\n{code}\nprint('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_import_loads_no_heavy_module():
    loaded = _loaded("import oelm")
    assert not loaded & {"torch", "transformers", "pydantic", "numpy"}


def test_help_loads_no_heavy_module():
    loaded = _loaded(
        "from typer.testing import CliRunner; from oelm.cli import app;"
        "result = CliRunner().invoke(app, ['--help']); assert 'diagnose' in result.output"
    )
    assert not loaded & {"torch", "transformers"}


def test_every_public_name_resolves():
    import oelm

    assert {name for name in oelm.__all__ if getattr(oelm, name) is None} == set()
    assert set(dir(oelm)) == set(oelm.__all__)


def test_no_module_takes_a_functions_place():
    """Importing a submodule sets an attribute of its name on the package, so no public name may be a module's."""
    _loaded(
        "import oelm, oelm.cli, oelm.runs, oelm.bench; assert all(callable(getattr(oelm, name)) for name in "
        "('apply', 'audit', 'verify', 'load', 'export', 'train'))"
    )
