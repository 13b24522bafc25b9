"""docs/security.md, "From nothing to a secured cluster": its commands and programs, run in their order."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from minibroker.deploy.local.local_cluster import LocalCluster
from minibroker.deploy.local.ports import free_ports
from tests.documents import ADDRESS, ROOT

PAGE = ROOT / "docs" / "security.md"
_BLOCK = re.compile(r"^<!-- secured -->\n```(?P<language>sh|python)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
_INSTALLING = "pip install"


@pytest.mark.slow
def test_the_way_from_nothing_to_a_secured_cluster_leads_there(tmp_path: Path) -> None:
    [port] = free_ports(1)
    directory = tmp_path / ".minibroker"
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    environment.pop("MINIBROKER_COMMAND_CONFIG", None)
    printed: list[str] = []
    try:
        for number, block in enumerate(_BLOCK.finditer(PAGE.read_text())):
            text = block["text"].replace(ADDRESS, f"localhost:{port}")
            text = text.replace("minibroker up", f"minibroker up --base-port {port}")
            lines = [line for line in text.splitlines() if not line.startswith(_INSTALLING)]
            if block["language"] == "sh":
                command = ["bash", "-euo", "pipefail", "-c", "\n".join(lines)]
            else:
                path = tmp_path / f"program_{number}.py"
                path.write_text(text)
                command = [sys.executable, str(path)]
            ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=400)
            assert ran.returncode == 0, f"{text}\n{ran.stdout}\n{ran.stderr}"
            printed.append(ran.stdout)
    finally:
        cluster = LocalCluster(directory)
        if cluster.file_or_none() is not None:
            cluster.down(kill=True)
    programs = [text for text in printed if text.startswith("b'from ")]
    assert len(programs) == 4, printed
    secrets = [*directory.glob("*"), *(directory / "certificates").glob("*")]
    assert {"client.properties", "broker.pem", "ca.key", "zookeeper"} <= {path.name for path in secrets}
    assert not [path for path in secrets if path.stat().st_mode & 0o077]
    password = (tmp_path / "shop.password").read_text().strip()
    logs = "".join(path.read_text() for path in (directory / "logs").glob("*.log"))
    assert password not in logs
