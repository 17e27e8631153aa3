"""A checkpoint's tensors, as each kind of kernels reads them."""
