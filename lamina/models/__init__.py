"""Hugging Face model directories: what they hold, their tokenizer, and their weights.

``directory`` and ``tokenizer`` import neither torch nor transformers, so that the engine starts fast; ``config`` and
``weights`` do.
"""
