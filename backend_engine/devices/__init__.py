"""Where forwards run: a CPU, a CUDA device, or a simulated one with known times."""
