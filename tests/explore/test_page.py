"""The explorer in a browser: offline from a file, at every width, by keyboard, with any text."""

import os
import re
import subprocess
import tarfile
from urllib.parse import parse_qs, quote, urlsplit

import pytest

import nrgpt
from nrgpt import zoo
from nrgpt.cli.commands import explore as command
from nrgpt.explore.models import for_page
from nrgpt.explore.page import page
from nrgpt.train.runs import load_run
from tests.processes import patience

LOOKS = [(320, "dark"), (390, "light"), (768, "dark"), (1280, "light"), (1920, "dark")]
if "NRGPT_LONG" in os.environ:  # make test-pages
    LOOKS = [(w, s) for w in (320, 390, 768, 1280, 1920, 2560) for s in ("light", "dark")]
HOSTILE = {
    "markup": "</script><script>window.bad = 1</script><img src=x onerror='window.bad=1'>",
    "right to left": "שלום עולם To be",
    "emoji": "To be 🙂 or not 👩‍👩‍👧 to be",
    "long": "To be, or not to be. " * 500,
    "unknown only": "日本語",
    "nothing": "",
    "controls": "a\u2028b\u0000c\ud800d",
}


SCREENSHOTS = os.environ.get("NRGPT_SCREENSHOTS")
"""A folder to look at what the tests saw, at every width."""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """The zoo in one file, as ``nrgpt explore --to`` writes it."""
    runs = [load_run(zoo.folder(name)) for name in sorted(zoo.names(), reverse=True)]
    models = [for_page(r.model, r.tokenizer, **command.told(r, r.folder.name, None)) for r in runs]
    path = tmp_path_factory.mktemp("page") / "explorer.html"
    path.write_text(page(models), encoding="utf-8")
    return path


class Shown:
    """A page that was opened, with everything that it complained about."""

    def __init__(self, chromium, address, width=1280, *, requests="file:", **options):
        options = {"offline": True, "reduced_motion": "reduce"} | options
        self.context = chromium.new_context(viewport={"width": width, "height": 900}, **options)
        self.context.set_default_timeout(1000 * patience())
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", lambda said: self.complaints.append(said.text))
        self.allowed = (requests, "data:")
        self.page.on("request", self.check_request)
        self.page.goto(address)
        self.page.wait_for_selector("#stage svg")

    def check_request(self, request):
        if not request.url.startswith(self.allowed):
            self.complaints.append(f"asked for {request.url}")

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if error == (None, None, None):
            assert self.complaints == []
        self.context.close()

    def run(self, script):
        return self.page.evaluate(script)

    def write(self, text):
        self.page.fill("#text", text)
        self.settle()

    def until(self, holds, seconds=20):
        """Wait until an expression holds. (Playwright's own way is against the page's policy.)"""
        for _ in range(seconds * 20):
            if self.run(holds):
                return
            self.page.wait_for_timeout(50)
        raise AssertionError(f"never: {holds}")

    def settle(self):
        """Wait until what was asked for last is shown."""
        self.until("!isDue && computing === 0")


def test_a_file_that_is_small_and_needs_nothing_else(file):
    text = file.read_text(encoding="utf-8")
    assert file.stat().st_size < 2_000_000
    assert "default-src 'none'" in text
    assert not re.search(r'\b(?:src|href)="(?!#)', text)


def test_the_first_picture_comes_within_a_second(file, chromium):
    with Shown(chromium, file.as_uri()) as shown:
        assert shown.run("performance.now()") < 5_000  # 0.5 s alone; tests share the machine
        assert shown.page.locator("#stage svg .token").count() == 41
        assert shown.page.locator("#heat svg .token").count() == 41


