"""experiments/README.md lists every experiment, and what it links to is there."""

import re
import subprocess
from pathlib import Path

import pytest

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
INDEX = (EXPERIMENTS / "README.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("| ").split(" | ")]
    for line in INDEX.splitlines()
    if line.startswith("| [")
]
FOLDERS = sorted(path.name for path in EXPERIMENTS.iterdir() if (path / "README.md").exists())


def test_every_experiment_has_a_line():
    listed = [re.match(r"\[(\w+)\]", row[0]) for row in ROWS]
    assert sorted(found[1] for found in listed if found) == FOLDERS
    others = [path.name for path in EXPERIMENTS.iterdir() if path.is_dir()]
    assert set(others) - {"__pycache__"} == set(FOLDERS)  # each has a README


def test_every_line_is_whole():
    for experiment, question, answer, command, shown, date in ROWS:
        assert question, experiment
        assert re.search(r"\d|docs/", answer) or answer.startswith("No"), experiment
        assert command.startswith("`"), experiment
        assert "](" in shown, experiment
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", date), experiment


@pytest.mark.parametrize("page", ["README.md", *(f"{folder}/README.md" for folder in FOLDERS)])
def test_links_lead_somewhere(page):
    path = EXPERIMENTS / page
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text()):
        if not link.startswith("http"):
            assert (path.parent / link).exists(), link


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_commands_name_scripts_that_exist(row):
    for module in re.findall(r"python -m ([\w.]+)", row[3]):
        assert (EXPERIMENTS.parent / f"{module.replace('.', '/')}.py").exists()
    for script in re.findall(r"experiments/[\w/]+\.(?:py|sh)", row[3]):
        assert (EXPERIMENTS.parent / script).exists()


def test_there_are_not_too_many_files():
    """Records of runs are packed: python -m nrgpt.reproduce.records pack FOLDER."""
    command = ["git", "-C", str(EXPERIMENTS), "ls-files", "."]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("needs a git repository")
    assert len(listed.stdout.splitlines()) <= 500
