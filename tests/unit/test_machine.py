"""What a unit reads of its machine."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support.fake_nvml import A100, L4, UUIDS, FakeGpus

from grid.config import parse
from grid.engines.base import EngineFacts
from grid.hardware.catalogue import GPUS
from grid.units.actor import Site, card
from grid.units.machine import is_descendant, may_use, visible_gpus
from grid.words import Precision


def test_children_and_their_children_are_descendants() -> None:
    code = (
        "import os, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE)\n"
        "print(child.pid, flush=True); input(); child.communicate(b'\\n')\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        grandchild = int(child.stdout.readline())
        assert is_descendant(child.pid, os.getpid())
        assert is_descendant(grandchild, os.getpid())
        assert is_descendant(grandchild, child.pid)
        assert is_descendant(os.getpid(), child.pid) is False
        child.communicate("\n", timeout=10)
    assert is_descendant(grandchild, os.getpid()) is None, "it is gone"


def test_a_process_sees_the_gpus_that_it_was_given(gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"4,{UUIDS[A100]}")
    gpus.set(L4, capability_major=8, capability_minor=9)
    assert visible_gpus() == (
        (UUIDS[L4], "NVIDIA L4", 23 * 1024, (8, 9)),
        (UUIDS[A100], "NVIDIA A100-SXM4-80GB", 80 * 1024, (0, 0)),
    )
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert [gpu.uuid for gpu in visible_gpus()] == [UUIDS[0]]


@pytest.mark.parametrize(
    ("visible", "may"),
    [(None, [True, True]), ("", [False, False]), ("1", [False, True]), ("GPU-a,7", [True, False])],
)
def test_which_gpus_a_process_was_given(
    visible: str | None, may: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [may_use(0, "GPU-a"), may_use(1, "GPU-b")] == may


def test_a_unit_on_a_gpu_that_the_catalogue_does_not_hold_has_a_card() -> None:
    model = parse(
        "models: [{name: m, engine: vllm, source: /m, precision: int8, gpus: 2}]", "grid.yaml"
    ).models[0]
    site = Site("node", "127.0.0.1", "eu", "NVIDIA GeForce RTX 3090", ("a", "b"), 24_576.0, (8, 6))
    made = card(model, "unit-m-0", EngineFacts("m", Precision.INT8, "f", 4096, False, 0), site)
    assert (made.gpu_type, made.memory_grant_mb) == ("GeForce RTX 3090", 2 * 24_576)
    assert made.cu_factor == pytest.approx(2 * GPUS["A10G"].cu_factor)
