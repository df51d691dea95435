"""Estimates how long slices and attention take on given hardware, and finds the pools that serve a model best.

``hardware`` is the catalogue, ``models`` has the shapes of models, ``gemm`` and ``cost`` are the cost model, ``store``
keeps its fits, ``planner`` searches. Nothing here runs a model or imports torch.
"""
