"""Damage to the files of a run: every reader gives what it gave before, or says what is wrong."""

import contextlib
import errno
import random
import shutil
import sys

import pytest
import torch

from nrgpt.files import NotOurs
from nrgpt.train import loop
from nrgpt.train.checkpoint import CheckpointError
from nrgpt.train.faults import OUTPUTS, TrainingError
from nrgpt.train.runs import load_run, read_result
from tests.runs import debug

from .harm import mutated

IDX = torch.tensor([[1, 2, 3, 4, 5, 6]])
READ = (
    "config.json", "tokenizer.json", "result.json", "checkpoints/step-00000008/model.safetensors",
    "checkpoints/step-00000008/state.json", "checkpoints/step-00000008/manifest.json",
)  # fmt: skip


def seen(run):
    """What a user gets to see of a run."""
    loaded = load_run(run)
    logits = loaded.model(IDX)[0].tolist()
    return loaded.step, logits, loaded.decode(range(17)), loaded.cfg, read_result(run)


def same_or_said(run, expected):
    try:
        found = seen(run)
    except (ValueError, CheckpointError, OSError) as error:
        if str(run) not in str(error):
            raise AssertionError("it does not say which file") from error
        return
    if found[0] == expected[0]:
        assert found == expected
    else:  # the checkpoint before: that is said
        assert load_run(run).faults


@pytest.mark.parametrize("kind", ["bit flips", "truncations", "mutations of files"])
def test_damaged_files(trained, tmp_path, faults, many, kind):
    run = tmp_path / "run"
    shutil.copytree(trained / "run", run)
    expected, draw = seen(run), random.Random(0)
    with faults(kind) as tried:
        for name in READ:
            path = run / name
            content = path.read_bytes()
            for number in range(many(8, 400)):
                data, at = bytearray(content), draw.randrange(len(content))
                if kind == "bit flips":
                    data[at] ^= 1 << draw.randrange(8)
                elif kind == "truncations":
                    del data[at:]
                else:
                    data = mutated(content, number)
                path.write_bytes(bytes(data))
                with tried.fault(f"{name}, {number}, at {at}"):
                    same_or_said(run, expected)
            path.write_bytes(content)
        assert seen(run) == expected


@pytest.mark.draws
def test_links_lead_nowhere(trained, tmp_path, faults, many):
    """In place of every file and folder that a training writes or removes."""
    data = f"data.folder={next((trained / 'data').iterdir())}"
    every = ("save_every=4", "eval_every=4", "log_every=1", "optimiser.warmup=1", data)
    kept, longer = debug("iterations=8", *every), debug("iterations=10", *every)
    base = tmp_path / "base"
    loop.train(kept, base)
    victims = tmp_path / "victims"
    names = (*OUTPUTS, "lock", "checkpoints", "tensorboard", "checkpoints/step-00000012",
             "checkpoints/.unfinished-1", "checkpoints/not-finite-step-00000004")  # fmt: skip
    with faults("links in a run folder") as tried:
        for number, name in enumerate(names):
            for target in many([("file", "folder")[number % 2]], ["file", "folder"]):
                shutil.rmtree(victims, ignore_errors=True)
                (victims / "folder").mkdir(parents=True)
                (victims / "file").write_text("mine")
                (victims / "folder" / "file").write_text("mine")
                run = tmp_path / "run"
                shutil.rmtree(run, ignore_errors=True)
                shutil.copytree(base, run)
                place = run / name
                if place.is_dir():
                    shutil.rmtree(place)
                place.unlink(missing_ok=True)
                place.symlink_to(victims / target)
                with tried.fault(f"{name} -> {target}"):
                    with contextlib.suppress(NotOurs, OSError, ValueError, TrainingError):
                        loop.train(longer, run)
                    assert (victims / "file").read_text() == "mine"
                    assert [p.name for p in (victims / "folder").iterdir()] == ["file"]
                    assert (victims / "folder" / "file").read_text() == "mine"


blocked = {"under": None, "is_watched": False}


def refuse_writing(event, arguments):
    under = blocked["under"]
    if under is None or not arguments or not str(arguments[0]).startswith(under):
        return
    is_writing = event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir")
    if event == "open":
        mode, flags = arguments[1], arguments[2]
        is_writing = bool(flags & 3) if mode is None else mode[0] in "wax+"
    if is_writing:
        raise OSError(errno.EROFS, "Read-only file system", str(arguments[0]))


def test_read_only_folders(trained, tmp_path, faults):
    """The system would let an administrator write, so the refusal is our own."""
    if not blocked["is_watched"]:
        sys.addaudithook(refuse_writing)
        blocked["is_watched"] = True
    data = next((trained / "data").iterdir())
    shutil.copytree(trained / "run", tmp_path / "run")
    cfg = debug("iterations=6", f"data.folder={data}")
    with faults("read-only folders") as tried:
        try:
            with tried.fault("a dataset"):
                blocked["under"] = str(trained / "data")
                assert loop.train(cfg, tmp_path / "new")["step"] == 6
            with tried.fault("a run that is read"):
                blocked["under"] = str(tmp_path / "run")
                assert load_run(tmp_path / "run").step == 8
            with tried.fault("a run that is trained"), pytest.raises(OSError, match="Read-only"):
                loop.train(debug("iterations=12"), tmp_path / "run")
        finally:
            blocked["under"] = None
