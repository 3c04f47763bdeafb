import pytest
import torch

from nrgpt.train import result

torch.set_num_threads(1)  # the tests are small: threads only get in each other's way


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch, tmp_path_factory):
    """Work in a folder of our own, with one place for the datasets of all tests."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NRGPT_DATA", str(tmp_path_factory.getbasetemp() / "data"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # of processes that tests start


@pytest.fixture(autouse=True)
def undrawn(request, monkeypatch):
    """Trainings of tests do not draw their losses, which takes longer than to find them. Those that
    ask for it do, and those of other processes."""
    if "draws" not in request.keywords:
        monkeypatch.setattr(result, "plot_losses", lambda run: None)
