"""Build the site of the guides and the API reference: `make docs` writes build/site.

The pages keep their places, so that one relative link is right in the repository and on the site. zensical checks the
links between pages; afterwards every link, picture and script of the written site is checked, and nothing may come from
another host.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).parents[2]
PAGES, SITE = ROOT / "build" / "pages", ROOT / "build" / "site"
SOURCES = ("*.md", "docs/*.md", "docs/results/*.md", "examples/README.md", "results/README.md")
RECORDS = "docs/records.md"
STYLE = "docs/site/page.css"
_LINK = re.compile(r"\]\(<?([^)#>:]+)")
_RECORD = re.compile(r"^\[(R\d+)\]: <(?:\.\./)+(results/[^>]+)>$", re.MULTILINE)


def copy_pages(pages: Path) -> None:
    """Copy the pages, and every file of the repository that one of them shows or links to, into an empty folder.

    The records themselves are left out: a page lists them.
    """
    shutil.rmtree(pages, ignore_errors=True)
    for pattern in SOURCES:
        for source in sorted(ROOT.glob(pattern)):
            _copy(source, pages)
    _copy(ROOT / STYLE, pages)
    records = ["# Runs of the results", "", "Where the record of each run is in the repository."]
    for page in sorted((pages / "docs" / "results").glob("*.md")):
        text, listed = link_records(page.read_text(encoding="utf-8"), page.stem)
        page.write_text(text, encoding="utf-8")
        records += listed
    (pages / RECORDS).write_text("\n".join(records) + "\n", encoding="utf-8")
    for page in sorted(pages.rglob("*.md")):
        for link in _LINK.findall(page.read_text(encoding="utf-8")):
            source = (ROOT / page.relative_to(pages).parent / link).resolve()
            if source.is_relative_to(ROOT) and source.is_file() and source.suffix != ".md":
                _copy(source, pages)


def _copy(source: Path, pages: Path) -> None:
    target = pages / source.relative_to(ROOT)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def link_records(text: str, page: str) -> tuple[str, list[str]]:
    """Return a page of docs/results with its links to records pointing at the page that lists them, and that list."""
    rows = [f'| <a id="{page}-{name.lower()}"></a>{name} | `{path}` |' for name, path in _RECORD.findall(text)]
    head = ["", f"## [{page}](results/{page}.md)", "", "| run | folder |", "|---|---|"]
    target = f"../{Path(RECORDS).name}#{page}-"
    return _RECORD.sub(lambda match: f"[{match[1]}]: {target}{match[1].lower()}", text), [*head, *rows]


class _Page(HTMLParser):
    """The ids of a page, what it links to, and what a browser loads with it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value}
        self.ids |= {values[name] for name in ("id", "name") if name in values}
        if "href" in values:
            (self.loaded if tag == "link" else self.links).append(values["href"])
        if "src" in values:
            self.loaded.append(values["src"])


def problems(site: Path) -> list[str]:
    """Return what is wrong with the links of a site's pages: a target that is missing, or a file of another host."""
    pages = {path: _Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        if path.name == "404.html":  # its links are those of a server's root
            continue
        found += [f"{path.relative_to(site)}: loads {url}" for url in page.loaded if urlsplit(url).netloc]
        for url in (*page.links, *page.loaded):
            parts = urlsplit(url)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            fragment = unquote(parts.fragment)
            if not target.is_file() or (fragment and target in pages and fragment not in pages[target].ids):
                found.append(f"{path.relative_to(site)}: links to {url}, which is not there")
    return found


def main() -> None:
    """Build the site, or exit with what is wrong with it."""
    copy_pages(PAGES)
    shutil.rmtree(SITE, ignore_errors=True)
    zensical = Path(sys.executable).with_name("zensical")
    subprocess.run([zensical, "build", "--strict", "--clean"], cwd=ROOT, check=True)
    found = problems(SITE)
    if found:
        raise SystemExit("\n".join(found))
    print(f"{SITE / 'index.html'} is ready; for the search: python3 -m http.server --directory {SITE}")


if __name__ == "__main__":
    main()
