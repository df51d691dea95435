"""Where a compute worker keeps weights and runs slices: on the CPU, or on a GPU, behind one protocol."""
