"""The page's engine and nrgpt.dynamics, side by side."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import nrgpt
from nrgpt.explore.weights import describe

STATIC = Path(nrgpt.__file__).parent / "explore" / "static"
WATCH = """({ spec, texts, settings, attract }) => {
  const model = new Model(spec);
  if (attract) settings.attract = new Attract(Float64Array.from(attract[0]), attract[1]);
  return texts.map(tokens => {
    const roll = new Roll(model, settings).read(tokens).finish();
    const looks = roll.rolled.map(one => one.looks);
    const names = ["energy", "push", "force", "size", "move", "entropy", "said", "chances"];
    const tables = names.map(name => [name, looks.map(own => own.map(look => look[name]))]);
    return {
      ...Object.fromEntries(tables),
      energies: looks.map(own => own.map(look => [...look.energies])),
      logits: roll.rolled.map(one => one.x.map(x => [...model.logits(x)])),
    };
  });
}"""


class Engine:
    """The engine in a blank page."""

    def __init__(self, context: Any):
        self.page = context.new_page()
        self.errors: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        for name in ("arrays.js", "engine.js", "landscape.js", "draw.js", "sources.js"):
            self.page.add_script_tag(content=(STATIC / name).read_text())

    def run(self, function: str, **arguments: Any) -> Any:
        found = self.page.evaluate(function, arguments)
        assert not self.errors
        return found

    def watch(self, model: Any, texts: Any, attract: Any = None, **settings: Any) -> list[Any]:
        """What it sees, one entry a text: tables by token and state."""
        told = {"spec": describe(model), "attract": attract, "settings": settings}
        return list(self.run(WATCH, texts=texts, **told))


def states_first(values: Any) -> Tensor:
    """(tokens, states, ...) -> (states, tokens, ...)"""
    return torch.tensor(values, dtype=torch.float64).transpose(0, 1)


@torch.no_grad()
def differences(
    there: dict[str, Any], model: Any, tokens: list[int], **options: Any
) -> dict[str, float]:
    """What the engine saw of a text against what Python sees, in float64: the largest difference
    of each kind, relative to the largest value. The tokens that both would say must be the same."""
    idx, has_energy = torch.tensor([tokens]), model.cfg.block == "nrgpt"
    here = nrgpt.trajectory(model, idx, top=5, energies=has_energy, **options)
    states = torch.cat(list(model.states(idx, **options)))
    assert here.entropy is not None
    assert here.top_probabilities is not None
    pairs = {
        "size": (there["size"], here.size[:, 0]),
        "entropy": (there["entropy"], here.entropy[:, 0]),
        "chances": (there["chances"], here.top_probabilities[:, 0]),
        "move": ([states[1:] for states in there["move"]], here.move[:, 0]),
        "logits": (there["logits"], model.readout(states)),
    }
    if has_energy:
        terms = [energy[:, 0] for name, energy in here.energies.items() if name != "total"]
        pairs["energies"] = (there["energies"], torch.stack(terms, -1))
        assert here.force is not None
        pairs["force"] = (there["force"], here.force[:, 0])
    said = states_first(there["said"])[..., 0]
    assert torch.equal(said, here.argmax[:, 0].double())
    return {
        name: float((states_first(a) - b).abs().max() / b.abs().max().clamp(min=1e-9))
        for name, (a, b) in pairs.items()
    }


def agree(engine: Engine, model: Any, texts: list[list[int]], attract: Any = None, **options: Any):
    """Whether both see the same, to 1e-5."""
    extra = None if attract is None else {"attract": toward(*attract)}
    seen = engine.watch(model, texts, attract, **options)
    exact = model.double()
    for tokens, there in zip(texts, seen, strict=True):
        found = differences(there, exact, tokens, extra=extra, **options)
        assert max(found.values()) < 1e-5, found


def toward(direction: list[float], weight: float) -> Any:
    from nrgpt.dynamics.regularise import Toward

    return Toward(torch.tensor(direction, dtype=torch.float64), weight)
