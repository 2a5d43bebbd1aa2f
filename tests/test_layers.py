"""Which module may import which: CONTRIBUTING.md's flow as a rule. Imports in functions and for types count too."""

import ast
from graphlib import TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

import pytest

import oelm

# room: (its modules and packages, the rooms above it that it may know). What makes records and what reads them know
# nothing of each other. What a method does to a model stands above models/: it takes any model, and knows none of ours.
ROOMS = {
    "ground": ("errors files init locks machine metrics published schema terminal", ""),
    "method": ("method recipes flops", "ground"),
    "config": ("config", "ground method"),
    "operation": (
        "projections modules families sites adapters plan rest surgery proof operate schedule diagnose tables "
        "model_flops",
        "ground method",
    ),
    "data": ("data", "ground"),
    "models": ("models", "ground method config operation data"),
    "records": ("records", "ground config"),
    "training": ("training", "ground method config operation data models records"),
    "analysis": ("analysis", "ground method config records"),
    "report": ("report", "ground config records analysis"),
    "tools": ("runs bench decoding", "ground method config operation data models records training"),
    "lab": ("lab", "ground method config operation data models records training report tools"),
    "commands": ("commands cli __main__", "ground method config operation data training report tools models lab"),
}

# (importer, imported): why it is right all the same.
EXPLAINED = {
    ("oelm.proof", "oelm.tables"): "print(report) is the API, and all text for the terminal is made in tables",
    ("oelm.training.task", "oelm.training.language"): "open_task makes the subclass that a config names",
    ("oelm.training.task", "oelm.training.classification"): "open_task makes the subclass that a config names",
    ("oelm.training.task", "oelm.training.text2text"): "open_task makes the subclass that a config names",
    ("oelm.lab.warm", "oelm.cli"): "what it forks is an `oelm train` process, which begins where the command does",
}

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
    part = module.split(".")[1]
    rooms = [room for room, (members, _) in ROOMS.items() if part in members.split()]
    assert len(rooms) == 1, f"{module}: give {part} one place in ROOMS"
    return rooms[0]


def _strangers(graph: Graph) -> list[str]:
    """The imports from a room that the importer's may not know."""
    found = []
    for module, imports in graph.items():
        for other in imports:
            own, its = _room(module), _room(other)
            if its != own and its not in ROOMS[own][1].split() and (module, other) not in EXPLAINED:
                found.append(f"{module} ({own}) imports {other} ({its})")
    return sorted(found)


@pytest.fixture(scope="module")
def graph() -> Graph:
    return _graph(Path(oelm.__file__).parent)


def test_rooms_stand_in_order():
    above: set[str] = set()
    for room, (_, known) in ROOMS.items():
        assert set(known.split()) <= above, f"{room} knows a room that does not stand above it"
        above.add(room)


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
    assert _strangers({"oelm.data.rows": found}) == ["oelm.data.rows (data) imports oelm.training.engine (training)"]
