"""The benchmarks that need a CUDA device, and a replacement for the part of vLLM that copies to and from the device."""
