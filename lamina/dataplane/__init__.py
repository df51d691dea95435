"""The data plane: messages with q, k, v and partials between workers, over links."""
