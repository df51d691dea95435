"""Reads Hugging Face model directories: configuration, tokenizer, chat template and weights.

``directory`` and ``tokenizer`` import neither torch nor transformers, so that the engine starts fast; ``config`` and
``weights`` do.
"""
