"""One training step of NRGPT-FF2W on the CPU: hand-derived forces against autograd inside.

All rows compute the same update from the same weights:

- textbook: the energy written with einsum as in the paper, torch.func.grad inside the forward pass;
- autograd: the package's own energies, torch.func.grad instead of the hand-derived force;
- by hand:  the package as it is.

Runs alternate, so that all see the same machine. The floor is what the matrix products alone must
take: their FLOPs by PyTorch's counter over the rate of a large product measured in the same run.

    make bench
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from nrgpt import LanguageModel, ModelConfig
from nrgpt.block import EnergyBlock, Folded
from nrgpt.cache import Cache
from nrgpt.energy import AttentionEnergy, EnergyTerm
from nrgpt.energy.feedforward import FF2W
from nrgpt.rate import Free


class TextbookBlock(EnergyBlock):
    """x <- x - eta dE/dg with E as the paper writes it."""

    def update(
        self, x: Tensor, t: int, prepared: list[Folded], cache: Cache | None = None
    ) -> Tensor:
        attention, feedforward = self.energy.terms["attention"], self.energy.terms["feedforward"]
        assert isinstance(attention, AttentionEnergy)
        assert isinstance(feedforward, FF2W)
        assert isinstance(self.rate, Free)
        assert attention.alpha is not None
        alpha, beta, heads = attention.alpha, attention.beta, attention.heads
        W_Q = attention.W_Q.unflatten(0, (heads, -1))
        W_K = attention.W_K.unflatten(0, (heads, -1))
        unseen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu()

        def energy(g: Tensor, past: Tensor) -> Tensor:
            q = torch.einsum("bad,hyd->bhay", g, W_Q)
            k = torch.einsum("bnd,hyd->bhny", past, W_K)
            scores = beta * torch.einsum("bhay,bhny->bhan", q, k)
            log_sum = scores.masked_fill(unseen, -1e9).logsumexp(-1)[:, :, 1:]
            hidden = F.gelu(g @ feedforward.W_1.T)
            E_AT = -(alpha[:, None] * log_sum).sum() / beta
            return E_AT - (g * (hidden @ feedforward.W_2.T)).sum()

        g = self.norm(x)
        return -torch.func.grad(energy)(g, g) @ self.rate.eta.T


class AutogradAttention(AttentionEnergy):
    def force(self, z: Tensor, keys: Tensor | None) -> Tensor:
        return torch.func.grad(lambda z: -self.energy(z, keys).sum())(z)[..., : self.queries]


class AutogradFF2W(FF2W):
    force = EnergyTerm.force


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


def matrix_product_rate(size: int = 2048, repeats: int = 5) -> float:
    """FLOP/s of a square fp32 product."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        a @ b
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
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
    models = {name: LanguageModel(cfg) for name in ("textbook", "autograd", "by hand")}
    for model in models.values():
        model.load_state_dict(models["by hand"].state_dict())
    models["textbook"].blocks[0].__class__ = TextbookBlock
    terms = models["autograd"].energy_block.energy.terms
    terms["attention"].__class__ = AutogradAttention
    terms["feedforward"].__class__ = AutogradFF2W

    text = torch.randint(cfg.vocab_size, (args.batch, args.tokens + 1))
    idx, targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    with torch.no_grad():
        logits = {name: model(idx)[0] for name, model in models.items()}
    difference = max((out - logits["by hand"]).abs().max().item() for out in logits.values())
    steps = {name: training_step(model, idx, targets) for name, model in models.items()}
    for step in steps.values():
        step()
    with FlopCounterMode(display=False) as counter:
        steps["by hand"]()
    times: dict[str, list[float]] = {name: [] for name in steps}
    rates = []
    for _ in range(args.repeats):
        rates.append(matrix_product_rate())
        for name, step in steps.items():
            times[name].append(step())

    print(
        f"training step, batch {args.batch} x {args.tokens} tokens, width {args.width}, "
        f"{args.heads} heads, {args.steps} steps; torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads; logits differ by at most {difference:.0e}"
    )
    slowest = statistics.median(times["textbook"])
    for name, seconds in times.items():
        median = statistics.median(seconds)
        spread = f"{1e3 * min(seconds):.0f} - {1e3 * max(seconds):.0f}"
        print(f"  {name:<10}{1e3 * median:8.1f} ms  ({spread})  {slowest / median:5.2f} x")
    rate = statistics.median(rates)
    floor = counter.get_total_flops() / rate
    print(
        f"  {'floor':<10}{1e3 * floor:8.1f} ms  ({counter.get_total_flops() / 1e9:.1f} GFLOP at "
        f"{rate / 1e9:.0f} GFLOP/s)  {slowest / floor:5.2f} x"
    )


if __name__ == "__main__":
    main()
