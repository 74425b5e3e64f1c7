"""What `vllm-medusa doctor` looks at: the installation, the machine, heads with their model, and a try."""
