"""Mixtures of experts and weights in 8-bit floats: sizes against published ones, times against limits."""

import dataclasses
import math
from functools import partial

import numpy as np
import pytest

from bench.cost import fit_experts
from bench.cost.measured import MEASUREMENTS
from lamina.core.errors import ConfigError, ModelError, UnsupportedModelError
from lamina.core.pipeline import Shape
from lamina.planning.plan import hardware, model_shapes, prices, workload
from lamina.planning.plan.cost import CostModel, Fits
from lamina.planning.plan.hardware import Hardware
from lamina.planning.plan.kernel_times import SliceCurve
from lamina.planning.plan.model_shapes import Experts
from lamina.planning.plan.overheads import VLLM
from lamina.planning.plan.serving import Server
from lamina.planning.plan.ways import NO_LIMITS, Kind, Way
from lamina.planning.simulate.trial import Course

CATALOGUE = hardware.load()
QWEN = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "tie_word_embeddings": False,
}


def cost(shape: model_shapes.ModelShape, kind: str = "h100") -> CostModel:
    return CostModel(shape, CATALOGUE[kind], Fits.load(CATALOGUE[kind]))


@pytest.mark.parametrize(("name", "billions"), [("Qwen3-30B-A3B", 30.5), ("Mixtral-8x7B", 46.7)])
def test_the_published_number_of_parameters(name: str, billions: float) -> None:
    assert model_shapes.find(name).parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_a_config_with_experts() -> None:
    shape = model_shapes.from_config("qwen", QWEN)
    assert shape.experts == Experts(count=128, active=8, intermediate=768, layers=48)
    assert shape.parameters == model_shapes.find("Qwen3-30B-A3B").parameters
    glm = {**QWEN, "n_routed_experts": 64, "num_experts": None, "n_shared_experts": 1, "first_k_dense_replace": 3}
    assert model_shapes.from_config("glm", glm).experts == Experts(
        count=64, active=8, intermediate=768, layers=45, shared=768
    )
    with pytest.raises(ModelError, match="has 128 experts, of which each token uses None"):
        model_shapes.from_config("broken", {**QWEN, "num_experts_per_tok": None})
    assert model_shapes.from_config("dense", {**QWEN, "num_experts": None}).experts is None


def test_experts_touched_by_a_step() -> None:
    experts = Experts(count=16, active=2, intermediate=1, layers=1)
    random = np.random.default_rng(0)
    weights = np.arange(1, 17) ** -model_shapes.SKEW
    chosen = partial(random.choice, 16, 2, replace=False, p=weights / weights.sum())
    for rows in (1, 4, 30):
        drawn = [len(np.unique([chosen() for _ in range(rows)])) for _ in range(1000)]
        assert float(experts.touched(rows)) == pytest.approx(np.mean(drawn), rel=0.03)


def test_few_rows_read_few_experts_and_many_rows_all() -> None:
    """Between reading the touched weights at full bandwidth and several times that; never faster than the peak."""
    shape = model_shapes.find("Mixtral-8x7B")
    assert shape.experts is not None
    model, device = cost(shape), CATALOGUE["h100"]
    per_expert = 3 * shape.hidden * shape.experts.intermediate * 2
    rows = np.array([1.0, 8.0, 64.0])
    seconds = sum(model.operator_seconds(name, rows, 1) for name in ("mlp_up_proj", "mlp_down_proj"))
    least = shape.experts.touched(rows) * per_expert / device.memory_bytes_s
    assert np.all(seconds > least) and np.all(seconds < 2.5 * least)
    many = 16384.0
    flops = 2 * many * shape.experts.active * 3 * shape.hidden * shape.experts.intermediate
    took = float(sum(model.operator_seconds(name, many, 1) for name in ("mlp_up_proj", "mlp_down_proj")))
    assert flops / device.flops[shape.dtype] < took < 2.5 * flops / device.flops[shape.dtype]


