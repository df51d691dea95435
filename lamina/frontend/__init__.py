"""From text to token ids, and when a text ends."""
