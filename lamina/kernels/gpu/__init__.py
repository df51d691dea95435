"""Attention, append and merge kernels for NVIDIA GPUs in Triton.

Nothing here imports triton or cupy until a kernel is compiled or run.
"""
