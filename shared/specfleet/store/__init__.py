"""FeatureStore: where captured tensors live between capture and training."""
