"""Triton kernels other than attention's, and what all kernels need from the machine (runtime)."""
