"""The code that an export contains for people who have not installed nrgpt.

transformers' loader of remote code wants all files in one folder, with imports of the form
``from .name import ...``. So the modules that the wrappers need are copied under flat names
(nrgpt.model.energy.term becomes nrgpt_model_energy_term.py), and their imports are rewritten.
Imports inside functions (such as nrgpt's own generate) are replaced by an error.
"""

import ast
import json
from importlib.util import find_spec, resolve_name
from pathlib import Path
from typing import Any

ROOTS = {
    "nrgpt.hf.configuration": "configuration_nrgpt",
    "nrgpt.hf.modeling": "modeling_nrgpt",
}
"""The modules that transformers loads, and the usual names of such files."""
AUTO_MAP = {
    "AutoConfig": "configuration_nrgpt.NRGPTConfig",
    "AutoModel": "modeling_nrgpt.NRGPTModel",
    "AutoModelForCausalLM": "modeling_nrgpt.NRGPTForCausalLM",
}
LEFT_OUT = 'raise ImportError("this needs nrgpt itself: pip install nrgpt")'


def write_code(folder: Path) -> None:
    """Add the code to a folder with a config.json, and name its files there."""
    for name, text in flat_modules().items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    config = folder / "config.json"
    fields = json.loads(config.read_text(encoding="utf-8")) | {"auto_map": AUTO_MAP}
    config.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def flat_modules() -> dict[str, str]:
    """Flat names and texts of all modules that the wrappers import, directly or indirectly."""
    modules: dict[str, str] = {}
    waiting = list(ROOTS)
    while waiting:
        module = waiting.pop()
        if flat_name(module) in modules:
            continue
        spec: Any = find_spec(module)
        text = spec.loader.get_source(module)
        lines = text.splitlines(keepends=True)
        nodes = list(ast.walk(ast.parse(text)))
        functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
        late = {node for function in functions for node in ast.walk(function)}
        for node in nodes:
            if not isinstance(node, ast.ImportFrom) or not node.level:
                continue
            first, end = node.lineno - 1, node.end_lineno or node.lineno
            if node in late:
                error = f"{' ' * node.col_offset}{LEFT_OUT}\n"
                lines[first:end] = [error, *[""] * (end - first - 1)]
            else:
                name = "." * node.level + str(node.module)
                waiting.append(resolve_name(name, spec.parent))
                lines[first] = lines[first].replace(name, f".{flat_name(waiting[-1])}", 1)
        modules[flat_name(module)] = (
            f"# Copied from nrgpt ({module}), Apache-2.0.\n{''.join(lines)}"
        )
    return modules


def flat_name(module: str) -> str:
    return ROOTS.get(module, module.replace(".", "_"))
