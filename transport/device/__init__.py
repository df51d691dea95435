"""Inboxes in GPU memory and doorbells polled by a GPU. Imports CuPy only when used."""
