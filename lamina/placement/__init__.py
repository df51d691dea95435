"""Where KV lives. Pure: no clock, no sockets, no tensors."""
