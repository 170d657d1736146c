"""Real SGLang servers: starting one, talking to one. Torch-free; SGLang itself is never imported here."""
