"""The whole runtime with quantised weights, at load and in checkpoints, against Hugging Face with the same weights."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from lamina import _native
from lamina.compute.split_cache import prepare
from lamina.config.engine_config import EngineConfig
from lamina.core.errors import ConfigError
from lamina.core.sampling import SamplingParams
from lamina.core.types import DType, Quantization
from lamina.launch import launch
from lamina.lowering import Target
from lamina.models import directory
from lamina.models.directory import BUNDLED
from lamina.models.quantisation.codes import quantise, quantise_experts
from lamina.splitter.parts import Rank
from tests.support import quantised_checkpoints as checkpoints
from tests.support.quantised_checkpoints import FORMATS
from tests.support.random_models import greedy, served, write_checkpoint
from tests.support.running import run_all
from tests.support.sweep import sweep

TOKENS = 10
PROMPTS = [random.Random(length).choices(range(3, 90), k=length) for length in (1, 7, 20, 33)]
needs_kernels = pytest.mark.skipif(not _native.linear_available(), reason="this processor has no AVX2")


def tokens(
    folder: Path, held: str = "", prompts: list[list[int]] = PROMPTS, count: int = TOKENS, **settings: Any
) -> list[list[int]]:
    """Return ``count`` greedy tokens after each prompt. The model is split before its workers start."""
    ranks, target = settings.get("tensor_parallel", 1), Target.CPU if "cpu" in settings["compute"] else Target.GPU
    for number in range(ranks):
        prepare(directory.find(str(folder)), settings["dtype"], lambda: None, target, Rank(number, ranks))
    sizes = {"max_model_len": 64, "max_num_batched_tokens": 24, "max_num_seqs": 4, "kv_cache_memory_bytes": 4 << 20}
    given: dict[str, Any] = {"memory": "cpu:1"} | sizes | settings
    engine = launch(EngineConfig(model=str(folder), **given))
    try:
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        outputs = run_all(engine, prompts, params)
        assert engine.cluster.loaded.weights and held in engine.cluster.loaded.weights
    finally:
        engine.close()
    return [output.outputs[0].token_ids for output in outputs]


def is_nearly_greedy(model: PreTrainedModel, prompt: list[int], chosen: list[int], margin: float) -> bool:
    """Whether every token's logit is at most ``margin`` (a share of the largest) below the best, given those before."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + chosen])).logits[0, len(prompt) - 1 : -1]
    below = logits.amax(1) - logits[torch.arange(len(chosen)), torch.tensor(chosen)]
    return bool((below <= margin * logits.abs().amax(1)).all())


@pytest.mark.parametrize("form", sweep([*FORMATS], ["gptq-4-ordered"]))
def test_quantised_checkpoints_give_the_tokens_of_their_weights(tmp_path: Path, form: str) -> None:
    """In float32, where all weights are made dense."""
    model = write_checkpoint(served("llama"), tmp_path)
    checkpoints.quantise(tmp_path, FORMATS[form], model)
    got = tokens(tmp_path, compute="cpu:1", dtype=DType.FLOAT32)
    assert got == [greedy(model, prompt, TOKENS) for prompt in PROMPTS]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["gptq-4-ordered", "pack-4-asymmetric", "fp8-blocks"])
@pytest.mark.parametrize("compute", ["cpu:2", "emulated:2"])
def test_ranks_of_quantised_checkpoints(tmp_path: Path, form: str, compute: str) -> None:
    model = write_checkpoint(served("llama"), tmp_path)
    checkpoints.quantise(tmp_path, FORMATS[form], model)
    got = tokens(tmp_path, compute=compute, tensor_parallel=2, dtype=DType.FLOAT32)
    assert got == [greedy(model, prompt, TOKENS) for prompt in PROMPTS]


