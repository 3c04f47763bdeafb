"""What a frozen cache does to a model trained with all tokens moving: python frozen.py RUN."""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F

from nrgpt.decode.cache import Cache
from nrgpt.train.runs import load_run

loaded = load_run(Path(sys.argv[1]))
model, stream = loaded.model, loaded.dataset().tokens("val")
text = torch.stack([torch.from_numpy(stream.read(i * 65, 65)) for i in range(200)])
idx, targets = text[:, :-1], text[:, 1:]
with torch.no_grad():
    exact, _ = model(idx)
    second_half = F.cross_entropy(exact[:, 32:].mT, targets[:, 32:])
    print(f"exact: loss {F.cross_entropy(exact.mT, targets):.4f}, second half {second_half:.4f}")
    for together in (1, 32):
        cache, plans, states = Cache(64, frozen=True), model.plan(), []
        for part in idx.split([together] + [1] * (64 - together), 1):
            positions = cache.begin(len(part), part.shape[1], part.device)
            states.append(model.extend(part, positions, plans, cache))
            plans[0].keep(states[-1], 0, cache)
            cache.end(part.shape[1])
        logits = model.readout(torch.cat(states, 1))
        loss = F.cross_entropy(logits.mT, targets)
        second_half = F.cross_entropy(logits[:, 32:].mT, targets[:, 32:])
        same = (logits.argmax(-1) == exact.argmax(-1)).double().mean()
        print(
            f"frozen after {together} together: loss {loss:.4f}, second half {second_half:.4f}, "
            f"the same likeliest token in {100 * same:.1f} %"
        )
