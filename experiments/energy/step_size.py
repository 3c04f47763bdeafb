"""Why do energies rise over 30 steps with eta = 1? The model of the package with smaller steps.

python -m experiments.energy.step_size > experiments/energy/step_size.txt    (a minute on a CPU)
"""

import torch
from torch import Tensor

from nrgpt import zoo
from nrgpt.decode.generate import evaluating
from nrgpt.dynamics.field import Field
from nrgpt.language_model import LanguageModel
from nrgpt.train.data import prepare_dataset
from nrgpt.train.runs import load_run

SIZES = {1: 30, 0.3: 100, 0.1: 300, 0.03: 1_000}
"""eta, and how many steps of that size go as far as the model was trained to."""
ROUNDING = 1e-6


def rising(model: LanguageModel, idx: Tensor, eta: float, past: Tensor | None) -> Tensor:
    """Which steps of which tokens raise the token's energy: (steps, batch, tokens)."""
    x = model.begin(idx)
    field = Field(model, x, past=past)
    energies = []
    for _ in range(SIZES[eta] + 1):
        field.commit(x)
        look = field.look(x, 0)
        energies.append(look.energy)
        x = x + eta * look.update
    before, after = torch.stack(energies[:-1]), torch.stack(energies[1:])
    return after - before > ROUNDING * torch.maximum(before.abs(), after.abs())


@torch.no_grad()
def main() -> None:
    run = load_run(zoo.folder("listops_30_steps"))
    prepare_dataset(run.cfg.data)
    idx = torch.from_numpy(run.dataset().tokens("val").read(0, 8 * 64)).view(8, 64)
    model = run.model.double()
    print(model.certificate())
    with evaluating(model):
        *_, last = model.states(idx)
        for eta in SIZES:
            for name, past in (("frozen past", last), ("in parallel", None)):
                rises = rising(model, idx, eta, past).double()
                shares = f"{rises.mean():.2%} of steps rise, {rises[0].mean():.1%} of first steps"
                print(f"eta {eta}, {name}: {shares}")


if __name__ == "__main__":
    main()
