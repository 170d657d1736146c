"""The capture service: runs the frozen target over claimed prompts and publishes its hidden states."""
