"""Planning: what hardware offers and costs, how long slices and attention take on it, which pools serve a model best.

``hardware`` is the catalogue, ``models`` the shapes of models, ``gemm`` and ``cost`` the cost model, ``store`` keeps
its fits, ``planner`` searches. Nothing here runs a model or imports torch.
"""
