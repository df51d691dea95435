"""Where KV is, and which KV moves. Pure: no clock, no sockets, no tensors."""
