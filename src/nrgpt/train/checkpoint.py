"""Checkpoints: safetensors and JSON in a folder, verified by checksum, written atomically.

    RUN/checkpoints/step-00001000/
      model.safetensors      weights, by the model's own names; enough to load the model
      optimiser.safetensors  <number of the optimiser>/<parameter>/<state>
      state.json             step (the iteration), losses, learning-rate factor, ...
      manifest.json          sha256 and size of the three

A checkpoint is written under another name, flushed to the disk, and then renamed, so that one with
a final name is complete. A valid checkpoint is never overwritten, nor removed before there is a
newer one.
"""

import json
import os
import re
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from ..files import fingerprint, flush, make_folder, open_ours, read_json

FILES = ("model.safetensors", "optimiser.safetensors", "state.json")
SHARDS = "shards"
SHARD = re.compile(rf"{SHARDS}/[\w.-]+\.safetensors")
"""Where torch.distributed.checkpoint has written, see sharded.py."""
ASIDE = ("not-finite", "damaged")
"""What the names of checkpoints begin with that must not be used."""


class CheckpointError(ValueError):
    """A checkpoint is damaged, or could not be written."""


def save_checkpoint(
    folder: Path,
    step: int,
    weights: Mapping[str, Tensor],
    optimiser: Mapping[str, Tensor],
    state: Mapping[str, Any],
) -> Path:
    """Write RUN/checkpoints/step-N. If that fails, nothing of it remains.

    A valid checkpoint of this step is left as it is: a run is deterministic, and one that had to go
    back went back to its newest checkpoint.
    """
    final = folder / f"step-{step:08d}"
    if final.exists() and fault_of(final) is None:
        return final
    unfinished = folder / f".unfinished-{step:08d}-{os.getpid()}"
    try:
        make_folder(folder)
        unfinished.mkdir()
        save_file(dict(weights), unfinished / "model.safetensors")
        save_file(dict(optimiser), unfinished / "optimiser.safetensors")
        seal(unfinished, final, {"step": step, **state})
    except (OSError, SafetensorError) as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise CheckpointError(
            f"could not write checkpoint {final}: {error}. Earlier checkpoints are untouched; "
            "free some space and run the same command again"
        ) from error
    return final


def seal(unfinished: Path, final: Path, state: Mapping[str, Any]) -> None:
    """Finish a checkpoint whose tensors are there, and give it its name."""
    write_json(unfinished / "state.json", state)
    files = sorted(path for path in unfinished.rglob("*") if path.is_file())
    manifest = {path.relative_to(unfinished).as_posix(): fingerprint(path) for path in files}
    write_json(unfinished / "manifest.json", manifest)
    for path in (*files, unfinished / "manifest.json", *{path.parent for path in files}):
        flush(path)
    flush(unfinished)
    if final.exists():  # and is damaged, as its writer has found
        shutil.rmtree(final)
    unfinished.rename(final)
    flush(final.parent)


def write_json(path: Path, value: Any) -> None:
    with open_ours(path, "x") as file:
        file.write(json.dumps(value, indent=1))


def load_checkpoint(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """Weights, optimiser state and state of a checkpoint that is known to be intact."""
    state = read_state(folder)
    return read_tensors(folder / FILES[0]), read_tensors(folder / FILES[1]), state


STATE: dict[str, Any] = {
    "step": int, "best": dict, "rate_factor": float, "rollbacks": int, "metrics": dict,
    "dataset": str,
}  # fmt: skip
BEST: dict[str, Any] = {"step": int, "val_loss": float}


def read_state(folder: Path) -> dict[str, Any]:
    """What a checkpoint holds besides tensors. Of its fields only these are known to be there:
    step and best."""
    path = folder / "state.json"
    state = read_json(path)
    try:
        best, _ = state["best"], state["step"]
        for fields, kinds in ((state, STATE), (best, BEST)):
            for name in kinds.keys() & fields.keys():
                if type(fields[name]) is not kinds[name]:
                    raise TypeError(f"{name} is {fields[name]!r}")
        if not all(0 <= each.get("step", 0) < 10**12 for each in (state, best)):
            raise ValueError("there is no such iteration")
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f"{path}: not the state of a training ({error!r})") from error
    return dict(state)


