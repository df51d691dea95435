"""Decides which requests and tokens run next, in which lane. Pure: no clock, no sockets, no tensors."""
