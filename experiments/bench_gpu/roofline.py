"""What a training step must cost on a GPU, and what it was measured to cost.

    python experiments/bench_gpu/roofline.py

FLOPs are PyTorch's count on a model of shapes alone, and the formula of nrgpt.model.flops
(attention
counted without the mask, and with). Bytes are those of this formulation, in which every tensor
between two products is written once and read once in each pass: x and its gradient in float32, all
else in bfloat16. In small models the hidden layer is not written in the forward pass, and in the
backward pass only its force and its gradient are. Times measured: the logs beside this file.
"""

from dataclasses import dataclass, replace

from nrgpt import ModelConfig
from nrgpt.model.flops import block_of_shapes, flops_per_token
from nrgpt.train.speed import counted_flops_per_token

PRODUCT, COPY = 782e12, 4.3e12
"""Measured: FLOP/s of a large product (758 to 793 in these runs), bytes/s of a large copy."""


@dataclass(frozen=True)
class Case:
    name: str
    cfg: ModelConfig
    batch: int
    milliseconds: float
    small: bool = False


LARGE = ModelConfig(vocab_size=50_304)
CASES = [
    Case("width 768, low rank", LARGE, 32, 73.30),
    Case("width 768, full rank", replace(LARGE, coupling="full"), 16, 90.57),
    Case(
        "Shakespeare",
        ModelConfig(vocab_size=65, context=256, width=128, heads=4, steps=8),
        64,
        1.97,
        small=True,
    ),
    Case(
        "ListOps",
        ModelConfig(vocab_size=17, context=128, width=64, heads=4, steps=5),
        64,
        0.64,
        small=True,
    ),
]


def bytes_per_token(cfg: ModelConfig, small: bool) -> float:
    """Forward: x, g, z, forces and the update. Backward: z and forces again, and the gradients of
    all of these, each written and read. The head: logits and their gradient."""
    readouts = {name: term.readout() for name, term in block_of_shapes(cfg).named_terms()}
    read = {name: len(readout.read) for name, readout in readouts.items()}
    written = {
        name: read[name] if readout.write is None else len(readout.write)
        for name, readout in readouts.items()
    }
    z, force, D = sum(read.values()), sum(written.values()), cfg.width
    kept = 0
    if small:
        kept = read["feedforward"] + written["feedforward"]
        z, force = read["attention"], written["attention"]
    forward = 2 * 4 * D + 2 * 2 * D + 2 * 2 * z + 2 * 2 * force + 2 * 2 * D
    backward = 2 * (z + force) + 2 * 2 * (z + force) + 2 * 4 * D + 2 * 2 * D + 4 * D + 2 * 2 * kept
    return cfg.steps * (forward + backward) + 4 * 2 * cfg.vocab_size


def main() -> None:
    print("| | MFLOP a token: counter | formula | causal | KB a token | floor by FLOPs | by bytes |"
          " measured | of the larger floor |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|")
    for case in CASES:
        cfg, tokens = case.cfg, case.batch * case.cfg.context
        causal = flops_per_token(cfg, batch=case.batch, causal=True)
        size = bytes_per_token(cfg, case.small)
        by_flops, by_bytes = 1e3 * tokens * causal / PRODUCT, 1e3 * tokens * size / COPY
        counted = counted_flops_per_token(cfg, case.batch)
        by_formula = flops_per_token(cfg, batch=case.batch)
        print(
            f"| {case.name}, batch {case.batch} | {counted / 1e6:.4g} "
            f"| {by_formula / 1e6:.4g} | {causal / 1e6:.4g} | {size / 1e3:.3g} "
            f"| {by_flops:.3g} ms | {by_bytes:.3g} ms | {case.milliseconds:.3g} ms "
            f"| {100 * max(by_flops, by_bytes) / case.milliseconds:.0f} % |"
        )


if __name__ == "__main__":
    main()
