"""What computes a step: one runner for each kind of kernels, and the sampler."""
