"""Wheel and sdist, installed in environments of their own: python dev/check_release.py [EXTRA ...]

Without arguments: the core from the wheel and from the sdist, and every extra. Each must import,
and do what it is for.
"""

import argparse
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
CORE = """
import nrgpt, pathlib
assert "site-packages" in nrgpt.__file__, nrgpt.__file__
assert (pathlib.Path(nrgpt.__file__).parent / "py.typed").is_file()
model = nrgpt.load("zoo:listops_30_steps", device="cpu")
assert model.generate("max(1,2) =", max_new_tokens=4)
"""
USES = {
    "plot": "import nrgpt.dynamics.figures as f; f.new_figure(1, 1)",
    "data": "import datasets, pyarrow, tiktoken, nrgpt.data.own as o; o.byte_pairs(['aa'], 257)",
    "sweep": "import optuna",
    "hf": "import nrgpt.hf; nrgpt.hf.NRGPTForCausalLM",
    "onnx": "import onnx, onnxruntime, onnxscript",
    "quantise": "import torchao",
    "docs": "import latex2mathml, mkdocs, mkdocstrings",
    "serve": "import nrgpt, nrgpt.serve.app as a; a.make_app(nrgpt.load('zoo:listops_30_steps'))",
    "eval": (
        "from importlib.metadata import entry_points as e;"
        "print(e(group='lm_eval.models')['nrgpt'].load())"
    ),
    "tensorboard": "import torch.utils.tensorboard",
    "wandb": "import wandb",
}


def run(*command: object) -> None:
    subprocess.run([str(word) for word in command], check=True, cwd=tempfile.gettempdir())


def try_one(package: Path, extra: str | None) -> None:
    wanted = f"{package}[{extra}]" if extra else str(package)
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder) / "bin" / "python"
        constraints = ["--constraint", ROOT / "constraints.txt"]
        run(python, "-m", "pip", "install", "--quiet", *constraints, wanted)
        run(python, "-c", CORE)
        run(Path(folder) / "bin" / "nrgpt", "zoo")
        if extra:
            run(python, "-c", USES[extra])
    print(f"{package.name} {extra or 'core'}: fine", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("extras", nargs="*", help="only these, from the wheel")
    parser.add_argument("--dist", type=Path, help="folder with built packages")
    asked = parser.parse_args()
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = asked.extras or [e for e in known["optional-dependencies"] if e != "dev"]
    with tempfile.TemporaryDirectory() as folder:
        dist = asked.dist or Path(folder)
        if asked.dist is None:
            run(sys.executable, "-m", "build", "--outdir", dist, ROOT)
        (wheel,), (sdist,) = dist.resolve().glob("*.whl"), dist.resolve().glob("*.tar.gz")
        if not asked.extras:
            try_one(wheel, None)
            try_one(sdist, None)
        for extra in extras:
            try_one(wheel, extra)


if __name__ == "__main__":
    main()
