"""Which folder may import which, as in CONTRIBUTING.md; imports inside functions and under TYPE_CHECKING count."""

import ast
from graphlib import TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

import pytest

import oelm

# folder: the folders that it may import from, besides itself and those at the bottom; in the order of the flow.
BOTTOM = "errors base"
MAY_IMPORT = {
    "errors": "",
    "base": "",
    "method": "",
    "config": "method",
    "data": "",
    "models": "method config",
    "runs": "method config",
    "training": "method config data models runs",
    "bench": "method config data models runs training",
    "evaluation": "method config data models runs training",
    "lab": "method config data models runs training",
    "analysis": "method config runs",
    "report": "config runs analysis",
    "cli": "method config data models runs training bench evaluation lab analysis report",
    "__main__": "cli",
}

Graph = dict[str, set[str]]


def _graph(root: Path) -> Graph:
    """Return for every module of the package the modules of the package that it imports, anywhere in its code."""
    packages = {".".join(("oelm", *path.parent.relative_to(root).parts)) for path in root.rglob("__init__.py")}
    modules = {".".join(("oelm", *path.relative_to(root).with_suffix("").parts)): path for path in root.rglob("*.py")}
    modules = {name.removesuffix(".__init__"): path for name, path in modules.items()}
    graph = {}
    for name, path in modules.items():
        if name == "oelm":  # the public API imports from everywhere, but only on first use
            continue
        package = name if name in packages else name.rpartition(".")[0]
        graph[name] = _imported(ast.parse(path.read_text(encoding="utf-8")), package, set(modules)) - {name}
    return graph


def _imported(tree: ast.AST, package: str, modules: set[str]) -> set[str]:
    """Return the modules of oelm that the code of a module in a package imports."""
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names if alias.name.partition(".")[0] == "oelm"}
        elif isinstance(node, ast.ImportFrom):
            source = resolve_name("." * node.level + (node.module or ""), package)
            for alias in node.names:
                inner = f"{source}.{alias.name}"
                if source.partition(".")[0] == "oelm" and inner != "oelm.__version__":
                    imported.add(inner if inner in modules else source)
    return imported


def _folder(module: str) -> str:
    """Return the folder of a module, or the module itself if it is at the top level."""
    if module == "oelm":
        return "the public API"
    folder = module.split(".")[1]
    assert folder in MAY_IMPORT, f"{module}: add a line for {folder} to MAY_IMPORT"
    return folder


def _forbidden(graph: Graph) -> list[str]:
    """Return the imports of folders that the importing module's folder may not import."""
    forbidden = []
    for module, imports in graph.items():
        allowed = {_folder(module), *BOTTOM.split(), *MAY_IMPORT[_folder(module)].split()}
        forbidden += [f"{module} imports {other}" for other in imports if _folder(other) not in allowed]
    return sorted(forbidden)


@pytest.fixture(scope="module")
def graph() -> Graph:
    return _graph(Path(oelm.__file__).parent)


def test_folders_are_listed_in_the_order_of_their_imports():
    listed: set[str] = set()
    for folder, imports in MAY_IMPORT.items():
        assert set(imports.split()) <= listed, f"{folder} may import a folder that is listed below it"
        listed.add(folder)


def test_every_folder_and_top_level_module_is_listed():
    package = Path(oelm.__file__).parent
    entries = {path.stem for path in package.iterdir() if path.is_dir() or path.suffix == ".py"}
    assert entries - {"__init__", "__pycache__"} == set(MAY_IMPORT)


def test_no_module_imports_a_folder_that_it_may_not_import(graph):
    assert _forbidden(graph) == []


def test_the_gpt_imports_only_projections_from_method(graph):
    gpt_modules = {module for module in graph if module.startswith(("oelm.models.gpt", "oelm.models.attention"))}
    imported_from_method = {
        imported for module in gpt_modules for imported in graph[module] if imported.startswith("oelm.method.")
    }
    assert imported_from_method == {"oelm.method.projections"}


def test_there_is_no_import_cycle(graph):
    TopologicalSorter(graph).prepare()  # raises a CycleError that names the modules


@pytest.mark.parametrize(
    "line",
    [
        "from ..training.engine import train",
        "from ..training import engine",
        "import oelm.training.engine",
        "def f():\n    from ..training.engine import train",
        "if TYPE_CHECKING:\n    from ..training.engine import train",
    ],
)
def test_a_forbidden_import_is_found_anywhere_in_a_module(line):
    imported = _imported(ast.parse(line), "oelm.data", {"oelm.training.engine"})
    assert _forbidden({"oelm.data.tables": imported}) == ["oelm.data.tables imports oelm.training.engine"]


def test_no_two_classes_have_the_same_name():
    files_by_class: dict[str, list[str]] = {}
    for path in sorted(Path(oelm.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                files_by_class.setdefault(node.name, []).append(path.name)
    assert {name: files for name, files in files_by_class.items() if len(files) > 1} == {}
