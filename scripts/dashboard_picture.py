"""Makes `docs/ray-dashboard.png`: Ray's dashboard of a cell, with its units by name, model and region.

Starts the cell of `examples/cells/three-regions.yaml` on free ports with state of its own, keeps its units
busy, takes the picture with a headless Chromium, and stops the cell. Needs Debian's package `chromium`.

    python scripts/dashboard_picture.py [FILE.png]
"""

from __future__ import annotations

import http.client
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from gateway import launch
from grid.config import Config, load

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples/cells/three-regions.yaml"
PICTURE = ROOT / "docs/ray-dashboard.png"
BUSY_S = 15.0
"""Ray's agents report CPU and memory of a process every few seconds."""
CALLERS = 6
RENDER_MS = 25_000
SIZE = "2600,1700"
"""All columns of Ray's table of actors, and fifteen rows."""
FILTER = b"""<script>
function type(label, value) {
  const found = [...document.querySelectorAll('label')].find(each => each.textContent === label);
  const input = found && found.parentElement.querySelector('input');
  if (!input) { setTimeout(() => type(label, value), 500); return; }
  Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, 'value').set.call(input, value);
  input.dispatchEvent(new Event('input', {bubbles: true}));
}
type('Class', 'RayUnit');
type('Page Size', '15');
</script></body>"""
"""Types into the dashboard's own filter: units only, all on one page."""
CHROMIUM = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


def main() -> int:
    chromium = shutil.which("chromium")
    if chromium is None:
        print("there is no chromium here; install the package `chromium`", file=sys.stderr)
        return 1
    picture = Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE
    folder = Path(tempfile.mkdtemp(prefix="zgp-"))
    config = cell_config(folder / "cell")
    try:
        cell = launch.up(config, progress=print)
        token = launch.cell_paths(config).ray_token.read_text().strip()
        with calls(config, cell), signed_in(cell.dashboard_url, token) as address:
            time.sleep(BUSY_S)
            subprocess.run(
                [
                    *(chromium, *CHROMIUM, f"--user-data-dir={folder / 'chromium'}", f"--window-size={SIZE}"),
                    *(f"--virtual-time-budget={RENDER_MS}", f"--screenshot={picture}", f"{address}/#/actors"),
                ],
                check=True,
                timeout=120,
            )
    finally:
        launch.down(config)
        shutil.rmtree(folder, ignore_errors=True)
    print(picture)
    return 0


def cell_config(state_dir: Path) -> Config:
    example = load(EXAMPLE)
    return example.model_copy(
        update={
            "cell": example.cell.model_copy(update={"state_dir": state_dir}),
            "gateway": example.gateway.model_copy(update={"port": free_port()}),
        }
    )


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@contextmanager
def calls(config: Config, cell: launch.CellInfo) -> Iterator[None]:
    """Keep the models that generate busy."""
    ended = threading.Event()
    models = [model.name for model in config.models if model.engine != "embedding"]

    def call(number: int) -> None:
        chat = {"model": models[number % len(models)], "messages": [{"role": "user", "content": "Hello"}]}
        key = {"x-api-key": cell.tenant_key or ""}
        with httpx.Client(base_url=cell.base_url, headers=key, timeout=60) as client:
            while not ended.is_set():
                client.post("/v1/chat/completions", json={**chat, "max_tokens": 200})

    with ThreadPoolExecutor(CALLERS) as callers:
        for number in range(CALLERS):
            callers.submit(call, number)
        try:
            yield
        finally:
            ended.set()


@contextmanager
def signed_in(dashboard_url: str, token: str) -> Iterator[str]:
    """Yield an address on loopback that shows the dashboard to whoever comes: a browser that only takes
    pictures can't type Ray's token in."""
    target = urlsplit(dashboard_url)

    class Door(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            there = http.client.HTTPConnection(str(target.hostname), target.port, timeout=30)
            there.request("GET", self.path, headers={"authorization": f"Bearer {token}"})
            answer = there.getresponse()
            body = answer.read().replace(b"</body>", FILTER)
            self.send_response(answer.status)
            self.send_header("content-type", answer.getheader("content-type") or "text/plain")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            there.close()

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Door)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


if __name__ == "__main__":
    sys.exit(main())
