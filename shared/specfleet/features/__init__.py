"""Feature sets (docs/feature-sets.md): captured hidden states of a prompt set in files, for any number of runs and epochs.

Nothing here imports torch, except to hand out or take in tensors.
"""
