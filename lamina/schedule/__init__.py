"""Which tokens run next. Pure: no clock, no sockets, no tensors."""
