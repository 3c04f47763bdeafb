"""Chromium, driven by Playwright. Where either is missing, the tests that need it are skipped."""

import os
import shutil
import subprocess
import tarfile

import pytest

from tests.processes import patience

FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
]  # fmt: skip


@pytest.fixture(scope="session")
def chromium():
    """A browser for all tests of this process."""
    found = os.environ.get("NRGPT_CHROMIUM") or shutil.which("chromium") or shutil.which("chrome")
    if found is None:
        pytest.skip("no Chromium: install it, or set NRGPT_CHROMIUM to its path")
    sync_api = pytest.importorskip("playwright.sync_api", reason="no Playwright: pip install")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def context(chromium):
    """Offline: whatever is not in the page's own file is an error."""
    context = chromium.new_context(offline=True)
    context.set_default_timeout(1000 * patience())
    yield context
    context.close()


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
