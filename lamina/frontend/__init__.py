"""Converts prompts to token ids and decides where a generated text ends."""
