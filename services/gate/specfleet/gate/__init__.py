"""The gate service: exports drafts and proves that what was trained is what gets served."""
