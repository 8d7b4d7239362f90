"""Triton kernels, one idea a file: tensors in, tensors out."""
