"""The commands of `vllm-medusa`, one a file: each is a few lines over the module that does the work."""
