"""llama.cpp through its Python bindings: weights in bfloat16, Q8_0 or Q4_K_M, all requests in one batch.

With bfloat16 weights, KV is bfloat16 too and flash attention is off, since with such KV it is less than half as fast;
without it, prefill and decode are as fast as with float16 KV and flash attention. With Q8_0 and Q4_K_M, which
``llama_model_quantize`` makes of the bfloat16 file, KV is float16 and flash attention is on. See ``offline.py``.
"""

import ctypes
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import gguf
import llama_cpp
import numpy as np
import numpy.typing as npt
from safetensors import deserialize

from bench.peers.offline import STEP_TOKENS, Cell, Generate, run

MICRO_BATCH = 512
FILE_TYPES = {"q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, "q4_k_m": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M}
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def settings(weights: str) -> dict[str, str]:
    """Return the types and sizes of a context."""
    dense = weights == "bf16"
    return {
        "kv": "BF16" if dense else "F16",
        "flash_attn": "off" if dense else "on",
        "n_batch": str(STEP_TOKENS),
        "n_ubatch": str(MICRO_BATCH),
    }


def converted(model: Path, weights: str) -> Path:
    """Return the path of the model as a GGUF file without a tokenizer, beside the original; made if it is not there.

    Raises RuntimeError if llama.cpp cannot quantise it.
    """
    dense, place = (model.with_name(f"{model.name}.{kind}.gguf") for kind in ("bf16", weights))
    if not dense.exists():
        write_gguf(model, dense)
    if not place.exists():
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype = FILE_TYPES[weights]
        part = unfinished(place)
        code = llama_cpp.llama_model_quantize(str(dense).encode(), str(part).encode(), ctypes.byref(params))
        if code != 0:
            raise RuntimeError(f"llama_model_quantize of {dense} to {weights} returned {code}")
        part.rename(place)
    return place


def unfinished(place: Path) -> Path:
    """Return where this process writes a file before it is renamed to ``place``: others may be writing it too."""
    return place.with_suffix(f".{os.getpid()}.part")


def write_gguf(model: Path, place: Path) -> None:
    """Write a Llama as llama.cpp's own converter does: matrices in bfloat16, norms in float32."""
    config = json.loads((model / "config.json").read_text())
    part = unfinished(place)
    writer = gguf.GGUFWriter(part, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(config["vocab_size"])
    for name, stored in deserialize((model / "model.safetensors").read_bytes()):  # type: ignore[no-untyped-call]
        bits = np.frombuffer(stored["data"], np.uint16).reshape(stored["shape"])
        if bits.ndim == 1:
            writer.add_tensor(gguf_name(name), (bits.astype(np.uint32) << 16).view(np.float32))
        else:
            rows = interleaved(bits, config["head_dim"]) if "q_proj" in name or "k_proj" in name else bits
            writer.add_tensor(gguf_name(name), rows.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.rename(place)


def interleaved(weight: npt.NDArray[np.uint16], head_dim: int) -> npt.NDArray[np.uint16]:
    """Rows of a q or k projection in the order of rotary pairs: 0, D/2, 1, D/2 + 1, ... of every head."""
    halves = weight.reshape(-1, 2, head_dim // 2, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


def gguf_name(name: str) -> str:
    """``model.layers.3.mlp.up_proj.weight`` -> ``blk.3.ffn_up.weight``."""
    stem = name.removesuffix(".weight")
    if stem in OUTER:
        return OUTER[stem] + ".weight"
    _, _, layer, inner = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[inner]}.weight"


class Batch:
    """llama.cpp's list of token rows for one decode call, filled through numpy views."""

    def __init__(self, capacity: int) -> None:
        self.native = llama_cpp.llama_batch_init(capacity, 0, 1)
        view = np.ctypeslib.as_array
        self._token = view(self.native.token, (capacity,))
        self._position = view(self.native.pos, (capacity,))
        self._count = view(self.native.n_seq_id, (capacity,))
        self._wanted = view(self.native.logits, (capacity,))

    def fill(self, tokens: list[int], positions: list[int], sequences: list[int], wanted: list[bool]) -> None:
        """Fill row i with ``tokens[i]`` of ``sequences[i]``. Logits are computed for ``wanted`` rows."""
        rows = len(tokens)
        self.native.n_tokens = rows
        self._token[:rows], self._position[:rows], self._wanted[:rows] = tokens, positions, wanted
        self._count[:rows] = 1
        for row, sequence in enumerate(sequences):
            self.native.seq_id[row][0] = sequence


def context_of(model: llama_cpp.llama_model_p, cell: Cell) -> llama_cpp.llama_context_p:
    params = llama_cpp.llama_context_default_params()
    params.n_seq_max = cell.batch
    params.n_ctx = cell.batch * (-(-cell.longest // 256) * 256)
    params.n_batch = STEP_TOKENS
    params.n_ubatch = MICRO_BATCH
    params.n_threads = params.n_threads_batch = cell.threads
    params.type_k = params.type_v = gguf.GGMLQuantizationType[settings(cell.weights)["kv"]].value
    params.flash_attn_type = (
        llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED if cell.weights == "bf16" else llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
    )
    params.kv_unified = False
    context = llama_cpp.llama_init_from_model(model, params)
    if not context:
        raise RuntimeError(f"llama.cpp cannot make a context of {params.n_ctx} tokens in {cell.batch} sequences")
    return context


@contextmanager
def load(cell: Cell) -> Iterator[Generate]:
    """Prompts in full batches, then one row per request and step."""
    llama_cpp.llama_backend_init()
    path = converted(cell.model, cell.weights)
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
    if not model:
        raise RuntimeError(f"llama.cpp cannot read {path}")
    context = context_of(model, cell)
    vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    batch = Batch(STEP_TOKENS)

    def decode(
        tokens: list[int], positions: list[int], sequences: list[int], wanted: list[bool]
    ) -> npt.NDArray[np.int64]:
        """The most likely next tokens of the rows that are ``wanted``."""
        batch.fill(tokens, positions, sequences, wanted)
        code = llama_cpp.llama_decode(context, batch.native)
        if code != 0:
            raise RuntimeError(f"llama_decode of {len(tokens)} rows returned {code}")
        if not any(wanted):  # then there is no array of logits
            return np.empty(0, np.int64)
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits(context), (sum(wanted), vocab))
        drawn: npt.NDArray[np.int64] = logits.argmax(1)
        return drawn

    def generate(prompts: list[list[int]], tokens: int) -> list[list[float]]:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), False)
        rows = [
            (token, position, sequence, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        arrivals: list[list[float]] = [[] for _ in prompts]
        newest: list[int] = []
        for start in range(0, len(rows), STEP_TOKENS):
            columns = [list(column) for column in zip(*rows[start : start + STEP_TOKENS], strict=True)]
            drawn = decode(*columns)
            now = time.monotonic()
            for token in drawn.tolist():
                arrivals[len(newest)].append(now)
                newest.append(token)
        sequences, wanted = list(range(len(prompts))), [True] * len(prompts)
        for index in range(tokens - 1):
            newest = decode(newest, [len(prompt) + index for prompt in prompts], sequences, wanted).tolist()
            now = time.monotonic()
            for times in arrivals:
                times.append(now)
        return arrivals

    yield generate


def about(cell: Cell) -> dict[str, str]:
    return {"llama_cpp_python": llama_cpp.__version__, **settings(cell.weights)}


if __name__ == "__main__":
    run(load, about)
