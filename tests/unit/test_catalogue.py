import csv

import pytest
from support.shared import data_file

from grid.engines.variants import NoVariant, choose
from grid.errors import InvalidRequest
from grid.hardware import catalogue
from grid.words import Precision

DENSE = {
    "fp16_dense_tflops": Precision.FP16,
    "fp8_dense_tflops": Precision.FP8,
    "int8_dense_tops": Precision.INT8,
    "int4_dense_tops": Precision.INT4,
}


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
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA B200", "B200"),
        ("AMD-Instinct-MI300X-OAM", "MI300X"),
        ("A100", "A100-40"),
        ("A100-80G", "A100-80"),
        ("A100-SXM-80", "A100-80"),
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


def test_every_precision_is_either_served_or_lacks_for_a_reason() -> None:
    for gpu in catalogue.GPUS.values():
        serves, lacks = set(gpu.kernels.serves), set(gpu.kernels.lacks)
        assert serves | lacks == set(Precision), gpu.name
        assert not serves & lacks, gpu.name


@pytest.mark.parametrize("column", ["mem_gb", "mem_bw_GBps", *DENSE, "intra_node_GBps_per_dir"])
def test_figures_are_those_of_the_vendors(column: str) -> None:
    for row in csv.DictReader(data_file("gpu/gpu_specs.csv").read_text().splitlines()):
        if row["gpu"] == "A100-PCIe-80":  # a few percent slower than the SXM module, which stands for both
            continue
        gpu, said = catalogue.find(row["gpu"]), row[column].rstrip("*")
        if not said:
            continue
        if column == "mem_gb":  # what the driver shows is less: ECC and the driver's own
            assert 0.93 * 1024 * float(said) < gpu.memory_mb <= 1024 * float(said), row["gpu"]
            continue
        ours = {
            "mem_bw_GBps": gpu.bandwidth_gb_per_s,
            "intra_node_GBps_per_dir": gpu.interconnect_gb_per_s,
            **{name: gpu.tflops.get(precision) for name, precision in DENSE.items()},
        }[column]
        assert ours == pytest.approx(float(said), rel=0.01), row["gpu"]


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


# --- GPUs that the catalogue doesn't hold --------------------------------------------------------------


@pytest.mark.parametrize(
    ("product", "capability", "kernels", "as_slow_as"),
    [
        ("NVIDIA GeForce RTX 3090", (8, 6), catalogue.AMPERE, "A10G"),
        ("NVIDIA RTX 6000 Ada Generation", (8, 9), catalogue.ADA, "L4"),
        ("NVIDIA GH200 480GB", (9, 0), catalogue.HOPPER, "H100-PCIe"),
        ("NVIDIA GeForce RTX 5090", (12, 0), catalogue.BLACKWELL, "B200"),
        ("Quadro RTX 5000", (7, 5), catalogue.TURING, "T4"),
        ("Graphics Device", (0, 0), catalogue.UNTOLD, "T4"),
    ],
)
def test_an_unlisted_gpu_is_made_of_what_its_driver_tells(
    product: str, capability: tuple[int, int], kernels: catalogue.Kernels, as_slow_as: str
) -> None:
    made, like = catalogue.known(product, 24_576, capability), catalogue.GPUS[as_slow_as]
    assert not made.listed
    assert (made.name, made.memory_mb) == (product.removeprefix("NVIDIA "), 24_576)
    assert made.kernels is kernels
    assert (made.bandwidth_gb_per_s, made.cu_factor) == (like.bandwidth_gb_per_s, like.cu_factor)
    for precision in made.precisions:
        assert catalogue.prefill_tokens_per_s(made, 8, precision) > 0
        assert catalogue.decode_ms_per_token(made, 8, precision) > 0
    assert set(kernels.serves) | set(kernels.lacks) == set(Precision)
    assert made.name in catalogue.unlisted_warning(made)


def test_what_is_listed_stays_as_it_is_listed() -> None:
    assert catalogue.known("NVIDIA L4", 1.0, (0, 0)) is catalogue.GPUS["L4"]


def test_a_driver_that_tells_nothing_leaves_careful_guesses() -> None:
    made = catalogue.known("Graphics Device", -1.0, (0, 0))
    assert made.memory_mb == catalogue.UNTOLD_MEMORY_MB
    assert choose(made) is Precision.FP16
    assert "no word of its compute capability" in catalogue.unlisted_warning(made)


def test_a_gpu_that_vllm_is_too_new_for_says_so() -> None:
    told = choose(catalogue.known("Tesla P100-PCIE-16GB", 16_384, (6, 0)))
    assert isinstance(told, NoVariant)
    assert "needs compute capability 7.0" in told.reason
