"""What is released: a wheel with all that the package needs, and files for clusters that work.
`make release-check` installs wheel, sdist and every extra in environments of their own."""

import os
import re
import subprocess
import sys
import time
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from dev.check_release import USES

import nrgpt
from tests.processes import patience, started

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=patience())
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = folder.glob("*.whl")
    return found


def test_the_wheel_is_whole_and_works(wheel, tmp_path):
    names = zipfile.ZipFile(wheel).namelist()
    tracked = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "src/nrgpt"], capture_output=True, text=True, check=False
    ).stdout.split()
    for name in (file.removeprefix("src/") for file in tracked):
        assert name in names or not (ROOT / "src" / name).exists(), name
    assert "nrgpt/py.typed" in names
    assert not [n for n in names if not n.startswith(("nrgpt/", f"nrgpt-{nrgpt.__version__}"))]
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    site = tmp_path / "site"
    subprocess.run([*install, "--target", site, wheel], check=True, timeout=patience())
    code = (
        "import nrgpt; print(nrgpt.__file__);"
        "print(len(nrgpt.load('zoo:listops_30_steps').generate('max(1,2) =', max_new_tokens=4)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=patience(),
        check=False, env={**os.environ, "PYTHONPATH": str(site)}, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(site))


def test_every_extra_is_tried_before_a_release():
    assert set(USES) == set(PROJECT["optional-dependencies"]) - {"dev"}
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    assert "dev/check_release.py" in str(workflow["jobs"]["build"]["steps"])
    assert f"## {nrgpt.__version__} (" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize(
    "path", sorted((ROOT / ".github/workflows").iterdir()), ids=lambda p: p.name
)
def test_workflows_may_do_little(path):
    """What SECURITY.md says: they read, a job that publishes may do just that, and no action can be
    exchanged for another under its name."""
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 60
        assert job.get("permissions", {}).keys() <= {"id-token", "pages"}
        for step in job["steps"]:
            assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", step.get("uses", f"a@{'0' * 40}"))


def on_slurm(tmp_path, *arguments):
    """The template with stand-ins for SLURM's commands, and two tasks; returns its exit code, and
    whether it was put back into the queue."""
    programs = {
        "scontrol": 'if [ "$1" = requeue ]; then echo "$2" > requeued; else echo 127.0.0.1; fi',
        # As SLURM does it: the exit code of a job step is the highest of its tasks.
        "srun": """
            export SLURM_NTASKS=2
            SLURM_PROCID=1 SLURM_LOCALID=1 "$@" & other=$!
            SLURM_PROCID=0 SLURM_LOCALID=0 "$@" & one=$!
            trap 'kill -TERM $one $other' TERM
            wait $one; first=$?; while kill -0 $one 2>/dev/null; do wait $one; first=$?; done
            wait $other; second=$?
            exit $((first > second ? first : second))""",
        "python": f'exec {sys.executable} "$@"',
    }
    for name, text in programs.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "n", "SLURM_JOB_ID": str(os.getpid())}
    environment = {**os.environ, **slurm, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    script = ROOT / "examples/cluster/slurm.sh"
    pipes = {"stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL, "text": True}
    with started(["bash", script, *arguments], env=environment, cwd=tmp_path, **pipes) as job:
        signalled, began = False, time.monotonic()
        while job.poll() is None and time.monotonic() - began < 2 * patience():
            metrics = tmp_path / "run" / "metrics.jsonl"
            if not signalled and metrics.exists() and '"step": 20' in metrics.read_text():
                subprocess.run(["pkill", "-TERM", "-s", str(job.pid), "-x", "srun"], check=False)
                signalled = True
            time.sleep(0.2)
        assert job.poll() is not None, "the job did not end"
        assert job.stderr is not None
        said = job.stderr.read()
    return job.returncode, (tmp_path / "requeued").exists(), said


@pytest.mark.skipif("NRGPT_LONG" not in os.environ, reason="long: NRGPT_LONG=1")
def test_slurm_puts_a_stopped_training_back_into_the_queue(tmp_path):
    """Two tasks with gloo; SIGTERM to the job step, as SLURM sends it before the time is over."""
    words = ["debug", "iterations=100000", "log_every=5", "--to", "run"]
    code, is_back, said = on_slurm(tmp_path, *words)
    assert (code, is_back) == (75, True), said
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))
    (tmp_path / "requeued").unlink()
    code, is_back, said = on_slurm(tmp_path, "debugg")
    assert (code, is_back) == (2, False), said


def test_skypilot_runs_what_it_says():
    task = yaml.safe_load((ROOT / "examples/cluster/skypilot.yaml").read_text())
    assert task["resources"]["use_spot"] is True
    assert "-m nrgpt train $ARGUMENTS" in task["run"]
    for part in (task["run"], task["setup"]):
        subprocess.run(["bash", "-n", "-c", part], check=True, timeout=patience())
