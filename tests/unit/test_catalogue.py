import pytest

from grid.errors import InvalidRequest
from grid.hardware import catalogue
from grid.words import Precision


@pytest.mark.parametrize(
    ("nvml_name", "known"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100-80"),
        ("NVIDIA A100 80GB PCIe", "A100-80"),
        ("NVIDIA A100-PCIE-40GB", "A100-40"),
        ("Tesla T4", "T4"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("Tesla V100-SXM2-32GB", "V100"),
        ("h100", "H100"),
    ],
)
def test_product_names_are_recognised(nvml_name: str, known: str) -> None:
    assert catalogue.find(nvml_name).name == known


def test_an_unknown_gpu_is_refused_with_the_nearest_names() -> None:
    with pytest.raises(InvalidRequest, match=r"unknown GPU model 'H300'; did you mean .*H"):
        catalogue.find("H300")


def test_cu_factor_is_one_for_an_a100_80_and_orders_the_others() -> None:
    factors = {name: gpu.cu_factor for name, gpu in catalogue.GPUS.items()}
    assert factors["A100-80"] == 1.0
    order = ["CPU", "T4", "L4", "L40S", "A100-40", "A100-80", "H100", "H200", "B200"]
    assert sorted(order, key=factors.__getitem__) == order


@pytest.mark.parametrize(
    ("gpu", "lowest", "best"),
    [
        ("H100", Precision.INT4, Precision.FP8),
        ("A100-80", Precision.INT4, Precision.INT8),
        ("L40S", Precision.INT4, Precision.FP8),
        ("B200", Precision.INT4, Precision.FP8),
        ("H100", Precision.FP16, Precision.BF16),
        ("T4", Precision.BF16, Precision.FP32),
        ("CPU", Precision.INT4, Precision.FP32),
        ("H100", Precision.FP32, Precision.FP32),
    ],
)
def test_the_best_acceptable_precision(gpu: str, lowest: Precision, best: Precision) -> None:
    assert catalogue.best_precision(gpu, lowest) is best


def test_any_precision_is_the_gpus_own_favourite() -> None:
    for gpu in catalogue.GPUS.values():
        assert catalogue.best_precision(gpu.name, 0) is gpu.precisions[0]


def test_what_vllm_breaks_is_not_offered() -> None:
    assert Precision.INT8 not in catalogue.GPUS["B200"].precisions
    assert Precision.INT4 not in catalogue.GPUS["CPU"].precisions
    assert Precision.FP8 not in catalogue.GPUS["CPU"].precisions
    assert Precision.BF16 not in catalogue.GPUS["T4"].precisions


@pytest.mark.parametrize(
    ("gpu", "precision", "gpus", "measured_ms"),
    [
        ("A100-80", Precision.FP16, 2, 54.9),
        ("H100", Precision.FP16, 2, 37.0),
        ("H200", Precision.FP8, 1, 22.0),
        ("H200", Precision.FP8, 8, 7.9),
    ],
)
def test_decode_priors_are_near_published_measurements_of_a_70b_model(
    gpu: str, precision: Precision, gpus: float, measured_ms: float
) -> None:
    prior = catalogue.decode_ms_per_token(gpu, 70, precision, gpus)
    assert prior == pytest.approx(measured_ms, rel=0.25)


def test_prefill_prior_is_near_a_published_measurement() -> None:
    prior = catalogue.prefill_tokens_per_s("A100-80", 70, Precision.FP16, 2)
    assert prior == pytest.approx(512 / 0.196, rel=0.4)


def test_a_share_of_a_gpu_is_as_much_slower() -> None:
    whole = catalogue.prefill_tokens_per_s("H100", 8, Precision.FP8, 1)
    assert catalogue.prefill_tokens_per_s("H100", 8, Precision.FP8, 0.25) == pytest.approx(whole / 4)
    assert catalogue.decode_ms_per_token("H100", 8, Precision.FP8, 0.25) > 2 * catalogue.decode_ms_per_token(
        "H100", 8, Precision.FP8, 1
    )


def test_weights_without_native_arithmetic_compute_at_sixteen_bits() -> None:
    fp8 = catalogue.prefill_tokens_per_s("A100-80", 8, Precision.FP8)
    assert fp8 == catalogue.prefill_tokens_per_s("A100-80", 8, Precision.FP16)
    assert fp8 < catalogue.prefill_tokens_per_s("A100-80", 8, Precision.INT8)
