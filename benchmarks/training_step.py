"""One training step of NRGPT-FF2W on the CPU: hand-derived forces against autograd inside.

Both compute the same update from the same weights. The second asks ``torch.func.grad`` for the
gradient of the energy in every step of the forward pass, as the paper's appendix on FLOPs
describes, and then differentiates through that. Runs alternate, so that both see the same machine.

    make bench
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from nrgpt import LanguageModel, ModelConfig
from nrgpt.block import EnergyBlock, Folded
from nrgpt.energy.total import read


class AutogradBlock(EnergyBlock):
    """The same step with autograd inside the forward pass."""

    def update(self, x: Tensor, t: int, prepared: list[Folded]) -> Tensor:
        g = self.norm(x)
        keys = [p.term.keys(read(p.readout, g), g) for p in prepared]

        def energy(g: Tensor) -> Tensor:
            terms = zip(prepared, keys, strict=True)
            return torch.stack([p.term.energy(read(p.readout, g), k).sum() for p, k in terms]).sum()

        force = -torch.func.grad(energy)(g)
        eta = self.rate.fold(torch.eye(x.shape[-1]), self.norm)
        return self.rate.apply_step(force @ eta.T, t, x, self.norm)


def training_step(model: LanguageModel, idx: Tensor, targets: Tensor) -> Callable[[], float]:
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)

    def step() -> float:
        start = time.perf_counter()
        optimiser.zero_grad()
        _, loss = model(idx, targets)
        assert loss is not None
        loss.backward()
        optimiser.step()
        return time.perf_counter() - start

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=10)
    args = parser.parse_args()

    torch.manual_seed(0)
    cfg = ModelConfig(
        vocab_size=65,
        context=args.tokens,
        width=args.width,
        heads=args.heads,
        steps=args.steps,
        feedforward="ff2w",
    )
    by_hand = LanguageModel(cfg)
    by_autograd = LanguageModel(cfg)
    by_autograd.load_state_dict(by_hand.state_dict())
    by_autograd.blocks[0].__class__ = AutogradBlock
    text = torch.randint(cfg.vocab_size, (args.batch, args.tokens + 1))
    idx, targets = text[:, :-1], text[:, 1:]
    with torch.no_grad():
        difference = (by_hand(idx)[0] - by_autograd(idx)[0]).abs().max().item()

    steps = {
        "torch.func.grad inside": training_step(by_autograd, idx, targets),
        "hand-derived force": training_step(by_hand, idx, targets),
    }
    for step in steps.values():
        step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(args.repeats):
        for name, step in steps.items():
            times[name].append(step())

    print(
        f"training step, batch {args.batch} x {args.tokens} tokens, width {args.width}, "
        f"{args.heads} heads, {args.steps} steps, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}; largest difference of logits {difference:.1e}"
    )
    slowest = statistics.median(times["torch.func.grad inside"])
    for name, seconds in times.items():
        median = statistics.median(seconds)
        spread = f"{1e3 * min(seconds):.0f} - {1e3 * max(seconds):.0f}"
        print(f"  {name:<24}{1e3 * median:8.1f} ms  ({spread})  {slowest / median:5.2f} x")


if __name__ == "__main__":
    main()
