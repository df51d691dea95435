"""Small tokenizers of the kinds that models have, trained on a few lines."""

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from lamina.models.directory import ModelDirectory, find

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It doesn't stop: it runs, and runs, and runs.",
    "def main() -> None:\n    for i in range(10):\n        print(i)  # üben macht den Meister",
    "你好,世界。今天天气很好。 こんにちは世界。 Привет, мир! 😀😃👩‍👩‍👧 naïve café",
] * 20
SPECIAL = ["<unk>", "<s>", "</s>"]


def byte_level() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["ADDED"])
    return tokenizer


def unigram() -> tokenizers.Tokenizer:
    """Make a tokenizer like sentencepiece's unigram models with a Metaspace decoder (T5 and others)."""
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def byte_fallback() -> tokenizers.Tokenizer:
    """Make a tokenizer like Llama 2's: spaces are ▁, unknown characters are spelt in bytes, and one leading space is
    stripped."""
    trained = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=SPECIAL + bytes_, show_progress=False)
    trained.train_from_iterator([text for text in CORPUS if text.isascii()], trainer)
    parts = json.loads(trained.to_str())
    parts["model"].update(byte_fallback=True, fuse_unk=True)
    parts["added_tokens"] = parts["added_tokens"][: len(SPECIAL)]
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(parts))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def crossing() -> tokenizers.Tokenizer:
    """Byte-level, with tokens that end one character and begin the next: no token ends where a character does."""
    parts = json.loads(byte_level().to_str())
    vocabulary = parts["model"]["vocab"]
    parts["model"]["merges"] = [["\u00a9", "\u00c3"], ["\u00a4", "\u00e4"]]
    for left, right in parts["model"]["merges"]:
        vocabulary[left + right] = len(vocabulary)
    parts["added_tokens"] = parts["added_tokens"][: len(SPECIAL)]
    return tokenizers.Tokenizer.from_str(json.dumps(parts))


KINDS = {"byte_level": byte_level, "unigram": unigram, "byte_fallback": byte_fallback, "crossing": crossing}


def save(path: Path, backend: tokenizers.Tokenizer, **settings: Any) -> ModelDirectory:
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", **settings
    )
    fast.save_pretrained(path)
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 2}))
    return find(path, weights=False)
