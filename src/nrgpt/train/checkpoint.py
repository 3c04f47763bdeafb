"""Checkpoints: safetensors and JSON in a folder, verified by checksum, written atomically.

    RUN/checkpoints/step-00001000/
      model.safetensors      weights, by the model's own names; loadable alone
      optimiser.safetensors  <number of the optimiser>/<parameter>/<state>
      state.json             step, losses, learning-rate factor, ...
      manifest.json          sha256 and size of the three

A checkpoint is written under another name, flushed to the disk, and renamed when whole: what has a
final name is complete. Nothing valid is ever overwritten or removed before its successor stands.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from ..data.shards import Dataset
from ..files import fingerprint, flush

FILES = ("model.safetensors", "optimiser.safetensors", "state.json")


class CheckpointError(ValueError):
    """A checkpoint that is not whole, or could not be written."""


def save_checkpoint(
    folder: Path,
    step: int,
    weights: Mapping[str, Tensor],
    optimiser: Mapping[str, Tensor],
    state: Mapping[str, Any],
) -> Path:
    """Write RUN/checkpoints/step-N; on any failure nothing of it remains.

    A valid checkpoint of this step is left as it is: a run is deterministic, and where it was
    sent back by a number that is not finite, it went back to its newest checkpoint.
    """
    final = folder / f"step-{step:08d}"
    if final.exists() and fault_of(final) is None:
        return final
    unfinished = folder / f".unfinished-{step:08d}-{os.getpid()}"
    try:
        unfinished.mkdir(parents=True)
        save_file(dict(weights), unfinished / "model.safetensors")
        save_file(dict(optimiser), unfinished / "optimiser.safetensors")
        (unfinished / "state.json").write_text(json.dumps({"step": step, **state}, indent=1))
        manifest = {name: fingerprint(unfinished / name) for name in FILES}
        (unfinished / "manifest.json").write_text(json.dumps(manifest, indent=1))
        for name in (*FILES, "manifest.json"):
            flush(unfinished / name)
        flush(unfinished)
        if final.exists():  # damaged, or we would not be here
            shutil.rmtree(final)
        unfinished.rename(final)
        flush(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise CheckpointError(
            f"could not write checkpoint {final}: {error}. Earlier checkpoints are untouched; "
            "free some space and run the same command again"
        ) from error
    return final


def load_checkpoint(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """Weights, optimiser state and state of one checkpoint, which must have been verified."""
    state = json.loads((folder / "state.json").read_text())
    return load_file(folder / FILES[0]), load_file(folder / FILES[1]), state


def fault_of(folder: Path) -> str | None:
    """What is wrong with a checkpoint, with the name of the file; None if it is intact."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        entries = {name: (manifest[name]["bytes"], manifest[name]["sha256"]) for name in FILES}
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{folder / 'manifest.json'}: unreadable ({error!r})"
    for name, (size, sha256) in entries.items():
        path = folder / name
        if not path.is_file():
            return f"{path}: missing"
        if path.stat().st_size != size:
            return f"{path}: {path.stat().st_size} bytes where {size} were written"
        if fingerprint(path)["sha256"] != sha256:
            return f"{path}: its contents have changed since it was written"
    return None


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints with a final name, newest first."""
    return sorted(folder.glob("step-*"), reverse=True)


def newest_valid(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint, and what was wrong with the newer ones."""
    faults: list[str] = []
    for path in checkpoints(folder):
        if (fault := fault_of(path)) is None:
            return path, faults
        faults.append(fault)
    return None, faults


def prune(folder: Path, keep: int, best: int | None) -> None:
    """Remove all but the last ``keep`` and the best."""
    spared = {f"step-{best:08d}"} if best is not None else set()
    for path in checkpoints(folder)[keep:]:
        if path.name not in spared:
            shutil.rmtree(path)


def tidy(folder: Path) -> list[str]:
    """Before a run goes on: remove what a crash left unfinished, and rename what is damaged, so
    that it is not counted among the checkpoints to keep. Returns what was wrong."""
    for path in folder.glob(".unfinished-*"):
        shutil.rmtree(path, ignore_errors=True)
    faults = {path: fault for path in checkpoints(folder) if (fault := fault_of(path))}
    for path in faults:
        set_aside(path, "damaged")
    return list(faults.values())


def set_aside(path: Path, why: str) -> Path:
    """Rename a checkpoint that must not be used: step-00000040 -> damaged-step-00000040."""
    aside = path.with_name(f"{why}-{path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    return path.rename(aside)


def gathered(tensor: Tensor) -> Tensor:
    """A sharded tensor whole (all processes must take part); any other as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """A contiguous copy on the CPU."""
    return gathered(tensor).detach().cpu().contiguous().clone()


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(value) for name, value in model.state_dict().items()}


@torch.no_grad()
def load_model_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    own = model.state_dict()
    check_names(own, tensors)
    for name, value in own.items():
        value.copy_(like(value, tensors[name]))


def check_names(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    if own.keys() != tensors.keys():
        differ = sorted(own.keys() ^ tensors.keys())
        raise CheckpointError(f"the checkpoint is of another model: {', '.join(differ)}")


def like(target: Tensor, source: Tensor) -> Tensor:
    """``source`` as ``target`` is: on its device, and sharded if it is."""
    if isinstance(target, DTensor):
        local = source.to(target.device)
        return distribute_tensor(local, target.device_mesh, target.placements)
    return source


def optimiser_tensors(model: nn.Module, optimisers: list[Optimizer]) -> dict[str, Tensor]:
    return {
        f"{number}/{name}/{key}": whole(value)
        for number, optimiser in enumerate(optimisers)
        for name, parameter in named(model, optimiser)
        for key, value in optimiser.state[parameter].items()
    }


def load_optimiser_tensors(
    model: nn.Module, optimisers: list[Optimizer], tensors: Mapping[str, Tensor]
) -> None:
    saved: dict[str, dict[str, Tensor]] = {}
    for path, value in tensors.items():
        owner, _, key = path.rpartition("/")
        saved.setdefault(owner, {})[key] = value
    for number, optimiser in enumerate(optimisers):
        state = {
            index: {
                key: like(parameter, value) if value.shape == parameter.shape else value
                for key, value in saved.get(f"{number}/{name}", {}).items()
            }
            for index, (name, parameter) in enumerate(named(model, optimiser))
        }
        groups = optimiser.state_dict()["param_groups"]
        optimiser.load_state_dict({"state": state, "param_groups": groups})


def named(model: nn.Module, optimiser: Optimizer) -> list[tuple[str, nn.Parameter]]:
    """The parameters of an optimiser in its order, with their names in the model."""
    names = {id(p): name for name, p in model.named_parameters()}
    return [(names[id(p)], p) for group in optimiser.param_groups for p in group["params"]]


def checked_state(state: dict[str, Any], run: Path, dataset: Dataset) -> dict[str, Any]:
    """What a run goes on with, if this is the dataset that it was trained on."""
    if state.get("dataset", dataset.fingerprint) != dataset.fingerprint:
        raise ValueError(
            f"{dataset.folder} is not the dataset that {run} was trained on; give it back, or "
            "start another run"
        )
    best = state["best"]
    # The best one may be gone, if this is not the newest checkpoint there has been.
    if best and not (run / "checkpoints" / f"step-{best['step']:08d}").is_dir():
        best = {}
    return {**state, "best": best}
