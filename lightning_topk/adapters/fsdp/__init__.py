"""The FSDP2 adapter: turns shards into jobs for the lane."""
