"""The adapters: DDP, FSDP2 and Lightning pass gradients to the runtime. :mod:`.lightning` alone imports Lightning."""
