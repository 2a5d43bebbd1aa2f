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


def test_functions_stay_functions_whatever_was_imported_before():
    """`oelm.apply` and `oelm.audit` share their names with the modules that they come from."""
    _loaded("import oelm; oelm.verify; import oelm.diagnose; assert callable(oelm.audit) and callable(oelm.apply)")