@pytest.mark.parametrize(
    ("name", "tested", "median", "bias"),
    [
        ("experts", False, 0.07, 0.02),
        ("experts_int4", False, 0.08, 0.04),
        ("experts_int4", True, 0.25, 0.20),  # gpt-oss-20b, to which nothing is fitted
        ("experts_fp8", False, 0.07, 0.02),
        ("experts_marlin", False, 0.08, 0.04),
    ],
)
def test_measured_experts(name: str, tested: bool, median: float, bias: float) -> None:
    part = fit_experts.part(name, fit_experts.read(MEASUREMENTS, name, tested))
    errors = part.errors(getattr(Fits.load(CATALOGUE["h200"]), name))
    assert len(errors) >= 60 and np.median(np.abs(errors)) < median and abs(np.median(errors)) < bias


def test_experts_by_marlin_take_twice_as_long_as_by_triton() -> None:
    """Measured with vLLM 0.24 on an H200: 16,384 tokens of 4-bit experts reach 0.22 and 0.46 of the peak."""
    shape, device = model_shapes.find("gpt-oss-120b"), CATALOGUE["h200"]
    fits = Fits.load(device)
    seconds = [
        float(
            CostModel(shape, device, dataclasses.replace(fits, experts_int4=own)).operator_seconds(
                "mlp_up_proj", 16384, 1
            )
        )
        for own in (fits.experts_int4, fits.experts_marlin)
    ]
    assert 1.6 < seconds[1] / seconds[0] < 2.6


def test_gpt_oss_stores_only_experts_in_4_bits() -> None:
    shape = model_shapes.find("gpt-oss-120b")
    attention = 36 * 2880 * 64 * 2 * (64 + 8)
    ends = 2 * 201088 * 2880
    experts = 36 * 128 * 3 * 2880 * 2880
    assert shape.weight_bytes == 2 * (attention + ends) + experts * 0.5625
    all_of_it = dataclasses.replace(shape, only_experts=False)
    ratio = float(cost(shape).operator_seconds("attn_pre_proj", 1, 1)) / float(
        cost(all_of_it).operator_seconds("attn_pre_proj", 1, 1)
    )
    assert 1.5 < ratio < 2 / 0.5625


def test_one_expert_that_all_tokens_take_is_a_dense_layer() -> None:
    dense = model_shapes.find("Llama-2-7B")
    one = dataclasses.replace(dense, experts=Experts(count=1, active=1, intermediate=dense.intermediate, layers=32))
    for operator in ("mlp_down_proj", "mlp_act"):
        same = [float(cost(shape).operator_seconds(operator, 100, 2)) for shape in (dense, one)]
        assert same[0] == pytest.approx(same[1])
    assert dense.weight_bytes == one.weight_bytes


def test_half_of_the_layers_dense() -> None:
    shape = model_shapes.find("Qwen3-30B-A3B")
    assert shape.experts is not None
    half = dataclasses.replace(shape, experts=dataclasses.replace(shape.experts, layers=24))
    dense = dataclasses.replace(shape, experts=None)
    mean = (shape.layer_parameters + dense.layer_parameters) / 2
    assert half.layer_parameters == pytest.approx(mean)
    times = [float(cost(one).operator_seconds("mlp_up_proj", 64, 1)) for one in (shape, dense, half)]
    assert times[2] == pytest.approx((times[0] + times[1]) / 2)


def test_weights_in_fp8() -> None:
    shape = model_shapes.find("Llama-3-70B")
    small = shape.stored_as("auto", "fp8")
    embeddings = 2 * 2 * shape.vocabulary * shape.hidden
    assert small.weight_bytes == (shape.weight_bytes - embeddings) / 2 + embeddings
    few, many = 4, 8192
    # An H100 multiplied 1.5 times as fast in 8 bits (bench/cost/measurements/h100_products.csv).
    # An A100 reads half, but multiplies in 16 bits.
    for kind, faster in (("h100", 1.5), ("a100", 1.0)):
        ratios = [
            float(cost(shape, kind).operator_seconds("mlp_down_proj", rows, 1))
            / float(cost(small, kind).operator_seconds("mlp_down_proj", rows, 1))
            for rows in (few, many)
        ]
        # Activations and outputs of 2 bytes, and what a tile and a launch take, are not halved.
        assert 1.4 < ratios[0] < 2.01 and faster * 0.85 < ratios[1] < faster * 1.1, kind
    assert model_shapes.from_config("q", {**QWEN, "quantization_config": {"quant_method": "fp8"}}).fp8
    with pytest.raises(UnsupportedModelError, match="quantised with mxfp4"):
        model_shapes.from_config("q", {**QWEN, "quantization_config": {"quant_method": "mxfp4"}})


