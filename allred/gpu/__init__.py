"""GPUs: binding of ranks to GPUs, arrays of any framework on a GPU, streams, kernels and arithmetic."""