@pytest.mark.parametrize(("width", "scheme"), LOOKS)
def test_every_width(file, chromium, width, scheme):
    """Nothing sticks out, and every picture is there."""
    with Shown(chromium, file.as_uri(), width, color_scheme=scheme) as shown:
        assert shown.run("document.documentElement.dataset.theme") == scheme
        assert shown.run("document.documentElement.scrollWidth") <= width
        for host in ("#stage", "#heat", "#curves", "#small", "#attention"):
            box = shown.page.locator(f"{host} svg").first.bounding_box()
            assert box["width"] > 100, host
            assert box["height"] > 30, host
        shown.run("survey_()")
        shown.page.wait_for_selector("#surface svg", timeout=1000 * patience())
        assert shown.run("document.documentElement.scrollWidth") <= width
        if SCREENSHOTS:
            path = f"{SCREENSHOTS}/{width}-{scheme}.png"
            shown.page.screenshot(path=path, full_page=True)


@pytest.mark.parametrize("kind", HOSTILE)
def test_any_text_is_only_a_text(file, chromium, kind):
    with Shown(chromium, file.as_uri(), 768) as shown:
        shown.page.evaluate("text => { setText(text); return compute(); }", HOSTILE[kind])
        assert shown.run("window.bad") is None
        assert shown.page.locator("img").count() == 0
        notice = shown.page.locator("#notice").inner_text()
        if kind == "long":
            assert "only the first 256 of 10500 tokens" in notice
        elif kind == "nothing":
            assert "type something" in notice
        elif kind != "markup":
            assert "left out" in notice
        shown.write("To be")
        assert shown.run("panels[0].record.tokens.length") == 5


def test_every_button_without_a_text(file, chromium):
    """There is nothing to show, and nothing breaks."""
    with Shown(chromium, f"{file.as_uri()}") as shown:
        shown.write("")
        for button in ("generate", "survey", "play", "link", "theme", "compare"):
            shown.page.click(f"#{button}")
        shown.settle()
        assert "type something" in shown.page.inner_text("#notice")
        shown.write("max(1,2) =")
        assert shown.page.locator("#stage svg").count() == 2


def test_two_alphabets(file, chromium):
    """The second model can read nothing of the first one's text."""
    with Shown(chromium, f"{file.as_uri()}#model=shakespeare_certified|listops_settled") as shown:
        shown.write("To be")
        assert shown.page.locator("#stage svg").count() == 1
        told = shown.page.locator("#stage .panel").nth(1).inner_text()
        assert "can read nothing of the text" in told
        shown.page.click(".which button >> nth=1")
        shown.page.click("#generate")
        assert shown.run("chosen.text") == "To be"


def test_by_keyboard_alone(file, chromium):
    with Shown(chromium, file.as_uri()) as shown:
        press = shown.page.keyboard.press
        reached = set()
        for _ in range(60):
            press("Tab")
            reached.add(shown.run("document.activeElement.id || document.activeElement.name"))
        wanted = {
            "model",
            "compare",
            "theme",
            "text",
            "quantity",
            "play",
            "t",
            "follow",
            "generate",
        }
        sliders = {"steps", "rate", "beta", "temperature", "cone", "frozen", "word", "weight"}
        assert wanted | sliders | {"survey"} <= reached
        described = "e => document.getElementById(e.getAttribute('aria-describedby')).textContent"
        for name in sliders:
            assert len(shown.page.eval_on_selector(f"#settings [name={name}]", described)) > 10
        shown.page.locator("#stage .view").focus()
        followed = shown.run("chosen.A")
        press("ArrowRight")
        assert shown.run("chosen.A") == followed + 1
        press("ArrowUp")
        assert shown.run("chosen.t") == shown.run("steps()") - 1
        shown.page.locator("#play").focus()
        press("Enter")
        shown.until("!isPlaying")
        shown.page.locator("input[name=steps]").focus()
        press("ArrowRight")
        shown.settle()
        assert shown.run("panels[0].record.steps") == shown.run("panels[0].info.steps") + 1


