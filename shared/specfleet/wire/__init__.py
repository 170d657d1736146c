"""Generated from protos/ by scripts/proto.sh. Do not edit."""
