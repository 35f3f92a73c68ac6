"""What runs the exchange beside a backward pass, with any wrapper: groups, lanes, residuals, checkpoints.

May import: ``core``, the settings (``config``, ``recipe``, ``schedule``, ``build``) and ``torch.distributed``. It knows
neither DDP's buckets nor Lightning.
"""