def test_the_sliders_act_and_the_link_holds_the_state(file, chromium):
    with Shown(chromium, file.as_uri()) as shown:
        before = shown.run("panels[0].record.curves.energy.at(-1)[5]")
        shown.run("change(panels[0], { rate: 1.5, beta: 2, word: 'king', weight: 1 })")
        shown.settle()
        shown.run("follow(3), goTo(4)")
        after = shown.run("panels[0].record.curves.energy.at(-1)[5]")
        assert after != before
        assert "own energy" in shown.run("Object.keys(panels[0].record.curves)")
        link = shown.run("location.href")
        assert parse_qs(urlsplit(link).fragment)["token"] == ["3"]
    with Shown(chromium, link) as shown:
        shown.settle()
        assert shown.run("panels[0].record.curves.energy.at(-1)[5]") == after
        assert shown.run("[chosen.A, chosen.t]") == [3, 4]


@pytest.mark.parametrize(
    "fragment",
    ["model=nowhere&token=-3&step=x&settings={}", "settings=[[1]", "token=1e9&show=</b>&step=99"],
)
def test_a_broken_link_does_no_harm(file, chromium, fragment):
    with Shown(chromium, f"{file.as_uri()}#{quote(fragment, safe='=&')}") as shown:
        shown.settle()
        assert shown.run("panels[0].record.tokens.length") > 0


def test_two_side_by_side(file, chromium):
    """The same model twice; the second without the certificate's promise."""
    with Shown(chromium, file.as_uri()) as shown:
        shown.page.click("#compare")
        shown.until("panels.length === 2 && panels[1].record")
        assert shown.page.locator("#stage svg").count() == 2
        assert shown.page.locator("#lamps .lamp").count() == 2
        shown.run("change(panels[1], { steps: 3 })")
        shown.until("panels[1].record.steps === 3")
        assert shown.run("panels[0].record.steps") == shown.run("panels[0].info.steps")


def test_an_energy_beside_none(chromium, tmp_path):
    """The zoo's pair, which shares an alphabet: a settled model whose descent is proved, and
    RGPT-parallel, which has no energy. Both were trained alike, and say the same."""
    path, names = tmp_path / "two.html", ("listops_settled", "listops_rgpt_parallel")
    command.explore([f"zoo:{name}" for name in names], to=path)
    with Shown(chromium, path.as_uri()) as shown:
        shown.page.click("#compare")
        shown.until("panels.length === 2 && panels[1].record")
        assert shown.run("panels.map(p => p.info.name)") == list(names)
        lamps = shown.page.locator("#lamps .lamp").all_inner_texts()
        assert "Proved: no step raises an energy in the forward pass" in lamps[0]
        assert "none of 60 steps raises an energy" in lamps[0]
        assert "No descent is proved" in lamps[1]
        said = shown.run("panels.map(p => p.source.label(p.record.said.at(-1).at(-1)[0]))")
        assert said == ["max", "max"]  # max(4,median(1,5,3),2) = max(4,3,2) = 4
        assert shown.page.locator("#attention svg").count() == 2
        assert shown.page.locator("#says table").count() == 2
        assert "the other model has none" in shown.page.inner_text("#stage-about")
        assert "B: The length of the state" in shown.page.inner_text("#curves-about")
        assert "84,036 parameters, trained with 5 steps" in shown.page.inner_text("#what")
        curves = "panels.map(p => Object.keys(p.record.curves))"
        assert "energy" in shown.run(curves)[0]
        assert "energy" not in shown.run(curves)[1]
        for quantity in shown.run(curves)[0]:
            shown.page.select_option("#quantity", quantity)
            assert shown.page.locator("#stage svg").count() == 2
        assert shown.page.locator("#survey").is_disabled()
        assert shown.page.locator("#land-none").is_visible()
        shown.page.click(".which button >> nth=0")
        assert not shown.page.locator("#survey").is_disabled()
        assert not shown.page.locator("#land-none").is_visible()
        assert shown.page.input_value("#model") == "0"
        shown.run("follow(11)")  # from its end and from elsewhere it rolls into different minima
        shown.page.click("#survey")
        shown.page.wait_for_selector("#surface svg", timeout=1000 * patience())
        assert "towards its start" in shown.page.text_content("#surface svg")
        stars, maps = "#map svg text:has-text('★')", []
        for section, count in (("path", 1), ("minima", 2)):
            shown.page.select_option("#section", section)
            assert shown.page.locator(stars).count() == count + 1  # and one in the legend
            maps.append(shown.page.locator("#map image").get_attribute("href"))
        assert maps[0] != maps[1]