@pytest.mark.slow
def test_experts_of_quantised_checkpoints(tmp_path: Path) -> None:
    """Stored one by one, in fp8 with scales of blocks; the router is not quantised."""
    model = write_checkpoint(served("deepseek_v3"), tmp_path)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    draw = np.random.default_rng(0)
    for name in [name for name in stored if ".experts." in name or "_proj.weight" in name]:
        written = FORMATS["fp8-blocks"].write(draw, *stored[name].shape)
        base = name.removesuffix(".weight")
        stored |= {f"{base}.{suffix}": tensor for suffix, tensor in written.tensors.items()}
    save_file(stored, file, metadata={"format": "pt"})
    plain = tmp_path / "plain"
    plain.mkdir()
    for other in tmp_path.iterdir():
        if other.is_file():
            (plain / other.name).write_bytes(other.read_bytes())
    dense = {name: tensor for name, tensor in stored.items() if "scale" not in name}
    for name, scale in stored.items():
        if name.endswith("_scale_inv"):
            weight = dense[name.removesuffix("_scale_inv")]
            each = scale.repeat_interleave(24, 0).repeat_interleave(20, 1)[: weight.shape[0], : weight.shape[1]]
            dense[name.removesuffix("_scale_inv")] = weight.float() * each
    save_file(dense, plain / "model.safetensors", metadata={"format": "pt"})
    reference = type(model).from_pretrained(plain)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = dict(FORMATS["fp8-blocks"].config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    got = tokens(tmp_path, compute="cpu:1", dtype=DType.FLOAT32)
    assert got == [greedy(reference, prompt, TOKENS) for prompt in PROMPTS]


TURNED = ("gpt_oss",)  # whose experts are [experts, inputs, outputs]


def quantised_model(
    folder: Path, to: Quantization, family: str, dtype: torch.dtype = torch.bfloat16, /, **sizes: int
) -> PreTrainedModel:
    """A checkpoint, and the model with its weights of type ``dtype`` as ``to`` rounds them, in float32."""
    model = write_checkpoint(served(family, **sizes), folder)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            weight = module.weight.data.to(dtype)
            module.weight.data = quantise(name, weight, to, {}).dense(torch.float32)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 3:  # of experts
            weight = parameter.data.to(dtype)
            codes = quantise_experts(name, weight.mT if family in TURNED else weight, to, {})
            found = torch.stack([one.dense(torch.float32) for one in codes])
            parameter.data = found.mT.contiguous() if family in TURNED else found
    return model


SIZES = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}  # two ranks cut no group of 128


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize(("compute", "to"), [("cpu:1", "int8"), ("cpu:1", "int4"), ("emulated:1", "int8")])
def test_quantised_at_load(tmp_path: Path, compute: str, to: Quantization) -> None:
    reference = quantised_model(tmp_path, to, "llama", **SIZES)
    exact: dict[str, Any] = {"dtype": DType.BFLOAT16, "activation_dtype": "dtype"}
    got = tokens(tmp_path, compute=compute, quantization=to, **exact)
    assert all(is_nearly_greedy(reference, prompt, one, 0.05) for prompt, one in zip(PROMPTS, got, strict=True))


@pytest.mark.skipif(not _native.linear_takes_byte_rows(), reason="this processor has no AVX-512 with bfloat16 and VNNI")
@pytest.mark.parametrize("to", ["int8", pytest.param("int4", marks=pytest.mark.slow)])
def test_activations_are_rounded(to: Quantization) -> None:
    """Compare tokens with a reference of the bundled model that rounds the inputs of its linear layers to 8 bits.

    A random model would magnify the rounding errors.
    """
    reference = AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32)
    for name, module in reference.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.weight.data = quantise(name, module.weight.data.to(torch.bfloat16), to, {}).dense(torch.float32)
            module.register_forward_pre_hook(lambda _, inputs: (in_byte_codes(inputs[0]),))
    held = f"linear layers in {to}, activations in int8"
    wanted = "auto" if to == "int4" else "int8"
    got = tokens(BUNDLED, held, compute="cpu:1", dtype=DType.BFLOAT16, quantization=to, activation_dtype=wanted)
    assert all(is_nearly_greedy(reference, prompt, one, 0.03) for prompt, one in zip(PROMPTS, got, strict=True))


def in_byte_codes(x: torch.Tensor) -> torch.Tensor:
    """x [..., inputs] as codes of 8 bits hold it, with a scale for each row and as many inputs as a product takes."""
    group = next(size for size in range(128, 15, -4) if x.shape[-1] % size == 0)
    parts = x.unflatten(-1, (-1, group))
    steps = parts.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
    return ((parts / steps).round() * steps).flatten(-2)


