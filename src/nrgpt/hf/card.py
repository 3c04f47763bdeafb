"""The model card of an export, made from the run."""

import json
from pathlib import Path
from typing import Any

import torch

from ..model.config import ModelConfig
from ..train.runs import Run

FIGURE = "energies.png"
TESTED = "transformers 5.22, tokenizers 0.23, peft 0.21, torch 2.13"

CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
tags:
- nrgpt
- energy-based-model
---

# {name}

{kind} of width {cfg.width} with {cfg.heads} heads and {cfg.steps} {steps}, for texts of up to \
{cfg.context} tokens. This is the checkpoint at step {step:,} of its training with nrgpt {version}.

| | |
|---|---|
{table}

{energies}## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

name = "{name}"  # or the folder that this file is in
tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True)

inputs = tokenizer([{prompt!r}], return_tensors="pt")
new = model.generate(**inputs, max_new_tokens=20{num_steps})
print(tokenizer.decode(new[0]))
{output}```

With nrgpt installed, `import nrgpt` instead of `trust_remote_code=True` will do. Tested with
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
    """README.md and, where matplotlib is installed, the figure of energies that it shows."""
    from .. import __version__

    cfg = run.cfg.model
    is_energy = cfg.block == "nrgpt"
    figure = draw_energies(run, folder / FIGURE) if is_energy else ""
    functions = run.cfg.data.listops.functions
    text = CARD.format(
        name=name,
        kind=KINDS[cfg.block],
        cfg=cfg,
        steps="layers" if cfg.block == "gpt" else "inference steps",
        version=__version__,
        step=run.step,
        table="\n".join(f"| {key} | {value} |" for key, value in facts(run).items()),
        energies=ENERGIES.format(certificate=run.model.certificate(), figure=figure)
        if is_energy
        else "",
        prompt=PROMPTS[run.cfg.data.task].format(function=functions[0]),
        num_steps="" if cfg.block == "gpt" else f", num_steps={cfg.steps}",
        output="print(model(**inputs, output_energies=True).energies)\n" if is_energy else "",
        tested=TESTED,
        notes=notes(cfg, run.cfg.data.task),
    )
    (folder / "README.md").write_text(text, encoding="utf-8")


def notes(cfg: ModelConfig, task: str) -> str:
    said = []
    if cfg.block != "gpt":
        said.append("`num_steps` may differ from the trained number.")
    if task == "listops":
        said.append("Expressions may be written as people do; commas are not tokens.")
    return f"\n{' '.join(said)}\n" if said else ""


def facts(run: Run) -> dict[str, str]:
    counts = run.model.parameter_counts()
    result = read_result(run.folder)
    found = {
        "task and data": describe_data(run),
        "training": f"{run.cfg.iterations:,} iterations of {run.cfg.batch} texts, seed "
        f"{run.cfg.seed}, {run.cfg.optimiser.name}",
        "parameters, tied": f"{counts.tied:,}",
        "parameters, untied": f"{counts.untied:,}",
        "the head": "tied to the embedding" if run.cfg.model.tied else "not tied",
    }
    if "val_loss_full" in result:
        found["validation loss"] = (
            f"{result['val_loss_full']:.4f} nats per token, over "
            f"{result['val_loss_full_tokens']:,} tokens (at the end of the run, step "
            f"{result['step']:,})"
        )
    if "listops" in result:
        accuracy = result["listops"]
        found["ListOps accuracy"] = (
            f"{100 * accuracy['accuracy']:.2f} % of {accuracy['total']:,} tests that reduce "
            "numbers never met together in training"
            if run.cfg.data.listops.held_out
            else f"{100 * accuracy['accuracy']:.2f} % of {accuracy['total']:,} new expressions"
        ) + f" (at the end of the run, step {result['step']:,})"
    return found


def describe_data(run: Run) -> str:
    data = run.cfg.data
    said = TASKS[data.task]
    if data.task == "listops":
        ops = data.listops
        said += f" ({', '.join(ops.functions)} of 0 to {ops.numbers - 1}, depth {ops.depth})"
    return said


def read_result(folder: Path) -> dict[str, Any]:
    """What the run measured at its end; nothing, if it has not come to it."""
    path = folder / "result.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def draw_energies(run: Run, path: Path) -> str:
    """The figure, and the line of the card that shows it; no figure without matplotlib, or where
    the run's dataset is not and cannot be made."""
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        return ""
    from ..dynamics.figures import energy_figure, save
    from ..dynamics.trajectory import trajectory

    length = min(64, run.cfg.model.context)
    try:
        tokens = run.dataset().tokens("val").read(0, length).tolist()
    except OSError:
        return ""
    idx = torch.tensor([tokens], device=run.model.tokens.device)
    seen = trajectory(run.model, idx, steps=2 * run.cfg.model.steps)
    save(energy_figure(seen), path, ("png",))
    return (
        f"![Energies over the steps]({path.name})\n\nEnergies of {len(tokens)} validation tokens "
        "over twice as many steps as trained (dotted line).\n\n"
    )
