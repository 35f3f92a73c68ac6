"""What runs the exchange beside a backward pass, with any wrapper: groups, lanes, residuals, checkpoints.

May import: ``core``, the settings (``config``, ``schedule``, ``build``, ``saving``) and ``torch.distributed``. It knows
neither DDP's buckets nor Lightning.
"""
