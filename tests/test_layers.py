"""Which folder may import which: the flow of CONTRIBUTING.md as a rule. Imports in functions and for types count."""

import ast
from graphlib import TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

import pytest

import oelm

# folder: the folders that it may import from, besides itself and those at the bottom; in the order of the flow.
BOTTOM = "errors base"
ROOMS = {
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

# (importer, imported): why it is right all the same.
EXPLAINED: dict[tuple[str, str], str] = {}

Graph = dict[str, set[str]]


def _graph(root: Path) -> Graph:
    """Every module below the package and the modules of the package that it imports, wherever the import stands."""
    packages = {".".join(("oelm", *path.parent.relative_to(root).parts)) for path in root.rglob("__init__.py")}
    modules = {".".join(("oelm", *path.relative_to(root).with_suffix("").parts)): path for path in root.rglob("*.py")}
    modules = {name.removesuffix(".__init__"): path for name, path in modules.items()}
    graph = {}
    for name, path in modules.items():
        if name == "oelm":  # the public API: for the type checker it names what it loads on first use
            continue
        package = name if name in packages else name.rpartition(".")[0]
        found = _imported(ast.parse(path.read_text(encoding="utf-8")), package, set(modules))
        graph[name] = found - {name}
    return graph


def _imported(tree: ast.AST, package: str, modules: set[str]) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {one.name for one in node.names if one.name.partition(".")[0] == "oelm"}
        elif isinstance(node, ast.ImportFrom):
            source = resolve_name("." * node.level + (node.module or ""), package)
            for one in node.names:
                inner = f"{source}.{one.name}"
                if source.partition(".")[0] == "oelm" and inner != "oelm.__version__":
                    found.add(inner if inner in modules else source)
    return found


def _room(module: str) -> str:
    if module == "oelm":
        return "the public API"
    room = module.split(".")[1]
    assert room in ROOMS, f"{module}: give {room} its line in ROOMS"
    return room


def _strangers(graph: Graph) -> list[str]:
    """Return the imports from a room that the importer's may not know."""
    found = []
    for module, imports in graph.items():
        for other in imports:
            own, its = _room(module), _room(other)
            allowed = {own, *BOTTOM.split(), *ROOMS[own].split()}
            if its not in allowed and (module, other) not in EXPLAINED:
                found.append(f"{module} imports {other}")
    return sorted(found)


@pytest.fixture(scope="module")
def graph() -> Graph:
    return _graph(Path(oelm.__file__).parent)


def test_rooms_stand_in_order():
    above: set[str] = set()
    for room, known in ROOMS.items():
        assert set(known.split()) <= above, f"{room} knows a room that does not stand above it"
        above.add(room)


def test_every_folder_and_top_level_module_has_its_line():
    package = Path(oelm.__file__).parent
    entries = {path.stem for path in package.iterdir() if path.is_dir() or path.suffix == ".py"}
    assert entries - {"__init__", "__pycache__"} == set(ROOMS)


def test_no_module_imports_from_a_room_it_may_not_know(graph):
    assert _strangers(graph) == []


def test_no_modules_import_each_other_in_a_circle(graph):
    kept = {name: {other for other in imports if (name, other) not in EXPLAINED} for name, imports in graph.items()}
    TopologicalSorter(kept).prepare()  # raises with the circle in its message


def test_what_is_explained_is_there(graph):
    assert [pair for pair in EXPLAINED if pair[1] not in graph[pair[0]]] == []


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
def test_an_upward_import_is_seen_wherever_it_stands(line):
    found = _imported(ast.parse(line), "oelm.data", {"oelm.training.engine"})
    assert _strangers({"oelm.data.tables": found}) == ["oelm.data.tables imports oelm.training.engine"]