def test_a_recording_shows_what_it_has(chromium, tmp_path):
    """No text to type, no model to change, and no landscape unless it was surveyed."""
    seen = nrgpt.load("zoo:listops_settled", device="cpu").trajectory("max(4,2) =")
    with Shown(chromium, seen.page(tmp_path / "seen.html").as_uri()) as shown:
        assert shown.page.locator("#stage .token text").all_text_contents()[:3] == ["max", "(", "4"]
        assert shown.page.locator("#says thead th").count() == 8  # five words
        for hidden in ("#text", "#generate", "#settings", "#survey", "#map"):
            assert not shown.page.locator(hidden).is_visible()


def test_it_goes_on_writing(file, chromium):
    with Shown(chromium, file.as_uri()) as shown:
        before = shown.run("panels[0].record.tokens.length")
        shown.page.click("#generate")
        shown.until(f"panels[0].record.tokens.length >= {before + 3}")
        shown.page.click("#generate")
        shown.until("!isGenerating && fresh === null")
        assert shown.page.input_value("#text") == shown.run("chosen.text")


def test_pictures_can_be_saved(file, chromium, tmp_path):
    """Each has its buttons."""
    with Shown(chromium, file.as_uri()) as shown:
        shown.run("survey_()")
        shown.page.wait_for_selector("#surface svg", timeout=1000 * patience())
        pictures = ("stage", "heat", "says", "curves", "attention", "map surface")
        assert shown.page.locator(".save").count() == len(pictures)
        kinds = {"SVG": b"<svg", "PNG": b"\x89PNG"}
        wanted = [("SVG", name) for name in pictures] + [("PNG", name) for name in pictures[:3]]
        for kind, name in wanted:  # Chromium drops the eleventh within a second
            with shown.page.expect_download() as waited:
                shown.page.click(f"[aria-label='Save as {kind}: {name}']")
            waited.value.save_as(tmp_path / kind)
            assert (tmp_path / kind).read_bytes().startswith(kinds[kind])


def test_the_followed_token_stays_in_sight(file, chromium):
    """Where a long text does not fit, its picture moves along."""
    with Shown(chromium, file.as_uri(), 320) as shown:
        for token in (40, 2):
            shown.run(f"follow({token})")
            shown.page.wait_for_timeout(50)
            box = shown.page.locator(f"#stage .token >> nth={token} >> text").bounding_box()
            assert 0 < box["x"] < 300
            title = shown.page.locator("#stage .side text").last.bounding_box()
            assert 0 < title["x"] < 60  # and so does its scale


@pytest.fixture(scope="session")
def axe(tmp_path_factory):
    """axe-core, from npm; skipped where it cannot be had."""
    folder = tmp_path_factory.mktemp("axe")
    try:
        subprocess.run(
            ["npm", "pack", "axe-core@4"],
            cwd=folder,
            check=True,
            capture_output=True,
            timeout=patience(),
        )
    except (OSError, subprocess.SubprocessError):
        pytest.skip("axe-core could not be fetched with npm")
    with tarfile.open(next(folder.glob("*.tgz"))) as archive:
        source = archive.extractfile("package/axe.min.js")
        assert source is not None
        return source.read().decode()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(file, chromium, axe, scheme):
    with Shown(chromium, file.as_uri(), 1280, color_scheme=scheme) as shown:
        shown.run("survey_()")
        shown.page.wait_for_selector("#surface svg", timeout=1000 * patience())
        shown.run(axe + "; 0")
        told = "violations.map(v => [v.id, v.nodes.map(n => n.html)])"
        found = shown.run(f"axe.run().then(({{ violations }}) => {told})")
        assert found == []
