"""A model as an ONNX file, for batches of any size, and texts of 3 tokens up to the context."""

import copy
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn

from ..extras import need
from ..language_model import LanguageModel
from ..model.network import Network

LEAST = 3
"""Tokens of a text. A shorter one is padded on the right, where the model does not look."""
ATOL = 1e-3
"""Largest difference between the file's logits and the model's, in float32."""


class Logits(nn.Module):
    """What the file computes: tokens (batch, tokens) to logits (batch, tokens, vocabulary)."""

    def __init__(self, model: Network, steps: int | None):
        super().__init__()
        self.model, self.steps = model, steps

    def forward(self, input_ids: Tensor) -> Tensor:
        logits, _ = self.model(input_ids, steps=self.steps, dropout=False)
        return logits


def export_onnx(model: LanguageModel, path: Path, *, steps: int | None = None) -> float:
    """Write the model, with its number of steps or another. Returns the largest difference of its
    logits from the model's, by onnxruntime, on texts of other sizes than it was traced with."""
    for package in ("onnx", "onnxscript", "onnxruntime"):
        need(package, "an ONNX file", "onnx")
    if path.suffix != ".onnx":
        raise ValueError(f"{path}: the name of an ONNX file must end with .onnx")
    if path.exists():
        raise FileExistsError(f"{path} exists already; delete it first, or choose another name")
    path.parent.mkdir(parents=True, exist_ok=True)
    logits = Logits(copy.deepcopy(model).cpu().float().eval(), steps)
    context = model.cfg.context
    if context <= LEAST:
        raise ValueError(f"context = {context}: must be more than {LEAST} for an ONNX file")
    shapes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("tokens", min=LEAST, max=context)}
    example = torch.zeros(2, min(8, context - 1), dtype=torch.int64)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            logits, (example,), path, dynamo=True, dynamic_shapes=(shapes,), verbose=False,
            input_names=["input_ids"], output_names=["logits"], external_data=False,
        )  # fmt: skip
    found = largest_difference(path, logits, context)
    if not found < ATOL:
        path.unlink()
        raise ValueError(f"{path}: its logits differ from the model's by {found:g}; not written")
    return found


@torch.no_grad()
def largest_difference(path: Path, logits: Logits, context: int) -> float:
    session = need("onnxruntime", "an ONNX file", "onnx").InferenceSession(str(path))
    largest = 0.0
    for rows, tokens in ((1, context), (3, max(LEAST, context // 2)), (1, LEAST)):
        idx = torch.randint(logits.model.cfg.vocab_size, (rows, tokens))
        (found,) = session.run(None, {"input_ids": idx.numpy()})
        largest = max(largest, (torch.from_numpy(found) - logits(idx)).abs().max().item())
    return largest
