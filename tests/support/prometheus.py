"""A real Prometheus on loopback that scrapes a cell: its gateway, and Ray's metrics ports."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

SERVER = shutil.which("prometheus")
SCRAPE_S = 1
START_S = 20.0


class Prometheus:
    def __init__(self, port: int) -> None:
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=5.0, verify=False)

    def close(self) -> None:
        self._client.close()

    def ready(self) -> bool:
        try:
            return self._client.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the series that an expression gives now, those without a number left out."""
        answer = self._client.get("/api/v1/query", params={"query": expression}).json()
        assert answer["status"] == "success", (expression, answer)
        return [series for series in answer["data"]["result"] if series["value"][1] != "NaN"]


@contextmanager
def scraping(
    folder: Path, port: int, gateway: str, key: str, ray_targets: Path, certificate: Path
) -> Iterator[Prometheus]:
    """Run a Prometheus that scrapes the https gateway at `gateway` with an operator's key every second."""
    assert SERVER is not None
    folder.mkdir()
    jobs: list[dict[str, Any]] = [
        {
            "job_name": "zerogrid",
            "scheme": "https",
            "tls_config": {"ca_file": str(certificate)},
            "authorization": {"credentials": key},
            "static_configs": [{"targets": [gateway]}],
        },
        {"job_name": "ray", "file_sd_configs": [{"files": [str(ray_targets)]}]},
    ]
    config = folder / "prometheus.yml"
    # JSON is YAML.
    timing = {"scrape_interval": f"{SCRAPE_S}s", "scrape_timeout": f"{SCRAPE_S}s"}
    config.write_text(json.dumps({"global": timing, "scrape_configs": jobs}))
    with open(folder / "log", "wb") as log:
        server = subprocess.Popen(
            [
                SERVER,
                f"--config.file={config}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
        )
    asked = Prometheus(port)
    try:
        deadline = time.monotonic() + START_S
        while not asked.ready():
            assert server.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline, "Prometheus did not come up"
            time.sleep(0.1)
        yield asked
    finally:
        asked.close()
        server.terminate()
        server.wait(timeout=10)
