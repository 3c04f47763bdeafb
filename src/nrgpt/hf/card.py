"""The model card of an export."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from ..extras import MissingExtra
from ..files import read_sealed
from ..train.runs import Run

TESTED = "transformers 5.22, tokenizers 0.23, peft 0.21, torch 2.13"

CARD = """\
# {title}

{kind} of width {cfg.width} with {cfg.heads} heads and {cfg.steps} {steps}, for texts of up to \
{cfg.context} tokens. This is the checkpoint after {step:,} iterations of training with nrgpt \
{version}.

| | |
|---|---|
{table}

{energies}## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

name = {quoted}  # or the folder that this file is in
tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True)

inputs = tokenizer([{prompt!r}], return_tensors="pt")
new = model.generate(**inputs, max_new_tokens=20{num_steps})
print(tokenizer.decode(new[0]))
{output}```

With nrgpt installed, `import nrgpt` replaces `trust_remote_code=True`. Tested with
{tested}.
{notes}
## Citation

```bibtex
@inproceedings{{nrgpt,
  title = {{{{NRGPT}}: An Energy-based Alternative for {{GPT}}}},
  author = {{Dehmamy, Nima and Hoover, Benjamin and Saha, Bishwajit and Kozachkov, Leo and
            Slotine, Jean-Jacques and Krotov, Dmitry}},
  booktitle = {{International Conference on Learning Representations (ICLR)}},
  year = {{2026}},
}}
```
"""
ENERGIES = """\
## Does the energy go down?

```
{certificate}
```

{figure}"""
KINDS = {
    "nrgpt": "An NRGPT (its forward pass moves each token along the gradient of an energy)",
    "gpt": "A GPT (baseline of the NRGPTs)",
    "rgpt": "A recurrent GPT (baseline of the NRGPTs)",
    "rgpt_parallel": "A recurrent GPT with parallel blocks (baseline of the NRGPTs)",
}
TASKS = {
    "listops": "ListOps: nested functions of small numbers, and their values",
    "shakespeare": "the characters of Shakespeare's works",
    "text": "text, as GPT-2 tokens",
}
PROMPTS = {"listops": "{function}(1,2) =", "shakespeare": "ROMEO:", "text": "Once upon a time"}


def write_card(run: Run, folder: Path, name: str) -> None:
    """Write README.md and, if matplotlib is installed, the figure of energies that it shows."""
    from .. import __version__

    cfg, data = run.cfg.model, run.cfg.data
    notes, energies, num_steps, output = [], "", "", ""
    if cfg.block == "nrgpt":
        figure = draw_energies(run, folder / "energies.png")
        energies = ENERGIES.format(certificate=run.model.certificate(), figure=figure)
        output = "print(model(**inputs, output_energies=True).energies)\n"
    if cfg.block != "gpt":
        num_steps = f", num_steps={cfg.steps}"
        notes.append("`num_steps` may differ from the number used in training.")
    if data.task == "listops":
        notes.append("Expressions may be written in the usual notation; commas are not tokens.")
    text = CARD.format(
        quoted=json.dumps(name),
        title=re.sub(r"([^\w .,=/-])", r"\\\1", " ".join(name.split())),
        kind=KINDS[cfg.block],
        cfg=cfg,
        steps="layers" if cfg.block == "gpt" else "inference steps",
        version=__version__,
        step=run.step,
        table="\n".join(f"| {key} | {value} |" for key, value in facts(run).items()),
        energies=energies,
        prompt=PROMPTS[data.task].format(function=data.listops.functions[0]),
        num_steps=num_steps,
        output=output,
        tested=TESTED,
        notes=f"\n{' '.join(notes)}\n" if notes else "",
    )
    about = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["nrgpt", "energy-based-model"],
        model_name=name,
        eval_results=eval_results(run),
    )
    ModelCard(f"---\n{about}\n---\n\n{text}").save(folder / "README.md")


def eval_results(run: Run) -> list[EvalResult] | None:
    """The result of a finished run, as the Hub shows it."""
    result = result_of(run)
    found = [("loss", result.get("val_loss_full"))]
    if "listops" in result:
        found.append(("accuracy", result["listops"]["accuracy"]))
    dataset: dict[str, Any] = {"dataset_type": run.cfg.data.task, "dataset_name": run.cfg.data.task}
    return [
        EvalResult("text-generation", **dataset, metric_type=name, metric_value=value)
        for name, value in found
        if value is not None
    ] or None


def result_of(run: Run) -> dict[str, Any]:
    """Empty if the run has not finished."""
    path = run.folder / "result.json"
    return dict(read_sealed(path)) if path.is_file() else {}


def facts(run: Run) -> dict[str, str]:
    cfg, listops, counts = run.cfg, run.cfg.data.listops, run.model.parameter_counts()
    found = {
        "task and data": TASKS[cfg.data.task],
        "training": f"{cfg.iterations:,} iterations of {cfg.batch} texts, seed {cfg.seed}, "
        f"{cfg.optimiser.name}",
        "parameters, tied": f"{counts.tied:,}",
        "parameters, untied": f"{counts.untied:,}",
        "the head": "tied to the embedding" if cfg.model.tied else "not tied",
    }
    if cfg.data.task == "listops":
        numbers = f"of 0 to {listops.numbers - 1}, depth {listops.depth}"
        found["task and data"] += f" ({', '.join(listops.functions)} {numbers})"
    result = result_of(run)
    if "val_loss_full" in result:
        found["validation loss"] = (
            f"{result['val_loss_full']:.4f} nats per token, over "
            f"{result['val_loss_full_tokens']:,} tokens (after iteration {result['step']:,}, the "
            "end of the run)"
        )
    if "listops" in result:
        score = result["listops"]
        tests = "tests that combine numbers never combined in training"
        found["ListOps accuracy"] = (
            f"{100 * score['accuracy']:.2f} % of {score['total']:,} "
            f"{tests if listops.held_out else 'new expressions'} (after iteration "
            f"{result['step']:,}, the end of the run)"
        )
    return found


def draw_energies(run: Run, path: Path) -> str:
    """Draw the figure and return the lines of the card that show it. Empty if matplotlib is not
    installed, or if the run's dataset is missing and cannot be made again."""
    from ..dynamics.figures import energy_figure, save
    from ..dynamics.trajectory import trajectory

    length = min(64, run.cfg.model.context)
    try:
        tokens = run.first_tokens("val", length).read(0, length).tolist()
    except OSError:
        return ""
    idx = torch.tensor([tokens], device=run.model.tokens.device)
    seen = trajectory(run.model, idx, steps=2 * run.cfg.model.steps)
    try:
        save(energy_figure(seen), path, ("png",))
    except MissingExtra:
        return ""
    return (
        f"![Energies over the steps]({path.name})\n\nEnergies of {len(tokens)} validation tokens "
        "over twice as many steps as in training (dotted line).\n\n"
    )
