"""Doorbells and memory of a GPU. Imports CuPy only when used."""
