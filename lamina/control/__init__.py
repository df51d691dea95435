"""The control plane: messages between the engine, its workers and its frontends."""
