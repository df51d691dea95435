"""Messages that GPUs read and write themselves: inboxes in GPU memory, slots and doorbells polled by a GPU.

CuPy is imported only when used.
"""
