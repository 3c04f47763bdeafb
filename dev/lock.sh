#!/usr/bin/env bash
# Write requirements.lock: every package that `make test` installs, with the hashes of its files.
# Needs uv (pip install uv). The versions are those of constraints.txt.
#
# torch, and what only its builds for GPUs need, are left out: which build is right depends on the
# machine, and each has hashes of its own (SECURITY.md).
set -eu
cd "$(dirname "$0")/.."
printf 'hatchling\neditables\n' | uv pip compile pyproject.toml - --extra dev --universal \
  --generate-hashes --constraint constraints.txt --python-version 3.11 --no-annotate --no-header \
  --emit-build-options --quiet --output-file requirements.lock
python3 - <<'PY'
import re
from pathlib import Path

path = Path("requirements.lock")
packages = re.split(r"\n(?=[a-z0-9])", path.read_text().strip())
machine = re.compile(r"torch==|triton|nvidia-|cuda-")
kept = [package for package in packages if not machine.match(package)]
path.write_text("# Written by dev/lock.sh; do not edit.\n" + "\n".join(kept) + "\n")
PY
