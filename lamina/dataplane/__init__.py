"""The data plane: messages of q, k, v and partials between workers, over links."""
