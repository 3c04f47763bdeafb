"""Cases of `nrgpt reproduce`, small enough for tests, and why some tests are left out."""

NEEDS_GPU = "needs a GPU: there, `bash dev/gpu_check.sh tests OUT` runs all of these"

TINY = (
    "iterations=4", "optimiser.warmup=1", "batch=4", "log_every=2", "eval_every=4", "save_every=4",
    "eval_batches=1",
)  # fmt: skip


def tiny(cases, overrides=TINY):
    return [case.changed(overrides) for case in cases]
