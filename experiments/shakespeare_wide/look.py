"""What the logs do not say: whole-split losses of kept checkpoints, alpha and the certificate.

python look.py certified-w256 [STEP] ff2w-w256 ...   (run folders with their checkpoints)
"""

import sys

import torch

from nrgpt.measure.loss import split_loss
from nrgpt.train.runs import load_run


def main(words: list[str]) -> None:
    while words:
        folder = words.pop(0)
        step = int(words.pop(0)) if words and words[0].isdigit() else None
        run = load_run(folder, step)
        tokens = run.dataset().tokens("val")
        loss = split_loss(run.model, tokens).loss
        print(f"{run.folder.name}, step {run.step}: {loss:.4f} nats on the whole validation split")
        alpha = run.model.get_parameter("blocks.0.energy.terms.attention.alpha")
        print(f"alpha {[round(value, 3) for value in alpha.tolist()]}")
        text = torch.from_numpy(tokens.read(0, 8 * 256)).view(8, 256)
        print(run.model.double().certificate(idx=text), end="\n\n", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
