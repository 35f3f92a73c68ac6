"""What runs the exchange beside a backward pass, with any wrapper: groups, lanes, residuals, optimizers.

May import: ``core``, the settings (``config``, ``schedule``, ``build``), ``volume`` and ``torch.distributed``. It knows
neither DDP nor Lightning.
"""
