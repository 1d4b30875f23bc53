"""What needs a CUDA device: copies to and from it, and a stand-in for what vLLM does for them."""
