"""From conversation files to prompt sets: reading, rendering, loss masks, shards, vocabulary maps. No torch."""
