"""Several processes: torchrun with DDP or FSDP2, gloo on CPUs, NCCL on GPUs.

The model itself knows nothing of this. Every process computes its share of the same global batch.
When one of them receives a signal or finds a number that is not finite, all act on it.
"""

import datetime
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from ..check import check, check_choice
from ..language_model import LanguageModel
from .faults import LOST, TrainingError


@dataclass(frozen=True)
class World:
    rank: int
    size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def any(self, flag: bool) -> bool:
        """Whether the flag is raised in any process."""
        return bool(self.largest(float(flag)))

    def agree(self, number: int) -> bool:
        """Whether all processes have the same number."""
        return self.largest(float(number)) == -self.largest(-float(number))

    def largest(self, number: float) -> float:
        """The largest of the numbers of all processes."""
        if self.size == 1:
            return number
        found = torch.tensor(number, device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return found.item()

    def mean(self, value: Tensor) -> Tensor:
        if self.size == 1:
            return value
        total = value.detach().clone()
        dist.all_reduce(total)
        return total / self.size

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()


def device_named(device: str) -> str:
    """cpu, cuda or mps; auto is cuda if this machine has such a GPU, and cpu otherwise."""
    check_choice("device", device, ("auto", "cpu", "cuda", "mps"))
    if device == "mps" and not torch.backends.mps.is_available():
        raise ValueError("device = 'mps': this machine has no Apple GPU; use 'cpu' or 'auto'")
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError("device = 'cuda': this machine has no usable GPU; use 'cpu' or 'auto'")
    return kind


@contextmanager
def world(device: str) -> Iterator[World]:
    """The processes that torchrun started, or this one alone."""
    kind = device_named(device)
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield World(0, 1, torch.device(kind))
        return
    local = torch.device("cpu")
    if kind == "cuda":
        local = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(local)
    wait = datetime.timedelta(seconds=seconds_to_wait())
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", timeout=wait)
    KEPT.append(dist.group.WORLD)
    try:
        yield World(dist.get_rank(), size, local)
    except TrainingError:
        raise
    except RuntimeError as error:
        if not LOST_WORDS.search(str(error)):
            raise
        raise TrainingError(
            f"process {os.environ.get('RANK')} had no answer from another one, which has ended or "
            f"stands still ({TIMEOUT} = {wait.total_seconds():g} seconds). Checkpoints are kept; "
            "run the same command to go on",
            code=LOST,
        ) from error
    finally:
        dist.destroy_process_group()


KEPT: list[Any] = []
"""Process groups, which are closed but never freed. A model in DDP may hold the last reference to
one; freeing it waits for a thread of gloo's, with Python's lock held, and the thread may need that
lock to let go of a tensor: both wait without end."""

TIMEOUT = "NRGPT_TIMEOUT"
"""Environment variable: seconds that a process waits for the others of its run; 900 if not set."""
LOST_WORDS = re.compile("timed? ?out|connection (was )?(closed|reset)|broken pipe", re.IGNORECASE)


def seconds_to_wait() -> float:
    text = os.environ.get(TIMEOUT, "900")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0
    check(0 < seconds < 1e6, TIMEOUT, text, "a number of seconds, positive and below a million")
    return seconds


def shard(model: LanguageModel) -> None:
    """FSDP2, in place: every process keeps a share of weights, gradients and optimiser state.

    The whole model is one unit. Its steps share their weights, and each block prepares its weights
    before the first step, so gathering them one by one would save nothing. Muon's updates differ
    from those of one process by a few per cent, because its iterations in bfloat16 round
    differently on shards; AdamW's differ by the rounding of float32 only.
    """
    fully_shard(model)


def replicate(model: nn.Module, where: World) -> nn.Module:
    """The model in DDP, if there are several processes."""
    if where.size == 1:
        return model
    ids = [where.device.index] if where.device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=ids)


def synchronised(model: nn.Module, last: bool) -> Any:
    """For gradient accumulation: exchange gradients only after the last part."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
    elif isinstance(model, DistributedDataParallel) and not last:
        return model.no_sync()
    return nullcontext()
