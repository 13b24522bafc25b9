"""An editable install puts only the package on the path, wherever a script lies."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_script_beside_a_clone_that_is_called_minibroker_imports_the_package(tmp_path: Path) -> None:
    (tmp_path / "minibroker").symlink_to(ROOT)
    script = tmp_path / "script.py"
    script.write_text(
        "from minibroker import Admin; import minibroker.client.admin as module; print(module.Admin is Admin)"
    )
    (where,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["where"]
    names = {name for name in os.listdir(ROOT / where) if not name.endswith(".egg-info")}
    assert names == {"minibroker"}, "other names of ours would hide a user's modules"
    found = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT / where)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (found.stdout, found.stderr) == ("True\n", "")
