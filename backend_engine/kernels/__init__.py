"""Kernels over the slots: Triton for CUDA, and a vectorised twin in torch that says the same everywhere else."""
