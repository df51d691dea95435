"""Attention kernels for NVIDIA cards in Triton, and doorbells polled on the device.

Nothing here imports triton or cupy until a kernel is compiled or run.
"""
