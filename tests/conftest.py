import pytest
import torch

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
