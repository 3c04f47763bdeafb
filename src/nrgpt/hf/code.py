"""The code that an export carries, for people who have not installed nrgpt.

transformers' loader of remote code wants all files in one folder, with imports of the form
``from .name import ...``. So the modules that the wrappers need are copied under flat names
(nrgpt.model.energy.term becomes nrgpt_model_energy_term.py), with their imports rewritten. What a
function would
import only when called (nrgpt's own generate) is left out, and says so when called.
"""

import ast
import json
import re
from importlib import resources
from pathlib import Path

ROOTS = {
    "nrgpt.hf.configuration": "configuration_nrgpt",
    "nrgpt.hf.modeling": "modeling_nrgpt",
}
"""Where transformers enters, and what such files are called by custom."""
AUTO_MAP = {
    "AutoConfig": "configuration_nrgpt.NRGPTConfig",
    "AutoModel": "modeling_nrgpt.NRGPTModel",
    "AutoModelForCausalLM": "modeling_nrgpt.NRGPTForCausalLM",
}
RELATIVE_IMPORT = re.compile(r"^(\s*)from (\.+)(\w+(?:\.\w+)*) import", re.MULTILINE)
LEFT_OUT = 'raise ImportError("this needs nrgpt itself: pip install nrgpt")'


def write_code(folder: Path) -> None:
    """Add the code to a folder with a config.json, and say in there where it is."""
    for name, text in flat_modules().items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    config = folder / "config.json"
    fields = json.loads(config.read_text())
    fields["auto_map"] = AUTO_MAP
    config.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")


def flat_modules() -> dict[str, str]:
    """Flat names and texts of all modules that the wrappers import, directly or not."""
    modules: dict[str, str] = {}
    waiting = list(ROOTS)
    while waiting:
        module = waiting.pop()
        if flat_name(module) in modules:
            continue
        text, is_package = source(module)
        package = module if is_package else module.rpartition(".")[0]

        def rewrite(found: re.Match[str], package: str = package) -> str:
            indent, dots, name = found.groups()
            parts = package.split(".")
            target = ".".join([*parts[: len(parts) + 1 - len(dots)], name])
            waiting.append(target)
            return f"{indent}from .{flat_name(target)} import"

        text = RELATIVE_IMPORT.sub(rewrite, without_late_imports(text))
        modules[flat_name(module)] = f"# Copied from nrgpt ({module}), Apache-2.0.\n{text}"
    return modules


def without_late_imports(text: str) -> str:
    """The module with relative imports inside of functions replaced by an error."""
    lines = text.splitlines(keepends=True)
    for function in ast.walk(ast.parse(text)):
        if not isinstance(function, ast.FunctionDef):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.ImportFrom) and node.level:
                indent = " " * node.col_offset
                lines[node.lineno - 1] = f"{indent}{LEFT_OUT}\n"
                for line in range(node.lineno, node.end_lineno or node.lineno):
                    lines[line] = ""
    return "".join(lines)


def flat_name(module: str) -> str:
    return ROOTS.get(module, module.replace(".", "_"))


def source(module: str) -> tuple[str, bool]:
    """The text of a module of nrgpt, and whether it is a package."""
    _, *parts = module.split(".")
    place = resources.files("nrgpt").joinpath(*parts)
    if place.is_dir():
        return place.joinpath("__init__.py").read_text(encoding="utf-8"), True
    beside = resources.files("nrgpt").joinpath(*parts[:-1], f"{parts[-1]}.py")
    return beside.read_text(encoding="utf-8"), False
