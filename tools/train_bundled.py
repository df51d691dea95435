"""Trains the bundled model: ``python tools/train_bundled.py OUT [--minutes 35] [--threads 1]``.

A Llama of 1.9 million parameters learns the Python source of the standard library, which every machine that can run
this script has. It learns what Python looks like and nothing else: it exists so that a first run shows plausible
text without a download. OUT becomes an ordinary Hugging Face model directory.

Tokenizer, split, initial weights and order of the batches follow from the seed. The learning rate follows the share
of ``--minutes`` that has passed, so the number of steps, and with it the last digits of the weights, depend on the
machine; ``--steps`` fixes the number of steps instead.
"""

import argparse
import hashlib
import math
import platform
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
VOCAB_SIZE = 2048
CONTEXT = 1024
TOKENS_PER_STEP = 4096
LONG_SHARE = 0.25  # the last share of the training uses sequences of the full context length
SHORT = 256  # length of the sequences before that
LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "pydoc_data", "encodings", "__pycache__"}
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ '\\ndef ' + message['content'].strip() + '\\n\\n\\n' }}"
    "{% else %}{{ '# ' + message['content'].strip().replace('\\n', '\\n# ') + '\\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '\\ndef' }}{% endif %}"
)

MODEL_CARD = """---
license: apache-2.0
language: code
library_name: transformers
---
# The model that comes with Lamina

A Llama of {parameters:,} parameters (4 layers, hidden size 192, 4 query and 2 key/value heads of 64, tied embeddings,
bfloat16) with a byte-level BPE of {vocabulary:,} tokens and a context of {context:,}. It has read the source of
Python's standard library and nothing else.

**What it is for.** A first run of Lamina that shows text without a download, and tests of the whole path with real
weights. It continues Python code with the right shape: names, indentation, docstrings, calls that look like the
library's. It knows nothing, follows no instructions, and its code rarely does what its names say.

**Chat.** The template makes every message a comment and starts a `def` below it; the reply is the rest of that
function, without the `def`. The model does not answer: it writes what might stand under such a comment.

**Data.** The `.py` files of Python {python}'s standard library, without tests, encoding tables and documentation
topics: {training_tokens:,} tokens, and {held_out_tokens:,} of other files held out. That text is under the Python
Software Foundation License Version 2; these weights are under Lamina's licence, Apache-2.0.

**Training.** {steps:,} steps of 4,096 tokens, {tokens_seen:,} in all, in {minutes} minutes on one thread of a CPU.
Held-out loss: {held_out_nats_per_token} nats per token at {held_out_bytes_per_token} bytes per token, which is
{bits_per_byte} bits per byte.

**To make it again:** `python tools/train_bundled.py OUT --steps {steps}`. The learning rate of these weights
followed the clock, so a second run gives a model like it, not the same one.
"""


def read_sources(root: Path) -> tuple[list[str], list[str]]:
    """Source files under ``root`` as (training texts, held-out texts); a file is held out by the hash of its path."""
    train: list[str] = []
    held_out: list[str] = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if LEFT_OUT & set(name.parts):
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        bucket = hashlib.sha256(name.as_posix().encode()).digest()[0]
        (held_out if bucket < 8 else train).append(text)
    return train, held_out


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """A byte-level BPE of VOCAB_SIZE tokens; token 0 separates documents."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> Tensor:
    """All texts as one int64 row, each after the separator."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    ids = [token for encoding in tokenizer.encode_batch(texts) for token in (end, *encoding.ids)]
    return torch.tensor(ids)


def new_model() -> LlamaForCausalLM:
    """The untrained network, float32."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=192,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        initializer_range=0.02,
    )
    return LlamaForCausalLM(config)


def batches(data: Tensor, length: Callable[[], int], generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (inputs, targets), int64 [TOKENS_PER_STEP // length, length]; an epoch takes every window once."""
    while True:
        offset = int(torch.randint(CONTEXT, (), generator=generator))
        windows = (len(data) - offset - 1) // CONTEXT
        order = torch.randperm(windows, generator=generator).tolist()
        per_step = TOKENS_PER_STEP // CONTEXT
        for first in range(0, len(order) - per_step + 1, per_step):
            starts = [offset + CONTEXT * window for window in order[first : first + per_step]]
            size = length()
            x = torch.stack([data[s : s + CONTEXT] for s in starts]).view(-1, size)
            y = torch.stack([data[s + 1 : s + 1 + CONTEXT] for s in starts]).view(-1, size)
            yield x, y


