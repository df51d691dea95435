"""Where a memory worker keeps K and V and runs attention: on the CPU, or on a GPU, behind one protocol."""