QUANTISED_ON_GPUS = [("llama", "int8"), ("llama", "fp8"), ("deepseek_v3", "fp8"), ("gpt_oss", "int8")]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "to"), QUANTISED_ON_GPUS)
def test_weights_of_a_gpu_quantised_in_float32_give_the_tokens_of_their_codes(
    tmp_path: Path, family: str, to: Quantization
) -> None:
    sizes = SIZES if family == "llama" else {}
    reference = quantised_model(tmp_path, to, family, torch.float32, **sizes)
    held = f"linear layers in {to}" if family == "llama" else f"linear layers and experts in {to}"
    got = tokens(tmp_path, held, compute="emulated:1", dtype=DType.FLOAT32, quantization=to)
    assert got == [greedy(reference, prompt, TOKENS) for prompt in PROMPTS]


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize(("compute", "to"), [("cpu:2", "int8"), ("cpu:2", "int4"), ("emulated:2", "int8")])
def test_ranks_have_the_same_quantised_weights(tmp_path: Path, compute: str, to: Quantization) -> None:
    """Their scales are those of whole outputs, not of a rank's part of the inputs."""
    reference = quantised_model(tmp_path, to, "llama", **SIZES)
    exact: dict[str, Any] = {"dtype": DType.BFLOAT16, "activation_dtype": "dtype"}
    got = tokens(tmp_path, compute=compute, tensor_parallel=2, quantization=to, **exact)
    assert all(is_nearly_greedy(reference, prompt, one, 0.05) for prompt, one in zip(PROMPTS, got, strict=True))


@needs_kernels
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_experts_are_quantised_at_load(tmp_path: Path, ranks: int) -> None:
    """What chooses them is not. Ranks have the codes of whole weights."""
    reference = quantised_model(tmp_path, "int8", "deepseek_v3")
    cut: dict[str, Any] = {"compute": f"cpu:{ranks}", "tensor_parallel": ranks}
    got = tokens(tmp_path, **cut, dtype=DType.BFLOAT16, quantization="int8")
    assert all(is_nearly_greedy(reference, prompt, one, 0.05) for prompt, one in zip(PROMPTS, got, strict=True))


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize("form", ["gptq-8", "awq", "pack-4", "int-8"])
def test_codes_in_checkpoints_stay_codes(tmp_path: Path, form: str) -> None:
    model = write_checkpoint(served("llama"), tmp_path)
    checkpoints.quantise(tmp_path, FORMATS[form], model)
    got = tokens(tmp_path, compute="cpu:1", dtype=DType.BFLOAT16)
    assert all(is_nearly_greedy(model, prompt, one, 0.05) for prompt, one in zip(PROMPTS, got, strict=True))


ON_GPUS = {
    "gptq-8": checkpoints.gptq(8, symmetric=False, ordered=False, group=32),
    "pack-8": checkpoints.pack_quantized(8, symmetric=True, group=64),
    "fp8-blocks": checkpoints.fp8_blocks(24, 32),
    "fp8-channel": checkpoints.float_quantized("channel"),
    "gptq-4-ordered": checkpoints.gptq(4, symmetric=False, ordered=True, group=32),
    "gptq-8-ordered": checkpoints.gptq(8, symmetric=True, ordered=True, group=32),
}


@pytest.mark.parametrize("form", sweep(ON_GPUS, ["gptq-8", "gptq-4-ordered", "fp8-blocks"]))
def test_codes_on_a_gpu_give_the_tokens_of_their_weights(tmp_path: Path, form: checkpoints.Format) -> None:
    model = write_checkpoint(served("llama"), tmp_path)
    exact = checkpoints.quantise(tmp_path, form, model)
    prompts, count = PROMPTS[::2], 4  # Triton's interpreter is slow
    held = f"{len(exact)} matrices as stored"
    got = tokens(tmp_path, held, prompts, count, compute="emulated:1", dtype=DType.FLOAT32)
    assert got == [greedy(model, prompt, count) for prompt in prompts]


@pytest.mark.slow
def test_codes_are_not_quantised_again(tmp_path: Path) -> None:
    model = write_checkpoint(served("llama"), tmp_path)
    checkpoints.quantise(tmp_path, FORMATS["awq"], model)
    with pytest.raises(ConfigError, match="quantised already"):
        launch(EngineConfig(model=str(tmp_path), quantization="int8", dtype=DType.BFLOAT16))
