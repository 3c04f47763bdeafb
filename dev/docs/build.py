"""Build the documentation site in out/site: python dev/docs/build.py [--quick]

Pages are gathered in out/docs with the repository's own layout, so that links work here and there;
reference pages and the explorer are made, tutorials are run. Any warning is an error, and so is a
link that leads nowhere. ``--quick`` runs the tutorials as the tests do.
"""

import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tutorials import executed

from reference import commands_page, configuration_page

ROOT = Path(__file__).resolve().parents[2]
OUT, SITE, WORK = ROOT / "out" / "docs", ROOT / "out" / "site", ROOT / "out" / "docs-work"
SHOWN = {".md", ".png", ".svg", ".txt", ".json", ".jsonl", ".py", ".css", ".js", ".html"}
FOLDER_LINK = re.compile(r"\]\(([^)#\s:]+?)/?\)")


def main() -> None:
    quick = "--quick" in sys.argv
    for folder in (OUT, SITE, WORK):
        shutil.rmtree(folder, ignore_errors=True)
    gather()
    make_reference()
    for page in sorted((ROOT / "docs" / "tutorials").glob("*.md")):
        print(f"running {page.relative_to(ROOT)}", flush=True)
        text, pictures = executed(page, WORK / page.stem, quick=quick)
        (OUT / "docs" / "tutorials" / page.name).write_text(text, encoding="utf-8")
        for name, picture in pictures.items():
            (OUT / "docs" / "tutorials" / name).write_bytes(picture)
    make_explorer()
    complete_folders()
    build()
    broken = broken_links(SITE)
    if broken:
        sys.exit("\n".join(["links that lead nowhere:", *broken]))
    print(f"the site is in {SITE.relative_to(ROOT)}: open index.html")


def gather() -> None:
    """Everything that a page may show or link to, where it is in the repository."""
    for name in ("docs", "experiments"):
        for path in sorted((ROOT / name).rglob("*")):
            if path.suffix in SHOWN and path.is_file():
                copy(path, OUT / path.relative_to(ROOT))
    others = [*ROOT.glob("*.md"), *ROOT.glob("LICENSE"), ROOT / "CITATION.cff", ROOT / "dev/LOG.md"]
    others += ROOT.glob("examples/cluster/*")
    for path in others:
        copy(path, OUT / path.relative_to(ROOT))


def copy(path: Path, to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, to)


def make_reference() -> None:
    folder = OUT / "docs" / "reference"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "commands.md").write_text(commands_page(), encoding="utf-8")
    (folder / "configuration.md").write_text(configuration_page(), encoding="utf-8")


def make_explorer() -> None:
    """The explorer of the zoo, beside the page that holds it."""
    from nrgpt.cli.explore import explore

    explore(to=OUT / "docs" / "explorer-page.html")


def complete_folders() -> None:
    """A link to a folder leads to its README, or to a list of what is in it."""
    for page in sorted(OUT.rglob("*.md")):

        def complete(link: re.Match[str], page: Path = page) -> str:
            target = (page.parent / link[1]).resolve()
            return f"]({link[1]}/{index_of(target)})" if target.is_dir() else link[0]

        page.write_text(FOLDER_LINK.sub(complete, page.read_text(encoding="utf-8")), "utf-8")


def index_of(folder: Path) -> str:
    if (folder / "README.md").exists():
        return "README.md"
    files = [path.name for path in sorted(folder.iterdir()) if path.is_file()]
    listed = "\n".join(f"- [{name}]({name})" for name in files if name != "contents.md")
    (folder / "contents.md").write_text(f"# {folder.name}\n\n{listed}\n", encoding="utf-8")
    return "contents.md"


def build() -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=900)


class Links(HTMLParser):
    """Where a page leads, and which places in it can be led to."""

    def __init__(self, text: str):
        super().__init__()
        self.targets: list[str] = []
        self.places: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name in ("href", "src") and value:
                self.targets.append(value)
            if name in ("id", "name") and value:
                self.places.add(value)


def broken_links(site: Path) -> list[str]:
    """Links within the site that lead to no file, or to no place in it. Nothing is fetched."""
    pages = {p: Links(p.read_text(encoding="utf-8")) for p in sorted(site.rglob("*.html"))}
    found = []
    for page, links in pages.items():
        for target in links.targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            base = site if parts.path.startswith("/") else page.parent
            path = (base / unquote(parts.path).lstrip("/")).resolve() if parts.path else page
            is_there = path.is_file() or (path / "index.html").is_file()
            place, known = unquote(parts.fragment), pages.get(path)
            is_place = not place or known is None or place in known.places or "=" in place
            if not is_there or not (is_place or place.startswith("__")):
                found.append(f"{page.relative_to(site)}: {target}")
    return found


if __name__ == "__main__":
    main()
