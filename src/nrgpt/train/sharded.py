"""Checkpoints of which every process writes and reads its own share, for models whose weights and
optimiser state no process could hold as a whole. By torch.distributed.checkpoint.

    RUN/checkpoints/step-00001000/
      shards/shard-00001-model-...safetensors    the share of the first process, and so on:
                                                 model/<parameter>,
                                                 optimiser/<number>/<parameter>/<state>
      state.json, manifest.json                  as in any checkpoint

Shares are slices of tensors with their places, so any number of processes can read them.
"""

import logging
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim import Optimizer

from ..files import make_folder, read_json
from .checkpoint import (
    FILES,
    SHARD,
    SHARDS,
    CheckpointError,
    fault_of,
    load_checkpoint,
    named,
    read_tensors,
    seal,
)
from .distributed import World

MODEL, OPTIMISER = "model/", "optimiser/"


def is_sharded(folder: Path) -> bool:
    return (folder / SHARDS).is_dir()


@contextmanager
def in_words(folder: Path) -> Iterator[None]:
    """What goes wrong in torch as an error of ours: its own is no Exception, and holds a traceback
    of every process. (It also warns that a single process reads on its own, which is meant, and
    logs the errors that it raises.)"""
    root = logging.getLogger()
    root.addFilter(is_of_others)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except CheckpointException as error:
        causes = [cause for cause, _ in error.failures.values()]
        said = "; ".join(dict.fromkeys(f"{cause}" or type(cause).__name__ for cause in causes))
        raise CheckpointError(f"{folder}: {said}") from error
    except SafetensorError as error:
        raise CheckpointError(f"{folder}: not a file of tensors ({error})") from error
    except RuntimeError as error:
        if "unable to open file" not in str(error):  # as when another process is lost
            raise
        raise CheckpointError(f"{folder}: {error}") from error
    finally:
        root.removeFilter(is_of_others)


def is_of_others(record: logging.LogRecord) -> bool:
    return "checkpoint" not in Path(record.pathname).parts


def check_all_there(folder: Path) -> None:
    """After reading: if a training has removed a share meanwhile, zeros would stand for it."""
    for name in read_json(folder / "manifest.json"):
        if SHARD.fullmatch(name) and not (folder / name).is_file():
            raise CheckpointError(f"{folder / name}: missing")


def save(
    folder: Path,
    step: int,
    model: nn.Module,
    optimisers: list[Optimizer],
    state: Mapping[str, Any],
    where: World,
) -> None:
    """Write RUN/checkpoints/step-N; all processes take part. If that fails, nothing of it remains,
    as with save_checkpoint."""
    final, unfinished = folder / f"step-{step:08d}", folder / f".unfinished-{step:08d}-shards"
    is_there = where.is_first and final.exists() and fault_of(final) is None
    if where.any(is_there):
        return
    error: Exception | None = None
    try:
        if where.is_first:
            shutil.rmtree(unfinished, ignore_errors=True)
            make_folder(folder)
            unfinished.mkdir()  # not with its parents: what is there, such as a link, is not ours
            (unfinished / SHARDS).mkdir()
    except OSError as failure:
        error = failure
    try:
        # All wait here for the folder; without it none begins, since all of them must take part.
        if not where.any(error is not None):
            writer = dcp.HuggingFaceStorageWriter(str(unfinished / SHARDS), save_distributed=True)
            with in_words(unfinished):
                dcp.save(tensors(model, optimisers), storage_writer=writer, no_dist=where.size == 1)
            if where.is_first:
                seal(unfinished, final, {"step": step, **state})
    except (OSError, CheckpointError) as failure:
        error = failure
    if where.any(error is not None):
        if where.is_first:
            shutil.rmtree(unfinished, ignore_errors=True)
        raise CheckpointError(
            f"could not write checkpoint {final}: {error or 'another process failed'}. Earlier "
            "checkpoints are untouched; free some space and run the same command again"
        ) from error


def tensors(model: nn.Module, optimisers: list[Optimizer]) -> dict[str, Any]:
    """What a checkpoint holds. Single numbers become tensors of one: files have slices only."""
    found = {MODEL + name: value for name, value in model.state_dict().items()}
    for number, optimiser in enumerate(optimisers):
        for name, parameter in named(model, optimiser):
            for key, value in optimiser.state[parameter].items():
                found[f"{OPTIMISER}{number}/{name}/{key}"] = (
                    value.view(1) if not value.dim() else value
                )
    return found


def load(folder: Path, model: nn.Module, optimisers: list[Optimizer], where: World) -> None:
    """Each process reads what it holds, of weights and optimiser state."""
    reader = dcp.HuggingFaceStorageReader(str(folder / SHARDS))
    with in_words(folder):
        saved = reader.read_metadata().state_dict_metadata
    wanted: dict[str, Any] = {MODEL + name: value for name, value in model.state_dict().items()}
    there = {name for name in saved if name.startswith(MODEL)}
    if there != wanted.keys():
        differ = ", ".join(sorted(n.removeprefix(MODEL) for n in there ^ wanted.keys()))
        raise CheckpointError(f"the checkpoint is of another model: {differ}")
    parameters = dict(model.named_parameters())
    for name, about in saved.items():
        if name.startswith(OPTIMISER):
            of = name.removeprefix(OPTIMISER).partition("/")[2].rpartition("/")[0]
            if of not in parameters:
                raise CheckpointError(f"{folder}: {name} is the state of no parameter")
            wanted[name] = room_for(about, parameters[of])
    with in_words(folder):
        dcp.load(wanted, storage_reader=reader, no_dist=where.size == 1)
    check_all_there(folder)
    for number, optimiser in enumerate(optimisers):
        state: dict[int, dict[str, Any]] = {}
        for index, (name, _) in enumerate(named(model, optimiser)):
            prefix = f"{OPTIMISER}{number}/{name}/"
            state[index] = {
                key.removeprefix(prefix): value[0] if value.shape == (1,) else value
                for key, value in wanted.items()
                if key.startswith(prefix)
            }
        groups = optimiser.state_dict()["param_groups"]
        optimiser.load_state_dict({"state": state, "param_groups": groups})


def room_for(about: Any, parameter: Tensor) -> Tensor:
    """For a state that is shaped, and then sharded, like its parameter; or for another."""
    dtype = about.properties.dtype
    if about.size == parameter.shape:
        return torch.zeros_like(parameter, dtype=dtype)
    return torch.zeros(about.size, dtype=dtype)


def weights_of(folder: Path) -> dict[str, Tensor]:
    """The weights of any checkpoint, whole."""
    return read(folder, MODEL) if is_sharded(folder) else read_tensors(folder / FILES[0])


def read_whole(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights and optimiser state of any checkpoint, whole."""
    if not is_sharded(folder):
        return load_checkpoint(folder)[:2]
    return read(folder, MODEL), read(folder, OPTIMISER)


def read(folder: Path, prefix: str) -> dict[str, Tensor]:
    """Whole tensors, read by one process alone."""
    reader = dcp.HuggingFaceStorageReader(str(folder / SHARDS))
    with in_words(folder):
        saved: dict[str, Any] = reader.read_metadata().state_dict_metadata
        found: dict[str, Any] = {
            name: torch.zeros(about.size, dtype=about.properties.dtype)
            for name, about in saved.items()
            if name.startswith(prefix)
        }
        dcp.load(found, storage_reader=reader, no_dist=True)
    check_all_there(folder)
    is_single = lambda value: prefix == OPTIMISER and value.shape == (1,)  # noqa: E731
    return {
        name.removeprefix(prefix): value[0] if is_single(value) else value
        for name, value in found.items()
    }
