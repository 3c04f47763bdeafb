import pytest
import torch

torch.set_num_threads(1)  # the tests are small: threads only get in each other's way


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
