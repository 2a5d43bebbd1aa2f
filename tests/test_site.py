"""The site: its navigation and its reference are complete, and its check finds broken links. `make docs` builds it."""

import importlib.util
import re
import runpy
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import oelm

ROOT = Path(__file__).parents[1]
_SPEC = importlib.util.spec_from_file_location("build_site", ROOT / "docs" / "site" / "build.py")
build_site = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(build_site)


def _pages_in(nav):
    for entry in nav:
        if isinstance(entry, str):
            yield entry
        else:
            (value,) = entry.values()
            yield from [value] if isinstance(value, str) else _pages_in(value)


def test_the_navigation_lists_every_page_once(tmp_path):
    build_site.copy_pages(tmp_path)
    pages = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.md"))
    config = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))
    assert sorted(_pages_in(config["project"]["nav"])) == pages


def test_the_sites_style_is_copied_to_where_its_config_says(tmp_path):
    build_site.copy_pages(tmp_path)
    config = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))
    assert config["project"]["extra_css"] == [build_site.STYLE]
    assert (tmp_path / build_site.STYLE).is_file()


def test_the_reference_has_every_public_name():
    text = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^::: oelm\.(\w+)$", text, re.MULTILINE)) - {"errors"}
    errors = {name for name in oelm.__all__ if name.endswith("Error")}  # all of them stand in oelm.errors
    assert documented == set(oelm.__all__) - errors - {"__version__"}


def test_links_to_records_lead_to_a_list_of_them():
    text = "See [R2].\n\n[R1]: <../../results/a/seed-0>\n[R2]: <../../results/b/seed-0>\n"
    linked, records = build_site.link_records(text, "cost")
    assert linked == "See [R2].\n\n[R1]: ../records.md#cost-r1\n[R2]: ../records.md#cost-r2\n"
    assert records[-1] == '| <a id="cost-r2"></a>R2 | `results/b/seed-0` |'


def test_a_missing_target_and_a_file_from_another_host_are_found(tmp_path):
    (tmp_path / "other.html").write_text('<h2 id="here">Here</h2>')
    (tmp_path / "index.html").write_text(
        '<a href="other.html#here">right</a> <a href="https://example.org/">right</a>'
        '<a href="other.html#there">wrong</a> <img src="gone.svg"> <script src="https://example.org/x.js"></script>'
    )
    assert build_site.problems(tmp_path) == [
        "index.html: loads https://example.org/x.js",
        "index.html: links to other.html#there, which is not there",
        "index.html: links to gone.svg, which is not there",
    ]


def test_a_docstrings_list_of_fields_becomes_a_list(monkeypatch):
    monkeypatch.setitem(sys.modules, "griffe", SimpleNamespace(Extension=object, Object=object))
    as_lists = runpy.run_path(str(ROOT / "docs" / "site" / "docstrings.py"))["as_lists"]
    fields = "q, k    how they are made, and\n        whether they are frozen\nlayers  all, or some"
    expected = "- **q, k**: how they are made, and\n  whether they are frozen\n- **layers**: all, or some"
    assert as_lists(f"A method.\n\n{fields}\n\nThe end.") == f"A method.\n\n{expected}\n\nThe end."
