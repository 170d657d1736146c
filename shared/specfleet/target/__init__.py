"""The frozen target: facts and hashes (torch-free), weights, and a forward pass with capture."""
