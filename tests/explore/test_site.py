"""The documentation site, opened from a folder: `make docs` builds it."""

from pathlib import Path

import pytest

from nrgpt import zoo
from nrgpt.cli.explore import explore
from tests.processes import patience

ROOT = Path(__file__).parents[2]
SITE = ROOT / "out" / "site" / "index.html"


def test_a_frame_does_a_workers_work(context, tmp_path):
    """Browsers start no worker for a page from a folder, and the site's search runs in one."""
    (tmp_path / "shim.js").write_text((ROOT / "docs" / "iframe-worker.js").read_text())
    (tmp_path / "work.js").write_text("addEventListener('message', e => postMessage(2 * e.data))")
    (tmp_path / "page.html").write_text("<body></body><script src='shim.js'></script>")
    page = context.new_page()
    page.goto((tmp_path / "page.html").as_uri())
    answers = page.evaluate("""async () => {
      const worker = new Worker(new URL("work.js", location)), found = [];
      const done = new Promise(resolve => worker.addEventListener("message", ({ data }) => {
        if (found.push(data) === 2) resolve(found);
      }));
      worker.postMessage(3);
      worker.postMessage(4);
      return done;
    }""")
    assert answers == [6, 8]


@pytest.mark.skipif(not SITE.exists(), reason="no site: make docs")
def test_examples_in_docstrings_are_code():
    page = (SITE.parent / "docs" / "reference" / "python.html").read_text(encoding="utf-8")
    assert "&gt;&gt;&gt;" in page
    assert "<blockquote>" not in page


@pytest.mark.skipif(not SITE.exists(), reason="no site: make docs")
def test_the_sites_search_finds_something(context):
    page, complaints = context.new_page(), []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(SITE.as_uri())
    page.click("label.md-header__button[for=__search]") if page.viewport_size["width"] < 960 else (
        page.click("input.md-search__input")
    )
    page.keyboard.type("certificate", delay=20)
    page.wait_for_selector(".md-search-result__item a", timeout=1000 * patience())
    found = page.locator(".md-search-result__item a").all_inner_texts()
    assert any("certificate" in text.lower() for text in found)
    assert complaints == []


def test_the_explorer_is_as_dark_as_the_page_around_it(context, tmp_path):
    explore([zoo.resolve("zoo:listops_settled")], to=tmp_path / "page.html")
    (tmp_path / "theme.js").write_text((ROOT / "docs" / "theme.js").read_text())
    (tmp_path / "site.html").write_text(
        "<body data-md-color-scheme=slate><iframe class=explorer src=page.html></iframe>"
        "<script src=theme.js></script>"
    )
    page = context.new_page()
    page.goto((tmp_path / "site.html").as_uri())
    inside = page.frames[1]
    for scheme, theme in (("slate", "dark"), ("default", "light")):
        page.evaluate("s => document.body.setAttribute('data-md-color-scheme', s)", scheme)
        inside.wait_for_selector(
            f"html[data-theme={theme}]", timeout=1000 * patience(), state="attached"
        )
    page.close()


@pytest.mark.skipif(not SITE.exists(), reason="no site: make docs")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["index.html", "docs/explorer.html", "docs/tutorials/watch.html"])
def test_axe_finds_nothing_in_the_site(chromium, axe, name, scheme):
    context = chromium.new_context(offline=True, color_scheme=scheme)
    page = context.new_page()
    page.goto((SITE.parent / name).as_uri())
    page.evaluate(axe + "; 0")
    found = page.evaluate("""axe.run({ iframes: false, preload: false })
        .then(({ violations }) => violations.map(v => [v.id, v.nodes.map(n => n.html)]))""")
    context.close()
    # The theme's script makes a nav of each button that copies code, without a name.
    assert [v for v in found if v[0] != "landmark-unique"] == []
