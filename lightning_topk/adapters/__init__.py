"""The adapters: DDP, FSDP2 and Lightning pass gradients to the runtime.

May import: everything below. :mod:`.lightning` alone imports Lightning.
"""
