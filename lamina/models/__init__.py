"""Reads Hugging Face model directories: configuration, tokenizer, chat template and weights.

``directory`` imports neither torch nor transformers, so that the engine starts fast; ``pretrained`` does.
"""

from lamina.output import quiet_imports

quiet_imports()
