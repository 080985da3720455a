"""The CUDA kernels on a CPU, from the very PTX that NVRTC emits, with a detector of races."""