def test_weights_in_integers() -> None:
    """int4: a scale and a zero point of 4 bytes for 128 weights. Fewer bytes are read; products take 16 bits."""
    shape = model_shapes.find("Llama-3-70B")
    embeddings = 2 * 2 * shape.vocabulary * shape.hidden
    sizes: dict[model_shapes.WeightDType, float] = {"int8": 1.0, "int4": 0.5625}
    for dtype, size in sizes.items():
        small = shape.stored_as("auto", dtype)
        assert small.weight_bytes == (shape.weight_bytes - embeddings) * size / 2 + embeddings
        few, many = (
            float(cost(shape, "h100").operator_seconds("mlp_down_proj", rows, 1))
            / float(cost(small, "h100").operator_seconds("mlp_down_proj", rows, 1))
            for rows in (4, 8192)
        )
        assert 0.6 * 2 / size < few < 2.01 / size and 0.85 < many < 1.05, dtype
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    assert model_shapes.from_config("q", {**QWEN, "quantization_config": gptq}).weight_dtype == "int4"


@pytest.mark.parametrize("model", ["Llama-3-8B", "Mixtral-8x7B"])
def test_ways_of_lamina_multiply_8_bit_floats_in_16_bits(model: str) -> None:
    """Plans charge Lamina products in 16 bits, and other engines products in 8; both read a byte per weight."""
    shape = model_shapes.find(model).stored_as("auto", "fp8")
    without = dataclasses.replace(CATALOGUE["h100"], fp8_flops=0.0)
    served, market = workload.of_lengths(2000, 10), prices.load("paper")

    def rate(kind: Kind, device: Hardware) -> float:
        costs = {device.kind: CostModel(shape, device, Fits.load(device))}
        way = Way(kind=kind, chunk=2048, compute=device, compute_workers=2, shape=Shape(2))
        found = Server(shape, served, costs, market, NO_LIMITS, VLLM).evaluate(way)
        assert found is not None
        return found.requests_s

    assert rate(Kind.LOCAL, CATALOGUE["h100"]) == pytest.approx(rate(Kind.LOCAL, without), rel=1e-9)
    assert rate(Kind.ONE_POOL, CATALOGUE["h100"]) > 1.08 * rate(Kind.LOCAL, CATALOGUE["h100"])

    def seconds(kind: Kind, device: Hardware) -> float:
        course = Course(shape, served, [], market, NO_LIMITS, engine=VLLM)
        way = Way(kind=kind, chunk=2048, compute=device, compute_workers=2, shape=Shape(2))
        found = Server(shape, served, {device.kind: cost(shape, "h100")}, market, NO_LIMITS, VLLM).evaluate(way)
        assert found is not None
        return course.simulate(found, 1000.0, 60).seconds

    assert seconds(Kind.LOCAL, CATALOGUE["h100"]) == pytest.approx(seconds(Kind.LOCAL, without), rel=1e-9)
    assert seconds(Kind.ONE_POOL, CATALOGUE["h100"]) < 0.95 * seconds(Kind.LOCAL, CATALOGUE["h100"])


def test_slices_measured_in_16_bits_say_nothing_of_fp8() -> None:
    curve = SliceCurve(rows=[1, 2], slice_s=[1e-3, 1e-3], weight_s=[1e-9, 1e-9])
    entry = CATALOGUE["epyc"]
    fits = dataclasses.replace(Fits.load(entry), slices=curve)
    with pytest.raises(ConfigError, match="leave out --weight-dtype"):
        CostModel(model_shapes.find("Llama-2-7B").stored_as("auto", "fp8"), entry, fits)
    # With experts, measured slices read the touched weights alone.
    shape = model_shapes.find("Mixtral-8x7B")
    one, all_of_them = (float(CostModel(shape, entry, fits).slice_seconds(rows)) for rows in (1, 10_000))
    assert all_of_them - 1e-3 == pytest.approx(shape.layer_parameters * 1e-9, rel=1e-3)
    assert math.isclose((one - 1e-3) / (all_of_them - 1e-3), 0.27, rel_tol=0.1)
