"""Conversations answered anew by the target: a draft learns best from the words its target would say."""