def optimizers(model: LlamaForCausalLM) -> list[tuple[torch.optim.Optimizer, float]]:
    """(optimizer, peak learning rate): Muon for the matrices inside the layers, AdamW for embedding and norms."""
    inside = [p for name, p in model.named_parameters() if p.ndim == 2 and ".layers." in name]
    rest = [p for name, p in model.named_parameters() if p.ndim != 2 or ".layers." not in name]
    return [
        (torch.optim.Muon(inside, lr=0.02, momentum=0.95, weight_decay=0.01), 0.02),
        (torch.optim.AdamW(rest, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.01), 3e-3),
    ]


def rate(progress: float) -> float:
    """Share of the peak learning rate at ``progress`` in [0, 1]: warm-up, then cosine to 2%."""
    warm_up = 0.02
    if progress < warm_up:
        return max(progress, 1e-3) / warm_up
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (progress - warm_up) / (1 - warm_up)))


def loss_of(model: LlamaForCausalLM, x: Tensor, y: Tensor) -> Tensor:
    """Mean cross entropy in nats per token, computed in bfloat16 where autocast allows."""
    with torch.autocast(x.device.type, torch.bfloat16):
        logits = model(x, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), y.flatten())


@torch.no_grad()
def evaluate(model: LlamaForCausalLM, data: Tensor) -> float:
    """Mean cross entropy over up to 64 windows of the held-out text."""
    windows = min(64, (len(data) - 1) // CONTEXT)
    losses = [
        loss_of(model, data[None, s : s + CONTEXT], data[None, s + 1 : s + 1 + CONTEXT])
        for s in range(0, windows * CONTEXT, CONTEXT)
    ]
    return float(torch.stack(losses).mean())


def train(model: LlamaForCausalLM, data: Tensor, seed: int, minutes: float, steps: int | None) -> int:
    """Trains in place; returns the number of steps taken."""
    parts = optimizers(model)
    began, progress, step = time.monotonic(), 0.0, 0
    stream = batches(data, lambda: CONTEXT if progress > 1 - LONG_SHARE else SHORT, torch.Generator().manual_seed(seed))
    model.train()
    while progress < 1:
        x, y = next(stream)
        loss = loss_of(model, x, y)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, peak in parts:
            optimizer.param_groups[0]["lr"] = peak * rate(progress)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1
        elapsed = time.monotonic() - began
        progress = step / steps if steps else elapsed / (60 * minutes)
        if step % 50 == 0:
            speed = step * TOKENS_PER_STEP / elapsed
            print(f"step {step:5d}  {progress:6.1%}  loss {loss.item():.3f}  {speed:6.0f} tokens/s", flush=True)
    model.train(False)
    return step


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Writes the directory as ``save_pretrained`` does, weights in bfloat16."""
    model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=0, pad_token_id=0)  # type: ignore[no-untyped-call]
    model.bfloat16().save_pretrained(out)
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
    fast.save_pretrained(out)
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    (out / "model.safetensors").chmod(0o644)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=35.0)
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)

    train_texts, held_out_texts = read_sources(Path(sysconfig.get_paths()["stdlib"]))
    tokenizer = train_tokenizer(train_texts)
    data, held_out = encode(tokenizer, train_texts), encode(tokenizer, held_out_texts)
    model = new_model()
    print(f"{len(data)} tokens, {len(held_out)} held out, {model.num_parameters()} parameters", flush=True)
    began = time.monotonic()
    steps = train(model, data, args.seed, args.minutes, args.steps)
    minutes = (time.monotonic() - began) / 60
    loss = evaluate(model, held_out)
    bytes_per_token = sum(len(text.encode()) for text in held_out_texts) / len(held_out)
    card = MODEL_CARD.format(
        parameters=model.num_parameters(),
        vocabulary=VOCAB_SIZE,
        context=CONTEXT,
        python=platform.python_version(),
        training_tokens=len(data),
        held_out_tokens=len(held_out),
        steps=steps,
        tokens_seen=steps * TOKENS_PER_STEP,
        minutes=round(minutes),
        held_out_nats_per_token=round(loss, 2),
        held_out_bytes_per_token=round(bytes_per_token, 2),
        bits_per_byte=round(loss / math.log(2) / bytes_per_token, 2),
    )
    save(model, tokenizer, args.out)
    (args.out / "README.md").write_text(card, encoding="utf-8")
    print(f"{steps} steps in {minutes:.1f} minutes, held-out loss {loss:.3f} nats per token, written to {args.out}")


if __name__ == "__main__":
    main()
