"""Kernels of a training step at width 768, low and full rank: python profile_step.py [FOLDER]"""

import sys
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from nrgpt import LanguageModel, ModelConfig
from nrgpt.bench.suites import Step, check_that_gradients_arrive, describe

TO = Path(sys.argv[1] if len(sys.argv) > 1 else ".")


def milliseconds(step: Step, times: int = 5) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(times):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / times * 1e3


def kernels(step: Step, times: int = 2) -> list[tuple[float, int, str]]:
    """(ms of a step, calls of a step, name), the longest first."""
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiled:
        for _ in range(times):
            step()
        torch.cuda.synchronize()
    found = [
        (event.self_device_time_total / times / 1e3, event.count // times, event.key)
        for event in profiled.key_averages()
        if event.self_device_time_total and str(event.device_type).endswith("CUDA")
    ]
    return sorted(found, reverse=True)


for name, coupling, batch in (("low-rank", "low_rank", 32), ("full-rank", "full", 16)):
    torch.manual_seed(0)
    torch._dynamo.reset()
    cfg = ModelConfig(
        vocab_size=50_304, context=1_024, width=768, heads=12, steps=12, coupling=coupling
    )
    step = Step(LanguageModel(cfg), batch, torch.device("cuda"), compile=True)
    check_that_gradients_arrive(step)
    took = sorted(milliseconds(step) for _ in range(5))
    rows = kernels(step)
    said = f"{name}, {describe(cfg, batch)}, bf16, AdamW; ms of a step, five times five: "
    said += " ".join(f"{ms:.1f}" for ms in took)
    said += f"; tokens/s {batch * cfg.context / took[2] * 1e3:,.0f}\n"
    said += f"ms of a step by kernel (sum {sum(row[0] for row in rows):.1f}), calls, kernel\n"
    said += "".join(f"{ms:8.3f} {calls:5d}  {key[:140]}\n" for ms, calls, key in rows[:45])
    (TO / f"profile-{name}.txt").write_text(said)
    print(said)