def read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except SafetensorError as error:
        raise CheckpointError(f"{path}: not a file of tensors ({error})") from error
    except RuntimeError as error:  # what torch calls a file that is gone, when it maps it
        raise CheckpointError(f"{path}: cannot be read ({error})") from error


def fault_of(folder: Path) -> str | None:
    """What is wrong with a checkpoint, with the name of the file; None if it is intact."""
    try:
        manifest = read_json(folder / "manifest.json")
        shards = [name for name in manifest if SHARD.fullmatch(name)]
        if strange := {f"{SHARDS}/{p.name}" for p in (folder / SHARDS).glob("*")} - set(shards):
            return f"{folder / min(strange)}: not in the manifest, so nothing vouches for it"
        names = [*shards, "state.json"] if shards else FILES
        entries = {name: (manifest[name]["bytes"], manifest[name]["sha256"]) for name in names}
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{folder / 'manifest.json'}: unreadable ({error!r})"
    for name, (size, sha256) in entries.items():
        path = folder / name
        try:
            if (found := path.stat().st_size) != size:
                return f"{path}: {found} bytes where {size} were written"
            if fingerprint(path)["sha256"] != sha256:
                return f"{path}: its contents have changed since it was written"
        except FileNotFoundError:
            return f"{path}: missing"
        except OSError as error:
            return f"{path}: unreadable ({error!r})"
    return None


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints, newest first."""
    names = re.compile(r"step-[0-9]{8,}")
    found = [path for path in folder.glob("step-*") if names.fullmatch(path.name)]
    found = [path for path in found if path.is_dir() and not path.is_symlink()]
    return sorted(found, key=number_of, reverse=True)


def number_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def newest_valid(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest intact checkpoint, and what is wrong with newer ones."""
    faults: list[str] = []
    for path in checkpoints(folder):
        if (fault := fault_of(path)) is None:
            return path, faults
        if path.exists():  # a training may have removed it meanwhile
            faults.append(fault)
    return None, faults


def prune(folder: Path, keep: int, needed: Collection[int | None]) -> None:
    """Remove all checkpoints but the last ``keep`` and those that are needed."""
    for path in checkpoints(folder)[keep:]:
        if number_of(path) not in needed:
            shutil.rmtree(path)


def tidy(folder: Path) -> list[str]:
    """Before a run is resumed: remove what a crash left unfinished, and rename damaged checkpoints,
    which must not count among those to keep. Returns what was wrong with them."""
    for path in folder.glob(".unfinished-*"):
        shutil.rmtree(path, ignore_errors=True)
    faults = {path: fault for path in checkpoints(folder) if (fault := fault_of(path))}
    for path in faults:
        set_aside(path, "damaged")
    return list(faults.values())


def aside(folder: Path) -> list[Path]:
    """What was set aside: checkpoints that are damaged or led to numbers that were not finite."""
    return sorted(path for why in ASIDE for path in folder.glob(f"{why}-step-*"))


def set_aside(path: Path, why: str) -> Path:
    """Rename a checkpoint that must not be used: step-00000040 -> damaged-step-00000040."""
    renamed = path.with_name(f"{why}-{path.name}")
    shutil.rmtree(renamed, ignore_errors=True)
    return path.rename(renamed)


def gathered(tensor: Tensor) -> Tensor:
    """A sharded tensor as a whole (all processes must take part); any other as it is."""
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
    """``source``, sharded like ``target`` if that is sharded."""
    if not isinstance(target, DTensor):
        return source
    return distribute_tensor(source.to(target.device), target.device_mesh, target.placements)


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
    """The parameters of an optimiser, in its order, with their names in the model."""
    names = {id(p): name for name, p in model.named_parameters()}
    return [(names[id(p)], p) for group in optimiser.param_groups for p in group["params"]]
